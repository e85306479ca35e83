"""The weight table of Qwen3-VL: maps every parameter between Hugging Face and Megatron.

Megatron names are those of the Transformer Engine layer spec, which checkpoints on disk use. A `*` stands for an index
(layer, merger, expert); it is the same index on both sides. Dense and MoE models share the table: a model has the rows
of its dense layers and those of its MoE layers.
"""

from __future__ import annotations

from qwen3vl_bridge.weights.rows import (
    OUTPUT_LAYER,
    QKV,
    VISION_ROWS,
    Copy,
    ExpertLayout,
    Shape,
    WeightRow,
    dense_mlp_rows,
    merger_rows,
    moe_rows,
)

_TEXT = "language_model.decoder.layers.*."
_HF_TEXT = "model.language_model.layers.*."


def _text(kind: type[WeightRow], megatron: str, hf: tuple[str, ...], *shapes: Shape) -> WeightRow:
    return kind(_TEXT + megatron, tuple(_HF_TEXT + name for name in hf), shapes, ("text_layers",))


DEEPSTACK_ROWS = merger_rows(
    "vision_model.decoder.deepstack_merger_list.*",
    "model.visual.deepstack_merger_list.*",
    "v_merged",
    indices=("deepstack_mergers",),
)

TEXT_ROWS: tuple[WeightRow, ...] = (
    Copy(
        "language_model.embedding.word_embeddings.weight",
        ("model.language_model.embed_tokens.weight",),
        (("vocab", "hidden"),),
    ),
    _text(Copy, "self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), ("hidden",)),
    _text(
        QKV,
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ("q", "hidden"),
        ("kv", "hidden"),
        ("kv", "hidden"),
    ),
    _text(Copy, "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("head_dim",)),
    _text(Copy, "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("head_dim",)),
    _text(Copy, "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ("hidden", "q")),
    Copy("language_model.decoder.final_layernorm.weight", ("model.language_model.norm.weight",), (("hidden",),)),
    Copy(f"{OUTPUT_LAYER}.weight", ("lm_head.weight",), (("vocab", "hidden"),), condition="untied"),
)


def table(experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> tuple[WeightRow, ...]:
    """The whole table, for a checkpoint with the given format of experts."""
    mlp = dense_mlp_rows(_TEXT, _HF_TEXT, "dense_layers") + moe_rows(_TEXT, _HF_TEXT, "moe_layers", experts=experts)
    return VISION_ROWS + DEEPSTACK_ROWS + TEXT_ROWS + mlp


TABLE = table()
