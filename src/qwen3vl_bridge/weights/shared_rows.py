"""Rows of the weight tables that families share: the vision tower's, a text layer's MLP, the experts of a layer."""

from __future__ import annotations

from qwen3vl_bridge.weights.rows import ConcatenatedQKV, Copy, ExpertLayout, GatedMLP, PackedExpert, Row, Shape

_VISION = "vision_model.decoder.layers.*."
_HF_VISION = "model.visual.blocks.*."


def _vision(kind: type[Row], megatron: str, hf: str, shape: Shape) -> Row:
    return kind(_VISION + megatron, (_HF_VISION + hf,), (shape,), ("vision_layers",))


def affine(
    megatron: str, hf: str, weight: Shape, *, indices: tuple[str, ...] = (), replicated: bool = False
) -> tuple[Row, ...]:
    """Rows of a module with a weight and a bias as long as the weight's first dimension."""
    return tuple(
        Copy(f"{megatron}.{suffix}", (f"{hf}.{suffix}",), (shape,), indices, replicated=replicated)
        for suffix, shape in (("weight", weight), ("bias", weight[:1]))
    )


def merger_rows(megatron: str, hf: str, norm: str, indices: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Rows of a patch merger: a norm, and two linear layers with a GELU between."""
    return (
        *affine(f"{megatron}.patch_norm", f"{hf}.norm", (norm,), indices=indices),
        *affine(f"{megatron}.linear_fc1", f"{hf}.linear_fc1", ("v_merged", "v_merged"), indices=indices),
        *affine(f"{megatron}.linear_fc2", f"{hf}.linear_fc2", ("hidden", "v_merged"), indices=indices),
    )


VISION_ROWS: tuple[Row, ...] = (
    *affine(
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
    *merger_rows("vision_model.merger", "model.visual.merger", "v_hidden"),
)


def dense_mlp_rows(megatron: str, hf: str, *indices: str) -> tuple[Row, ...]:
    """Rows of an MLP and the norm before it, of layers with these names: a `*` for each index, a point at the end."""
    return (
        Copy(
            f"{megatron}mlp.linear_fc1.layer_norm_weight",
            (f"{hf}post_attention_layernorm.weight",),
            (("hidden",),),
            indices,
        ),
        GatedMLP(
            f"{megatron}mlp.linear_fc1.weight",
            (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"),
            (("ffn", "hidden"), ("ffn", "hidden")),
            indices,
        ),
        Copy(f"{megatron}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), (("hidden", "ffn"),), indices),
    )


def moe_rows(megatron: str, hf: str, *indices: str, experts: ExpertLayout) -> tuple[Row, ...]:
    """Rows of a router, its experts in this format, and the norm before them; otherwise as `dense_mlp_rows`."""
    return (
        Copy(f"{megatron}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",), (("hidden",),), indices),
        Copy(f"{megatron}mlp.router.weight", (f"{hf}mlp.gate.weight",), (("experts", "hidden"),), indices),
        *_expert_rows(megatron, hf, indices, experts),
    )


def _expert_rows(megatron: str, hf: str, indices: tuple[str, ...], experts: ExpertLayout) -> tuple[Row, ...]:
    fc1, fc2 = (f"{megatron}mlp.experts.linear_{part}.weight*" for part in ("fc1", "fc2"))
    hf, each = f"{hf}mlp.experts.", (*indices, "experts")
    gate_up, down = ("moe_gate_up", "hidden"), ("hidden", "moe_ffn")
    if experts is ExpertLayout.PER_EXPERT:
        half = ("moe_ffn", "hidden")
        return (
            GatedMLP(fc1, (f"{hf}*.gate_proj.weight", f"{hf}*.up_proj.weight"), (half, half), each),
            Copy(fc2, (f"{hf}*.down_proj.weight",), (down,), each),
        )
    turned = experts is ExpertLayout.INPUT_MAJOR
    if turned:
        gate_up, down = gate_up[::-1], down[::-1]
    return (
        PackedExpert(fc1, (f"{hf}gate_up_proj",), (gate_up,), each, transposed=turned, gated=True),
        PackedExpert(fc2, (f"{hf}down_proj",), (down,), each, transposed=turned),
    )
