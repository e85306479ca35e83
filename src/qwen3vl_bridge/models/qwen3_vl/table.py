"""THE weight table: every parameter of Qwen3-VL, Hugging Face on one side, Megatron on the other.

What lives here: names, shapes (as symbols) and how the two sides relate. Data only, standard library only, so that a
converter can read it without importing torch or Megatron. What may not: tensors, files, process groups. `bridge.py`
turns the rows into Megatron-Bridge mappings, `checkpoint/planning/plan.py` into byte ranges; neither adds a name.

Megatron names are those of the Transformer Engine layer spec, which checkpoints on disk use. A `*` stands for an
index (layer, merger, expert); it is the same index on both sides. Dense and MoE models share the table: a model has
the rows of its dense layers and those of its MoE layers, whichever it has.
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen3vl_bridge.weights.names import OUTPUT_LAYER, ExpertLayout
from qwen3vl_bridge.weights.rows import QKV, ConcatenatedQKV, Copy, GatedMLP, PackedExpert, Row, Shape

_TEXT = "language_model.decoder.layers.*."
_HF_TEXT = "model.language_model.layers.*."
_VISION = "vision_model.decoder.layers.*."
_HF_VISION = "model.visual.blocks.*."


def _text(kind: type[Row], megatron: str, hf: tuple[str, ...], *shapes: Shape, layers: str = "text_layers") -> Row:
    return kind(_TEXT + megatron, tuple(_HF_TEXT + name for name in hf), shapes, (layers,))


def _vision(kind: type[Row], megatron: str, hf: str, shape: Shape) -> Row:
    return kind(_VISION + megatron, (_HF_VISION + hf,), (shape,), ("vision_layers",))


def _affine(
    megatron: str, hf: str, weight: Shape, *, indices: tuple[str, ...] = (), replicated: bool = False
) -> tuple[Row, ...]:
    """Rows of a module with a weight and a bias as long as the weight's first dimension."""
    return tuple(
        Copy(f"{megatron}.{suffix}", (f"{hf}.{suffix}",), (shape,), indices, replicated=replicated)
        for suffix, shape in (("weight", weight), ("bias", weight[:1]))
    )


def _merger(megatron: str, hf: str, norm: str, indices: tuple[str, ...] = ()) -> tuple[Row, ...]:
    return (
        *_affine(f"{megatron}.patch_norm", f"{hf}.norm", (norm,), indices=indices),
        *_affine(f"{megatron}.linear_fc1", f"{hf}.linear_fc1", ("v_merged", "v_merged"), indices=indices),
        *_affine(f"{megatron}.linear_fc2", f"{hf}.linear_fc2", ("hidden", "v_merged"), indices=indices),
    )


VISION_ROWS: tuple[Row, ...] = (
    *_affine(
        "vision_model.patch_embed.proj",
        "model.visual.patch_embed.proj",
        ("v_hidden", "v_channels", "v_temporal_patch", "v_patch", "v_patch"),
        replicated=True,
    ),
    Copy(
        "vision_model.pos_embed.weight",
        ("model.visual.pos_embed.weight",),
        (("v_positions", "v_hidden"),),
        replicated=True,
    ),
    _vision(Copy, "self_attention.linear_qkv.layer_norm_weight", "norm1.weight", ("v_hidden",)),
    _vision(Copy, "self_attention.linear_qkv.layer_norm_bias", "norm1.bias", ("v_hidden",)),
    _vision(ConcatenatedQKV, "self_attention.linear_qkv.weight", "attn.qkv.weight", ("v_qkv", "v_hidden")),
    _vision(ConcatenatedQKV, "self_attention.linear_qkv.bias", "attn.qkv.bias", ("v_qkv",)),
    _vision(Copy, "self_attention.linear_proj.weight", "attn.proj.weight", ("v_hidden", "v_hidden")),
    _vision(Copy, "self_attention.linear_proj.bias", "attn.proj.bias", ("v_hidden",)),
    _vision(Copy, "mlp.linear_fc1.layer_norm_weight", "norm2.weight", ("v_hidden",)),
    _vision(Copy, "mlp.linear_fc1.layer_norm_bias", "norm2.bias", ("v_hidden",)),
    _vision(Copy, "mlp.linear_fc1.weight", "mlp.linear_fc1.weight", ("v_ffn", "v_hidden")),
    _vision(Copy, "mlp.linear_fc1.bias", "mlp.linear_fc1.bias", ("v_ffn",)),
    _vision(Copy, "mlp.linear_fc2.weight", "mlp.linear_fc2.weight", ("v_hidden", "v_ffn")),
    _vision(Copy, "mlp.linear_fc2.bias", "mlp.linear_fc2.bias", ("v_hidden",)),
    *_merger("vision_model.merger", "model.visual.merger", "v_hidden"),
    *_merger(
        "vision_model.decoder.deepstack_merger_list.*",
        "model.visual.deepstack_merger_list.*",
        "v_merged",
        indices=("deepstack_taps",),
    ),
)

