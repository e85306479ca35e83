"""The weight table of Qwen3-VL: maps every parameter between Hugging Face and Megatron.

Megatron names come from the Transformer Engine layer spec, which checkpoints use. A `*` stands for an index (layer,
merger, expert), which is the same on both sides. Dense and MoE models share the table: a model has the rows of its
dense layers and the rows of its MoE layers.
"""

from __future__ import annotations

from qwen3vl_bridge.weights import rows
from qwen3vl_bridge.weights.rows import ExpertLayout, WeightRow

_LAYER = ("language_model.decoder.layers.*.", "model.language_model.layers.*.")


def table(experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> tuple[WeightRow, ...]:
    """Return the weight table for a checkpoint that stores experts in the format `experts`."""
    return (
        *rows.VISION_ROWS,
        *rows.merger_rows(
            "vision_model.decoder.deepstack_merger_list.*",
            "model.visual.deepstack_merger_list.*",
            "v_merged",
            indices=("deepstack_mergers",),
        ),
        *rows.text_rows(*rows.attention_rows(*_LAYER, "text_layers")),
        *rows.dense_mlp_rows(*_LAYER, "dense_layers"),
        *rows.moe_rows(*_LAYER, "moe_layers", experts=experts),
    )
