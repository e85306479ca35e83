"""The dimensions of one model: values of the weight table's symbols.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Dimensions:
    """Values of the weight table's symbols for one model; `dimensions[name]` is one of the sizes.

    Attributes:
        sizes: by name, those in the rows' shapes, conditions (0 or 1) and counts of heads.
        indices: by name, the values of a `*`.
        family: whose table it is, a name that `registry.family` knows.
    """

    sizes: Mapping[str, int]
    indices: Mapping[str, Sequence[int]]
    family: str

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def with_vocab(self, rows: int) -> Dimensions:
        """The same with a vocabulary of this many rows."""
        return replace(self, sizes={**self.sizes, "vocab": rows})


def text_sizes(
    *,
    vocab: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    untied: bool,
    experts: int = 0,
    chosen_experts: int = 0,
    moe_ffn: int = 0,
) -> dict[str, int]:
    """Sizes of a text model; without experts, none of theirs."""
    return {
        "vocab": vocab,
        "hidden": hidden,
        "ffn": ffn,
        "head_dim": head_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "q": heads * head_dim,
        "kv": kv_heads * head_dim,
        "experts": experts,
        "chosen_experts": chosen_experts,
        "moe_ffn": moe_ffn,
        "moe_gate_up": 2 * moe_ffn,
        "untied": int(untied),
    }


def vision_sizes(vision: Mapping) -> dict[str, int]:
    """Sizes of the vision tower, from only its configuration."""
    return {
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


def indices_of(
    *,
    layers: int,
    moe_layers: Sequence[int] = (),
    experts: int = 0,
    vision_layers: int = 0,
    deepstack_layers: Sequence[int] = (),
) -> dict[str, Sequence[int]]:
    """`Dimensions.indices` of a model with these counts.

    Args:
        layers: of the text model.
        moe_layers: those with experts.
        experts: of each of them.
        vision_layers: of the tower.
        deepstack_layers: those of the tower that have a DeepStack merger.
    """
    return {
        "text_layers": range(layers),
        "dense_layers": tuple(i for i in range(layers) if i not in moe_layers),
        "moe_layers": moe_layers,
        "experts": range(experts),
        "vision_layers": range(vision_layers),
        "deepstack_layers": tuple(deepstack_layers),
        "deepstack_mergers": range(len(deepstack_layers)),
    }