TEXT_ROWS: tuple[Row, ...] = (
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
    Copy(
        "language_model.decoder.final_layernorm.weight",
        ("model.language_model.norm.weight",),
        (("hidden",),),
    ),
    Copy(f"{OUTPUT_LAYER}.weight", ("lm_head.weight",), (("vocab", "hidden"),), condition="untied"),
)

DENSE_MLP_ROWS: tuple[Row, ...] = (
    _text(
        Copy,
        "mlp.linear_fc1.layer_norm_weight",
        ("post_attention_layernorm.weight",),
        ("hidden",),
        layers="dense_layers",
    ),
    _text(
        GatedMLP,
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("ffn", "hidden"),
        ("ffn", "hidden"),
        layers="dense_layers",
    ),
    _text(Copy, "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ("hidden", "ffn"), layers="dense_layers"),
)

MOE_ROWS: tuple[Row, ...] = (
    _text(Copy, "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), ("hidden",), layers="moe_layers"),
    _text(Copy, "mlp.router.weight", ("mlp.gate.weight",), ("experts", "hidden"), layers="moe_layers"),
)

_FC1, _FC2 = f"{_TEXT}mlp.experts.linear_fc1.weight*", f"{_TEXT}mlp.experts.linear_fc2.weight*"
_HF_EXPERTS = f"{_HF_TEXT}mlp.experts."
_EACH_EXPERT = ("moe_layers", "experts")


def _packed_experts(gate_up: Shape, down: Shape, *, transposed: bool) -> tuple[Row, ...]:
    return (
        PackedExpert(
            _FC1, (f"{_HF_EXPERTS}gate_up_proj",), (gate_up,), _EACH_EXPERT, transposed=transposed, gated=True
        ),
        PackedExpert(_FC2, (f"{_HF_EXPERTS}down_proj",), (down,), _EACH_EXPERT, transposed=transposed),
    )


EXPERT_ROWS: Mapping[ExpertLayout, tuple[Row, ...]] = {
    ExpertLayout.INPUT_MAJOR: _packed_experts(("hidden", "moe_gate_up"), ("moe_ffn", "hidden"), transposed=True),
    ExpertLayout.OUTPUT_MAJOR: _packed_experts(("moe_gate_up", "hidden"), ("hidden", "moe_ffn"), transposed=False),
    ExpertLayout.PER_EXPERT: (
        GatedMLP(
            _FC1,
            (f"{_HF_EXPERTS}*.gate_proj.weight", f"{_HF_EXPERTS}*.up_proj.weight"),
            (("moe_ffn", "hidden"), ("moe_ffn", "hidden")),
            _EACH_EXPERT,
        ),
        Copy(_FC2, (f"{_HF_EXPERTS}*.down_proj.weight",), (("hidden", "moe_ffn"),), _EACH_EXPERT),
    ),
}


def table(experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> tuple[Row, ...]:
    """The whole table, for a checkpoint that holds its experts so."""
    return VISION_ROWS + TEXT_ROWS + DENSE_MLP_ROWS + MOE_ROWS + EXPERT_ROWS[experts]


TABLE = table()
