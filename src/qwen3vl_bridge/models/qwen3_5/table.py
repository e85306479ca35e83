"""The weight table of Qwen3.5-VL: maps every parameter between Hugging Face and Megatron.

Layers have linear or full attention, and a dense MLP or experts. Multi-token prediction (MTP) is one additional layer
with full attention.
"""

from __future__ import annotations

from dataclasses import replace

from qwen3vl_bridge.weights import rows
from qwen3vl_bridge.weights.hybrid_rows import (
    MTP,
    MTP_LAYER,
    TEXT_LAYER,
    gated_attention_rows,
    linear_attention_rows,
    shared_expert_rows,
)
from qwen3vl_bridge.weights.rows import ExpertLayout, WeightRow

# Released Qwen3.5 checkpoints have different expert formats in the layers and in MTP, Qwen3.6 checkpoints do not.
_LAYER_FORMAT = {ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT: ExpertLayout.OUTPUT_MAJOR}
_MTP_FORMAT = {ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT: ExpertLayout.PER_EXPERT}


def _mtp_rows(experts: ExpertLayout) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of multi-token prediction: input norms, a projection, a layer and a final norm."""
    joining = (
        ("eh_proj.weight", "mtp.fc.weight", ("hidden", "hidden_twice")),
        ("enorm.weight", "mtp.pre_fc_norm_embedding.weight", ("hidden",)),
        ("hnorm.weight", "mtp.pre_fc_norm_hidden.weight", ("hidden",)),
        ("final_layernorm.weight", "mtp.norm.weight", ("hidden",)),
    )
    always = (
        *(WeightRow(MTP + name, (other,), (shape,)) for name, other, shape in joining),
        *gated_attention_rows(*MTP_LAYER),
    )
    with_experts = (*rows.moe_rows(*MTP_LAYER, experts=experts), *shared_expert_rows(*MTP_LAYER))
    return (
        *(replace(row, condition="mtp") for row in always),
        *(replace(row, condition="mtp_dense") for row in rows.dense_mlp_rows(*MTP_LAYER)),
        *(replace(row, condition="mtp_experts") for row in with_experts),
    )


def table(experts: ExpertLayout = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT) -> tuple[WeightRow, ...]:
    """Return the weight table for a checkpoint that stores experts in the format `experts`."""
    return (
        *rows.VISION_ROWS,
        *rows.text_rows(*gated_attention_rows(*TEXT_LAYER, "full_layers"), *linear_attention_rows(*TEXT_LAYER)),
        *rows.dense_mlp_rows(*TEXT_LAYER, "dense_layers"),
        *rows.moe_rows(*TEXT_LAYER, "moe_layers", experts=_LAYER_FORMAT.get(experts, experts)),
        *shared_expert_rows(*TEXT_LAYER, "moe_layers"),
        *_mtp_rows(_MTP_FORMAT.get(experts, experts)),
    )
