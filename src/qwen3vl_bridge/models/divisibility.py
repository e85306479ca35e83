"""What ranks divide among them, and must be able to: for the provider, the planner and the converter.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from qwen3vl_bridge.weights.rows import Dimensions, WeightRow


class Indivisible(NamedTuple):
    """A size of a model that its ranks cannot divide."""

    setting: str  # the provider's, or a product of settings
    size: int  # its value
    split: str  # the parallel sizes that should divide it: "tp", "tp of vision", "ep", "etp" or "tp * cp"
    ranks: int  # their product
    either: bool = False  # a divisor of `ranks` is allowed as well


def indivisible(
    dims: Dimensions, *, tp: int, cp: int = 1, ep: int = 1, etp: int = 1, vision_tp: int | None = None
) -> Iterator[Indivisible]:
    """The sizes of a model that are not multiples of the numbers of ranks that share them; who asks refuses them:
    `models/refusals.py`, `planning/split.py`, `checkpoint/topology.py`.

    Args:
        dims: the model's; "vocab" includes padding.
        tp, cp, ep, etp: tensor, context, expert and expert-tensor parallelism.
        vision_tp: tensor parallelism of the vision tower; 1 if it is not to be checked, None for `tp`.
    """
    vision_tp = tp if vision_tp is None else vision_tp
    merged = "vision_config.hidden_size * vision_config.spatial_merge_size * vision_config.spatial_merge_size"
    shares = [
        ("num_attention_heads", dims["heads"], "tp", tp),
        ("padded_vocab_size", dims["vocab"], "tp", tp),
        ("vision_config.num_heads", dims["v_heads"], "tp of vision", vision_tp),
        ("vision_config.intermediate_size", dims["v_ffn"], "tp of vision", vision_tp),
        (merged, dims["v_merged"], "tp of vision", vision_tp),
    ]
    if dims.indices["dense_layers"]:
        shares.append(("ffn_hidden_size", dims["ffn"], "tp", tp))
    if dims.indices["moe_layers"]:
        shares += [("num_moe_experts", dims["experts"], "ep", ep), ("moe_ffn_hidden_size", dims["moe_ffn"], "etp", etp)]
    if dims.indices.get("linear_layers"):
        keys = dims["l_key"] // dims["l_key_dim"]
        shares += [
            ("linear_num_key_heads", keys, "tp * cp", tp * cp),
            ("linear_num_value_heads", dims["l_value_heads"], "tp * cp", tp * cp),
        ]
    yield from (Indivisible(*share) for share in shares if share[1] % share[3])
    # With fewer groups than ranks, ranks gather all groups and take their own. Source: megatron-core, SelfAttention.
    if dims["kv_heads"] % tp and tp % dims["kv_heads"]:
        yield Indivisible("num_query_groups", dims["kv_heads"], "tp", tp, either=True)


class Misfit(NamedTuple):
    """A weight of the text model that products in 8 or 4 bits do not take."""

    layer: str  # as "self_attention.in_proj"
    side: str  # "outputs" or "inputs"
    size: int  # of the whole layer
    ranks: int  # that share it


# Linear layers that Transformer Engine computes in 8 bits, by what tensor parallelism splits.
_BY_OUTPUTS, _BY_INPUTS = ("linear_qkv", "in_proj", "linear_fc1"), ("linear_proj", "out_proj", "linear_fc2")


def misfits(
    rows: Iterable[WeightRow], dims: Dimensions, *, tp: int, etp: int, multiple: int, exempt: Collection[str] = ()
) -> Iterator[Misfit]:
    """Sizes of the decoder's linear layers that are no multiple of `multiple` on a rank, by the weight table's rows.

    Source: Transformer Engine, `assert_dim_for_fp8_exec` and the quantizers' `is_quantizable`.
    """
    for row in rows:
        *path, layer, parameter = row.megatron.rstrip("*").split(".")
        used = all(dims.indices.get(name) for name in row.indices) and (row.condition is None or dims[row.condition])
        if path[:2] != ["language_model", "decoder"] or parameter != "weight" or layer in exempt or not used:
            continue
        if layer in (*_BY_OUTPUTS, *_BY_INPUTS):
            ranks = etp if "experts" in path else tp
            split = (ranks, 1) if layer in _BY_OUTPUTS else (1, ranks)
            for side, size, parts in zip(("outputs", "inputs"), row.megatron_shape(dims), split, strict=True):
                if size % (parts * multiple):
                    yield Misfit(".".join([*path[4:], layer]), side, size, parts)


def row_multiple(cp: int, sp: int, each: int = 1) -> int:
    """The multiple required of a row's length on this many context- and sequence-parallel ranks, for a multiple of
    `each` on every one.
    """
    segment = 2 * cp if cp > 1 else 1  # as `batch.token_layout.segment_multiple`, which needs torch
    return math.lcm(segment, cp * sp * each)


def check_row_length(seq_length: int, cp: int, sp: int, each: int = 1) -> None:
    """Refuse (ValueError) rows that cannot be divided over context- and sequence-parallel ranks; see `row_multiple`."""
    if seq_length % (multiple := row_multiple(cp, sp, each)):
        products = f", where products in 8 or 4 bits take multiples of {each} tokens" if each > 1 else ""
        raise ValueError(
            f"seq_length is {seq_length}, expected a multiple of {multiple}: rows are split over {cp} "
            f"context-parallel ranks, and each part over {sp} sequence-parallel ranks{products}"
        )


@dataclass(frozen=True)
class Replicas:
    """Replicas of the two dist-train modules, one number a multiple of the other; paired as by megatron-core."""

    vision: int  # replicas of the vision tower
    language: int  # replicas of the language model

    def check(self, where: str = "") -> None:
        """Refuse (ValueError) numbers that cannot be paired; `where` is their source, appended to the message."""
        few, many = sorted((self.vision, self.language))
        if many % few:
            raise ValueError(
                f"the vision tower has {self.vision} data-parallel replicas and the language model {self.language}, "
                f"expected one number to be a multiple of the other{where}"
            )

    @property
    def vision_per_language(self) -> int:
        """Number of vision replicas that divide the images of one microbatch."""
        return max(self.vision // self.language, 1)

    @property
    def language_per_vision(self) -> int:
        """Number of language replicas that one vision replica serves."""
        return max(self.language // self.vision, 1)

    @property
    def ratio(self) -> int | None:
        """Vision replicas per language replica, as in Megatron-Bridge's setting; None below 1."""
        return self.vision_per_language if self.vision >= self.language else None

    def language_replicas_of(self, vision: int) -> range:
        """The language replicas that a vision replica encodes for."""
        first = vision // self.vision_per_language * self.language_per_vision
        return range(first, first + self.language_per_vision)

    def share_of(self, vision: int) -> int:
        """Index of the part of a microbatch's images that a vision replica encodes."""
        return vision % self.vision_per_language
