"""Model families, each in its own folder, and beside the folders what they share.

Where to look: Hugging Face's and Megatron's name of a weight are a row of a family's `table.py`. From
`AutoBridge.from_hf_pretrained` to the first forward: `bridge.py` reads the configuration into fields, `provider.py`
completes and checks them and builds the model, `model.py` embeds and decodes. From a caller's rows to segments:
`inputs.py`; our own rows are segments when `data/collation.py` makes them. Who refuses a setting: of a `config.json` a
family's `config.py`, with `hf_config.py`; of a provider `refusals.py` and the family's `provider.py`; of a run
`training/run_refusals.py`; of adapters `peft/lora.py`; an argument of the forward `inputs.py`. Vision tokens take the
places of their placeholders in `model.py`, and DeepStack adds its features in `qwen3_vl/model.py`. Padding is known by
the layout (`batch/token_layout.py`): `model.py` passes its mask on, megatron-core's router leaves it out of its map,
and `router.py` balances over what is left. The model returns a loss per token; `training/step.py` has what divides
them.

Legend of shapes in this package: b rows, s local sequence length, h hidden size, d head dimension, N vision patches, M
= N / merge^2 vision tokens, K vision tokens of this rank, t DeepStack features.
"""
