"""AReaL with `bridge_type=megatron-bridge`: rows with their mask and offsets, adapters in a wrapped model, weights for
the rollout by its own tables of Megatron's names.

Sources: areal/engine/megatron_engine.py, areal/engine/megatron_utils/{packed_context_parallel,megatron}.py, areal/
models/mcore/registry.py, read on 2026-11-28 in commits cbff54d6 of 2026-08-22 and 03aa1c1f. Calls under context
parallelism are in `test_context_parallel.py`.
"""

import re
from collections.abc import Iterator
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.qwen3_vl.table import table
from qwen3vl_bridge.weights.rows import local_name

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.frameworks import support
from tests.frameworks.support import Built, Truth
from tests.peft.test_export import check_logits

ALL = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def make_engine(folder, lora: LoRA | None = None, **changes: Any) -> Built:
    """As make_mcore_model, then _apply_megatron_bridge_lora on wrapped chunks, then _load_model_from_hf."""
    bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=True)
    tf_config = bridge.transformer_config
    assert tf_config.num_query_groups and tf_config.kv_channels and tf_config.hidden_size
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in (support.ONE_GPU | dict(
        virtual_pipeline_model_parallel_size=None, pipeline_dtype=torch.float32,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, recompute_modules=None,
        distribute_saved_activations=None, account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False, overlap_p2p_comm=False,
    ) | changes).items():  # fmt: skip
        setattr(provider, name, value)
    if lora is not None:
        provider.gradient_accumulation_fusion = False
    provider.finalize()
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    chunks = list(provider.provide_distributed_model(ddp_config=config, fp16=False, bf16=False, wrap_with_ddp=True))
    if lora is not None:
        chunks = list(lora(chunks, training=True))
        lora.set_params_to_save(chunks)
    bridge.load_hf_weights(chunks, hf_path=str(folder))
    return Built(bridge, provider, chunks)


@pytest.fixture(scope="module")
def engine(folder) -> Built:
    return make_engine(folder)


def call_of(truth: Truth, multiple: int, padded_to: int = 0) -> tuple[dict[str, Any], list[int]]:
    """As packed_context_parallel_forward with use_model_packed_seq: rows, a mask and offsets that count the padding
    of samples in, which is token 0.

    Lengths are rounded up, and what fills the microbatch is a sample of its own (pad_mb_list).
    """
    lengths = support.padded_lengths(truth.lengths, multiple)
    ids = [torch.nn.functional.pad(s.ids, (0, n - len(s.ids))) for s, n in zip(truth.samples, lengths, strict=True)]
    if padded_to > sum(lengths):
        ids.append(torch.zeros(padded_to - sum(lengths), dtype=torch.long))
        lengths.append(len(ids[-1]))
    mask = support.padded_rows([torch.ones_like(one, dtype=torch.bool) for one in ids])
    call = dict(input_ids=support.padded_rows(ids), attention_mask=mask, position_ids=None, fp32_output=False)
    return call | dict(packed_seq_params=support.thd(lengths), **truth.pictures), lengths


def older_call_of(truth: Truth) -> dict[str, Any]:
    """As it was before its pull request 1608, and as Qwen2.5-VL is still called: rows that nothing says padding of."""
    ids = support.padded_rows([sample.ids for sample in truth.samples])
    return dict(input_ids=ids, attention_mask=None, position_ids=None, packed_seq_params=None, **truth.pictures)


@pytest.mark.parametrize(("multiple", "padded_to"), [(1, 0), (8, 256)])
def test_areal_log_probs_match_transformers(engine, truth, multiple, padded_to):
    texts = Truth(truth.reference, [sample for sample in truth.samples if not sample.pixels])
    for some in (truth, texts):
        call, lengths = call_of(some, multiple, padded_to)
        with torch.no_grad():
            logits = engine.model(**call)
        found = logits[:, : sum(lengths[: len(some.samples)])]
        support.check_packed(found, some, lengths[: len(some.samples)])


def test_areal_log_probs_of_rows_without_mask_match_transformers(engine, truth):
    with torch.no_grad():
        support.check_rows(engine.model(**older_call_of(truth)), truth)


def test_areal_call_raises_if_video_grid_is_given_without_video_pixels(engine, truth):
    """AReaL hands on `video_grid_thw`, and no `pixel_values_videos`."""
    call, _ = call_of(truth, 1)
    with pytest.raises(ValueError, match="video pixels: found 0 patches, expected 32 for 1 video grids"):
        engine.model(**call | dict(pixel_values_videos=None))


def test_areal_finds_gpt_model_as_language_model_attribute(engine):
    """unwrap_to_gpt_model and get_named_parameters."""
    model = unwrap_model(engine.model)
    assert not isinstance(model, GPTModel) and isinstance(model.language_model, GPTModel)
    assert get_transformer_layer_offset(engine.model.config, vp_stage=None) == 0


