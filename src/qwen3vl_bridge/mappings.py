"""THE weight table: every parameter of Qwen3-VL, Hugging Face on one side, Megatron on the other.

What lives here: names, shapes (as symbols) and how the two sides relate. Data only, standard library only, so that
a converter can read it without importing torch or Megatron. What may not: tensors, files, process groups.
`bridge.py` turns the rows into Megatron-Bridge mappings, `checkpoint/plan.py` into byte ranges; neither adds a name.

Megatron names are those of the Transformer Engine layer spec, which checkpoints on disk use. A `*` stands for an
index (layer, merger); it is the same index on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

Shape = tuple[str | int, ...]


@dataclass(frozen=True)
class Row:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    Attributes:
        megatron: Megatron parameter name, Transformer Engine spelling.
        hf: names of its Hugging Face tensors, in the order `parts` names them.
        shapes: shape of each Hugging Face tensor; a string names an entry of `dimensions`.
        index: what `*` counts ("text_layers", "vision_layers", "deepstack_taps"), or None.
        condition: key of `dimensions` that must be true for the row to exist, or None.
        replicated: the parameter is a plain torch one, whole on every tensor-parallel rank.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    index: str | None = None
    condition: str | None = None
    replicated: bool = False

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the tensors an fsdp_dtensor checkpoint keeps the parameter in, equal parts along dimension 0."""
        return (self.megatron,)

    def at(self, index: int) -> Row:
        """This row with `*` replaced by `index` on both sides."""
        return replace(
            self,
            megatron=self.megatron.replace("*", str(index)),
            hf=tuple(name.replace("*", str(index)) for name in self.hf),
            index=None,
        )

    def numbers(self, dimensions: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors as numbers."""
        return tuple(tuple(dimensions[d] if isinstance(d, str) else d for d in shape) for shape in self.shapes)


class Copy(Row):
    """One tensor, the same on both sides."""


class QKV(Row):
    """Three tensors q, k, v; Megatron interleaves them by query group: [q heads of the group, its k, its v] ..."""


class ConcatenatedQKV(Row):
    """One tensor [q; k; v]; Megatron interleaves it by head: [q, k, v of head 0], [q, k, v of head 1] ..."""


class GatedMLP(Row):
    """Two tensors gate, up; Megatron stacks them [gate; up]. An fsdp_dtensor checkpoint stores them apart."""

    @property
    def stored(self) -> tuple[str, ...]:
        """The gate under the suffix `_w`, the up projection under `_v`."""
        return f"{self.megatron}_w", f"{self.megatron}_v"


_TEXT = "language_model.decoder.layers.*."
_HF_TEXT = "model.language_model.layers.*."
_VISION = "vision_model.decoder.layers.*."
_HF_VISION = "model.visual.blocks.*."


def _text(kind: type[Row], megatron: str, hf: tuple[str, ...], *shapes: Shape, condition: str | None = None) -> Row:
    return kind(_TEXT + megatron, tuple(_HF_TEXT + name for name in hf), shapes, "text_layers", condition)


def _vision(kind: type[Row], megatron: str, hf: str, shape: Shape) -> Row:
    return kind(_VISION + megatron, (_HF_VISION + hf,), (shape,), "vision_layers")


def _affine(
    megatron: str, hf: str, weight: Shape, *, index: str | None = None, replicated: bool = False
) -> tuple[Row, ...]:
    """Rows of a module with a weight and a bias as long as the weight's first dimension."""
    return tuple(
        Copy(f"{megatron}.{suffix}", (f"{hf}.{suffix}",), (shape,), index, replicated=replicated)
        for suffix, shape in (("weight", weight), ("bias", weight[:1]))
    )


def _merger(megatron: str, hf: str, norm: str, index: str | None = None) -> tuple[Row, ...]:
    return (
        *_affine(f"{megatron}.patch_norm", f"{hf}.norm", (norm,), index=index),
        *_affine(f"{megatron}.linear_fc1", f"{hf}.linear_fc1", ("v_merged", "v_merged"), index=index),
        *_affine(f"{megatron}.linear_fc2", f"{hf}.linear_fc2", ("hidden", "v_merged"), index=index),
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
        index="deepstack_taps",
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
    _text(
        QKV,
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        ("q",),
        ("kv",),
        ("kv",),
        condition="attention_bias",
    ),
    _text(Copy, "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("head_dim",)),
    _text(Copy, "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("head_dim",)),
    _text(Copy, "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ("hidden", "q")),
    Copy(
        "language_model.decoder.final_layernorm.weight",
        ("model.language_model.norm.weight",),
        (("hidden",),),
    ),
    Copy("language_model.output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),), condition="untied"),
)

DENSE_MLP_ROWS: tuple[Row, ...] = (
    _text(Copy, "mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), ("hidden",)),
    _text(
        GatedMLP,
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("ffn", "hidden"),
        ("ffn", "hidden"),
    ),
    _text(Copy, "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ("hidden", "ffn")),
)

DENSE_ROWS: tuple[Row, ...] = VISION_ROWS + TEXT_ROWS + DENSE_MLP_ROWS

# Where a layer spec has no fused norm-and-linear module, its norms are modules of their own.
_LOCAL_NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def local_name(name: str) -> str:
    """The local layer spec's name of a dense parameter given in Transformer Engine spelling."""
    for fused, alone in _LOCAL_NAMES:
        name = name.replace(fused, alone)
    return name


def expand(rows: tuple[Row, ...], dimensions: Mapping[str, int]) -> Iterator[Row]:
    """The rows a model of these dimensions really has, one per Megatron parameter, no `*` left.

    Args:
        rows: rows of the table, with `*`.
        dimensions: from `dimensions_of`.
    """
    for row in rows:
        if row.condition is not None and not dimensions[row.condition]:
            continue
        if row.index is None:
            yield row
        else:
            yield from (row.at(i) for i in range(dimensions[row.index]))


def parameter_count(rows: tuple[Row, ...], dimensions: Mapping[str, int]) -> int:
    """Number of parameters of a model of these dimensions, without building it."""
    return sum(math.prod(shape) for row in expand(rows, dimensions) for shape in row.numbers(dimensions))


def dimensions_of(config: Mapping) -> dict[str, int]:
    """The numbers that the table's symbols stand for.

    Args:
        config: a Qwen3-VL `config.json` as a mapping (`text_config`, `vision_config`, `tie_word_embeddings`).

    Raises:
        KeyError: the mapping lacks a field; the message names it.
    """
    text, vision = config["text_config"], config["vision_config"]
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    return {
        "text_layers": text["num_hidden_layers"],
        "vision_layers": vision["depth"],
        "deepstack_taps": len(vision["deepstack_visual_indexes"]),
        "vocab": text["vocab_size"],
        "hidden": text["hidden_size"],
        "ffn": text["intermediate_size"],
        "head_dim": head_dim,
        "heads": text["num_attention_heads"],
        "kv_heads": kv_heads,
        "q": text["num_attention_heads"] * head_dim,
        "kv": kv_heads * head_dim,
        "attention_bias": int(bool(text.get("attention_bias", False))),
        "untied": int(not config.get("tie_word_embeddings", False)),
        "v_hidden": vision["hidden_size"],
        "v_heads": vision["num_heads"],
        "v_qkv": 3 * vision["hidden_size"],
        "v_ffn": vision["intermediate_size"],
        "v_merged": vision["hidden_size"] * vision["spatial_merge_size"] ** 2,
        "v_positions": vision["num_position_embeddings"],
        "v_channels": vision.get("in_channels", 3),
        "v_patch": vision["patch_size"],
        "v_temporal_patch": vision["temporal_patch_size"],
    }
