"""The weight table of Qwen3.5-VL: maps every parameter between Hugging Face and Megatron.

Layers have linear or full attention, and a dense MLP or experts. Multi-token prediction (MTP) is one additional layer
with full attention. Source of Megatron's names and values: Megatron-Bridge 0.6, qwen35_vl_bridge.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qwen3vl_bridge.weights import rows
from qwen3vl_bridge.weights.rows import ExpertLayout, GatedMLP, GatedQKV, WeightRow, ZeroCentered

_LAYER = ("language_model.decoder.layers.*.", "model.language_model.layers.*.")  # in Megatron, in Hugging Face
_MTP = "language_model.mtp.layers.0."
_MTP_LAYER = (f"{_MTP}mtp_model_layer.", "mtp.layers.0.")


def _full_attention_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Return the weight rows of a full-attention layer with output gates, and of its input norm."""
    return rows.attention_rows(megatron, hf, *indices, kind=GatedQKV, queries="gated_q")


def linear_attention_rows() -> tuple[WeightRow, ...]:
    """Return the weight rows of linear attention and of the norm before it.

    Weights marked `float32` are stored in float32 in released Qwen3.5 checkpoints, and in bfloat16 in Qwen3.6
    checkpoints.
    """
    megatron, hf, indices = f"{_LAYER[0]}self_attention.", f"{_LAYER[1]}linear_attn.", ("linear_layers",)
    qkv = (("query", "l_key"), ("key", "l_key"), ("value", "l_value"))

    def row(kind: type[WeightRow], name: str, other: str, *shape: str | int, **more: Any) -> WeightRow:
        return kind(megatron + name, (other,), (shape,), indices, **more)

    return (
        row(WeightRow, "in_proj.layer_norm_weight", f"{_LAYER[1]}input_layernorm.weight", "hidden"),
        WeightRow(
            f"{megatron}in_proj.weight",
            tuple(f"{hf}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            (("l_qkv", "hidden"), ("l_value", "hidden"), ("l_value_heads", "hidden"), ("l_value_heads", "hidden")),
            indices,
            sections=(*qkv, ("z", "l_value"), ("beta", "l_value_heads"), ("alpha", "l_value_heads")),
        ),
        row(WeightRow, "conv1d.weight", f"{hf}conv1d.weight", "l_qkv", 1, "l_conv", sections=qkv),
        row(WeightRow, "A_log", f"{hf}A_log", "l_value_heads", float32=True),
        row(WeightRow, "dt_bias", f"{hf}dt_bias", "l_value_heads"),
        row(ZeroCentered, "out_norm.weight", f"{hf}norm.weight", "l_value_dim", float32=True),
        row(WeightRow, "out_proj.weight", f"{hf}out_proj.weight", "hidden", "l_value"),
    )


def _shared_expert_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Return the weight rows of the shared expert and its output gate."""
    megatron, hf = f"{megatron}mlp.shared_experts.", f"{hf}mlp.shared_expert"
    half = ("shared_ffn", "hidden")
    return (
        GatedMLP(
            f"{megatron}linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), (half, half), indices
        ),
        WeightRow(f"{megatron}linear_fc2.weight", (f"{hf}.down_proj.weight",), (("hidden", "shared_ffn"),), indices),
        WeightRow(f"{megatron}gate_weight", (f"{hf}_gate.weight",), ((1, "hidden"),), indices, replicated=True),
    )


# Released Qwen3.5 checkpoints have different expert formats in the layers and in MTP, Qwen3.6 checkpoints do not.
_LAYER_FORMAT = {ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT: ExpertLayout.OUTPUT_MAJOR}
_MTP_FORMAT = {ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT: ExpertLayout.PER_EXPERT}


def _mtp_rows(experts: ExpertLayout) -> tuple[WeightRow, ...]:
    """Return the weight rows of multi-token prediction: two input norms, a projection, a layer and a final norm."""
    joining = (
        ("eh_proj.weight", "mtp.fc.weight", ("hidden", "hidden_twice")),
        ("enorm.weight", "mtp.pre_fc_norm_embedding.weight", ("hidden",)),
        ("hnorm.weight", "mtp.pre_fc_norm_hidden.weight", ("hidden",)),
        ("final_layernorm.weight", "mtp.norm.weight", ("hidden",)),
    )
    always = (
        *(WeightRow(_MTP + name, (other,), (shape,)) for name, other, shape in joining),
        *_full_attention_rows(*_MTP_LAYER),
    )
    with_experts = (*rows.moe_rows(*_MTP_LAYER, experts=experts), *_shared_expert_rows(*_MTP_LAYER))
    return (
        *(replace(row, condition="mtp") for row in always),
        *(replace(row, condition="mtp_dense") for row in rows.dense_mlp_rows(*_MTP_LAYER)),
        *(replace(row, condition="mtp_experts") for row in with_experts),
    )


def table(experts: ExpertLayout = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT) -> tuple[WeightRow, ...]:
    """Return the weight table for a checkpoint that stores experts in the format `experts`."""
    return (
        *rows.VISION_ROWS,
        *rows.text_rows(*_full_attention_rows(*_LAYER, "full_layers"), *linear_attention_rows()),
        *rows.dense_mlp_rows(*_LAYER, "dense_layers"),
        *rows.moe_rows(*_LAYER, "moe_layers", experts=_LAYER_FORMAT.get(experts, experts)),
        *_shared_expert_rows(*_LAYER, "moe_layers"),
        *_mtp_rows(_MTP_FORMAT.get(experts, experts)),
    )