_NAMES = {
    "language_model.embedding.word_embeddings.weight": "model.language_model.embed_tokens.weight",
    "language_model.decoder.final_layernorm.weight": "model.language_model.norm.weight",
    "language_model.output_layer.weight": "lm_head.weight",
}
# What stands in a layer or merger on either side.
_OF_TEXT = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight", "mlp.router.weight": "mlp.gate.weight",
}  # fmt: skip
_OF_VISION = {
    "self_attention.linear_proj.": "attn.proj.", "self_attention.linear_qkv.layer_norm_": "norm1.",
    "self_attention.linear_qkv.": "attn.qkv.", "mlp.linear_fc1.layer_norm_": "norm2.",
    "mlp.linear_fc": "mlp.linear_fc",
}  # fmt: skip


def to_hf(name: str, weight: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """As convert_qwen3_vl_to_hf and convert_qwen3_vl_moe_to_hf have it: which names, and which layouts."""
    text, heads = config.text_config, config.vision_config.num_heads
    if name in _NAMES:
        yield _NAMES[name], weight
    elif found := re.fullmatch(r"language_model\.decoder\.layers\.(\d+)\.(.+)", name):
        layer, rest = f"model.language_model.layers.{found[1]}.", found[2]
        if rest in _OF_TEXT:
            yield layer + _OF_TEXT[rest], weight
        elif rest == "self_attention.linear_qkv.weight":
            groups = weight.view(text.num_key_value_heads, -1, text.head_dim, text.hidden_size)
            for part, kind in zip(groups.split([groups.shape[1] - 2, 1, 1], 1), "qkv", strict=True):
                yield f"{layer}self_attn.{kind}_proj.weight", part.reshape(-1, text.hidden_size)
        elif found := re.fullmatch(r"mlp\.(experts\.)?linear_fc([12])\.weight(\d*)", rest):
            place = f"{layer}mlp.{found[1] or ''}{found[3] and found[3] + '.'}"
            if found[2] == "2":
                yield f"{place}down_proj.weight", weight
            else:
                yield from zip((f"{place}gate_proj.weight", f"{place}up_proj.weight"), weight.chunk(2), strict=True)
    elif found := re.fullmatch(r"vision_model\.decoder\.layers\.(\d+)\.(.+)", name):
        (old, new), *_ = [pair for pair in _OF_VISION.items() if found[2].startswith(pair[0])]
        if new == "attn.qkv.":
            weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        yield f"model.visual.blocks.{found[1]}.{found[2].replace(old, new)}", weight
    else:
        name = name.replace("vision_model.decoder.deepstack", "vision_model.deepstack").replace("patch_norm", "norm")
        yield re.sub("^vision_model", "model.visual", name), weight


def te_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by the names that they have in Transformer Engine's layers."""
    known = {local_name(row.megatron): row.megatron for row in table()}
    for name, parameter in model.named_parameters():
        pattern, indices = known[re.sub(r"\.\d+\.", ".*.", name)], re.findall(r"\.(\d+)\.", name)
        yield pattern.replace("*", "{}").format(*indices), parameter.detach()


def test_areal_weight_update_gives_hugging_face_names_and_values(engine, folder):
    """_update_weights_from_distributed converts parameters itself, experts one by one as vLLM takes them."""
    config = engine.bridge.hf_pretrained.config
    parameters = te_names(unwrap_model(engine.model))
    found = {one: tensor for name, weight in parameters for one, tensor in to_hf(name, weight, config)}
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if ".experts." in name]:
        whole, layer = stored.pop(name), name.rpartition(".")[0]
        for index, expert in enumerate(whole):
            parts = expert.chunk(2) if name.endswith("gate_up_proj") else [expert]
            kinds = ("gate", "up") if len(parts) == 2 else ("down",)
            stored |= {f"{layer}.{index}.{kind}_proj.weight": one for kind, one in zip(kinds, parts, strict=True)}
    support.check_exported(found, stored)


def test_peft_logits_with_adapter_saved_by_areal_match_model(folder, truth, tmp_path):
    """The base's weights come after the adapters; _save_model_to_hf writes these alone."""
    torch.manual_seed(0)
    lora = LoRA(target_modules=ALL, dim=4, alpha=8, dropout=0.0)
    engine = make_engine(folder, lora)
    adapters = {name: p for name, p in engine.model.named_parameters() if ".adapter." in name}
    assert adapters.keys() == {name for name, p in engine.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.normal_(std=0.05)
        call, lengths = call_of(truth, 1)
        logits = engine.model(**call)[0].split(lengths)
    engine.bridge.save_hf_adapter(
        engine.chunks, path=str(tmp_path), peft_config=lora, base_model_name_or_path=str(folder)
    )
    base = AutoModelForImageTextToText.from_pretrained(folder)
    check_logits(logits, PeftModel.from_pretrained(base, tmp_path), truth.samples)
