"""Weight-table rows that hybrid models share: linear attention, gated attention and the shared expert.

Standard library only. Source of Megatron's names and values: Megatron-Bridge 0.6, qwen35_vl_bridge.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.weights import rows
from qwen3vl_bridge.weights.rows import Dimensions, GatedMLP, GatedQKV, WeightRow, ZeroCentered

# Prefixes of the parameter names of a text layer, in Megatron and in Hugging Face.
TEXT_LAYER = ("language_model.decoder.layers.*.", "model.language_model.layers.*.")
MTP = "language_model.mtp.layers.0."
MTP_LAYER = (f"{MTP}mtp_model_layer.", "mtp.layers.0.")


def ngram_head_sizes(dimensions: Dimensions, index: int) -> Sequence[int]:
    """Return the number of rows in the n-gram table of each hash head of layer `ple_layers[index]`.

    `ple_layers` is the list in `dimensions.indices` of the layers with n-gram embeddings.
    """
    heads = len(dimensions.indices["ngram_heads"])
    return dimensions.indices["ngram_rows"][index * heads : (index + 1) * heads]


def gated_attention_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of full attention with output gates and of the norm before it.

    Arguments are as in `attention_rows`.
    """
    return rows.attention_rows(megatron, hf, *indices, kind=GatedQKV, queries="gated_q")


def linear_attention_rows(megatron: str, hf: str) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of linear attention and of the norm before it. See `attention_rows` for arguments.

    Weights marked `float32` are stored in float32 in released Qwen3.5 checkpoints, and in bfloat16 in Qwen3.6
    checkpoints.
    """
    norm, indices = f"{hf}input_layernorm.weight", ("linear_layers",)
    megatron, hf = f"{megatron}self_attention.", f"{hf}linear_attn."
    qkv = (("query", "l_key"), ("key", "l_key"), ("value", "l_value"))

    def row(kind: type[WeightRow], name: str, other: str, *shape: str | int, **more: Any) -> WeightRow:
        return kind(megatron + name, (other,), (shape,), indices, **more)

    return (
        row(WeightRow, "in_proj.layer_norm_weight", norm, "hidden"),
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


def shared_expert_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of the shared expert and its output gate. See `attention_rows` for arguments."""
    megatron, hf = f"{megatron}mlp.shared_experts.", f"{hf}mlp.shared_expert"
    half = ("shared_ffn", "hidden")
    return (
        GatedMLP(
            f"{megatron}linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), (half, half), indices
        ),
        WeightRow(f"{megatron}linear_fc2.weight", (f"{hf}.down_proj.weight",), (("hidden", "shared_ffn"),), indices),
        WeightRow(f"{megatron}gate_weight", (f"{hf}_gate.weight",), ((1, "hidden"),), indices, replicated=True),
    )
