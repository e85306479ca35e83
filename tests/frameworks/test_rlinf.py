"""RLinf's supervised training of Qwen3-VL (`megatron.mbridge`): fields of a TransformerConfig, a packed row or rows of
tokens without labels, loss outside of the model.

Sources: rlinf/hybrid_engines/megatron/{megatron_model_manager,utils}.py, rlinf/workers/sft/megatron_vlm_sft_worker.py,
rlinf/config.py (build_transformer_config), examples/sft/config/qwen3_vl_moe_megatron_sft_vlm.yaml.
"""

from dataclasses import fields
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, init_method_normal, scaled_init_method_normal, unwrap_model

from tests.checkpoint.support import hf_tensors
from tests.frameworks import support
from tests.frameworks.support import Built, Truth


def transformer_config(text: Any, **changes: Any) -> TransformerConfig:
    """As build_transformer_config, of the YAML file and config.json's text_config; every other field its default.

    But for Transformer Engine's (transformer_impl, moe_permute_fusion, gradient_accumulation_fusion), float32, and the
    dense layers of the tiny model with experts, which the released ones don't have (moe_layer_freq, ffn_hidden_size).
    """
    experts = getattr(text, "num_experts", None)
    dense = getattr(text, "mlp_only_layers", [])
    settings = dict(
        **support.ONE_GPU, num_layers=text.num_hidden_layers, hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads, num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim, attention_dropout=text.attention_dropout, hidden_dropout=0.0,
        layernorm_epsilon=text.rms_norm_eps, normalization="RMSNorm", qk_layernorm=True, gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, add_qkv_bias=False, rotary_interleaved=False,
        moe_layer_freq=[int(n not in dense) for n in range(text.num_hidden_layers)],
        ffn_hidden_size=text.intermediate_size,
        init_method=init_method_normal(0.008),
        output_layer_init_method=scaled_init_method_normal(0.008, text.num_hidden_layers),
        attention_softmax_in_fp32=True, apply_rope_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=True, recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1, deallocate_pipeline_outputs=False, variable_seq_lengths=True, batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="aux_loss", num_moe_experts=experts,
        moe_ffn_hidden_size=getattr(text, "moe_intermediate_size", None), pipeline_dtype=torch.float32,
        moe_router_topk=getattr(text, "num_experts_per_tok", 2), transformer_impl="local",
    )  # fmt: skip
    return TransformerConfig(**settings | changes)


def make_manager(folder, *, ddp: bool = False, **changes: Any) -> Built:
    """As setup_mbridge_model_and_optimizer."""
    bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=True)
    provider = bridge.to_megatron_provider(load_weights=True)
    kept = {name: getattr(provider, name) for name in ("mrope_section", "position_embedding_type")}
    config = transformer_config(bridge.hf_pretrained.config.text_config, **changes)
    for field in fields(provider):
        if hasattr(config, field.name):
            setattr(provider, field.name, getattr(config, field.name))
    for name, value in kept.items():
        setattr(provider, name, value)
    provider.vision_config._attn_implementation = "flash_attention_2"
    provider.freeze_language_model = provider.freeze_vision_model = provider.freeze_vision_projection = False
    provider.finalize()
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=False, check_for_nan_in_grad=True, grad_reduce_in_fp32=True
    )
    config.finalize()
    return Built(bridge, provider, provider.provide_distributed_model(ddp_config=config, wrap_with_ddp=ddp))


@pytest.fixture(scope="module")
def manager(folder) -> Built:
    return make_manager(folder)


def prepare_batch(truth: Truth) -> dict[str, torch.Tensor]:
    """Rows with padding on the left, labels and the mask of what is trained, both shifted."""
    length = max(truth.lengths) + 3
    padding = [(length - one, 0) for one in truth.lengths]
    rows = {
        "input_ids": [sample.ids for sample in truth.samples],
        "attention_mask": [torch.ones_like(sample.ids, dtype=torch.bool) for sample in truth.samples],
        "labels": [F.pad(sample.ids[1:], (0, 1)) for sample in truth.samples],
        "loss_mask": [F.pad(torch.ones_like(sample.ids[1:]), (0, 1)).bool() for sample in truth.samples],
    }
    return {
        name: torch.stack([F.pad(one, pad) for one, pad in zip(values, padding, strict=True)])
        for name, values in rows.items()
    }


def custom_forward(model, batch: dict[str, torch.Tensor], truth: Truth, *, pack: bool) -> list[torch.Tensor]:
    """Loss of each sample's tokens: logits are divided in place, and cross-entropy is RLinf's own call."""
    mask = batch["attention_mask"]
    samples = {name: [row[kept] for row, kept in zip(values, mask, strict=True)] for name, values in batch.items()}
    if pack:
        lengths = truth.lengths
        rows = {name: support.packed_row(values, lengths) for name, values in samples.items()}
        given = dict(attention_mask=None, packed_seq_params=support.thd(lengths))
    else:
        rows = {name: support.padded_rows(values) for name, values in samples.items()}
        given = dict(attention_mask=rows["attention_mask"])
    logits = model(input_ids=rows["input_ids"], position_ids=None, **given, **truth.pictures)
    logits /= 1.0
    losses = vocab_parallel_cross_entropy(logits.float(), rows["labels"])
    return support.unpacked(losses, truth, lengths) if pack else [
        row[:length] for row, length in zip(losses, truth.lengths, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("pack", [True, False])
def test_rlinf_losses_match_transformers(manager, truth, pack):
    """pack_seqs, which it turns off with pipeline stages."""
    losses = custom_forward(manager.model, prepare_batch(truth), truth, pack=pack)
    expected = [log_probs[:-1] for log_probs in truth.log_probs]
    assert support.worst([-one[:-1] for one in losses], expected) <= support.LOG_PROBS


def test_rlinf_gradients_match_transformers(folder, truth):
    """The mean over the trained tokens of a microbatch, in its schedule."""
    manager = make_manager(folder, ddp=True, moe_aux_loss_coeff=0.0)
    config = get_model_config(manager.model)
    config.finalize_model_grads_func = finalize_model_grads

    def forward_step(iterator, model):
        losses = custom_forward(model, next(iterator), truth, pack=True)
        return torch.cat([one[:-1] for one in losses]), lambda found: (found.mean(), {})

    manager.model.train()
    manager.model.zero_grad_buffer()
    support.schedule(manager.chunks, [prepare_batch(truth)], forward_step, seq_length=64, forward_only=False)
    expected = truth.gradients(lambda log_probs: -torch.cat([one[:-1] for one in log_probs]).mean())
    assert support.gradient_error(manager.bridge, unwrap_model(manager.model), expected) <= support.GRADIENT


def test_rlinf_saved_hf_checkpoint_equals_original(manager, folder, tmp_path):
    manager.bridge.save_hf_pretrained(
        manager.chunks, str(tmp_path), source_path=str(folder), show_progress=False, strict=True
    )
    support.check_exported(hf_tensors(tmp_path), folder)
