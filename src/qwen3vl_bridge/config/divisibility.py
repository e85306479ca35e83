"""Check that parallel sizes divide the dimensions of a model, for the provider, the planner and the converter.

Uses only the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from qwen3vl_bridge.weights.rows import Dimensions, WeightRow

# How linear attention is computed under context parallelism. megatron-core's development branch has the same names.
HEADWISE, CHUNKWISE = "headwise", "chunkwise"


def resolve_linear_cp_mode(mode: str | None, key_heads: int, value_heads: int, tp: int, cp: int) -> str:
    """Return how linear attention is computed under context parallelism: "headwise" or "chunkwise".

    Args:
        mode: the setting `linear_cp_mode`. None: "headwise" if tp * cp divides both numbers of heads, else
            "chunkwise". Without context parallelism, the result is always "headwise".
        key_heads, value_heads: numbers of heads of linear attention.
        tp, cp: sizes of tensor and context parallelism.
    """
    if cp == 1:
        return HEADWISE
    divides = key_heads % (tp * cp) == value_heads % (tp * cp) == 0
    return mode or (HEADWISE if divides else CHUNKWISE)


def exchanges_states(dims: Dimensions, mode: str | None, tp: int, cp: int) -> bool:
    """Return whether context-parallel ranks exchange states of linear attention (mode "chunkwise").

    `mode`, `tp` and `cp` are as in `resolve_linear_cp_mode`.
    """
    heads = dims["l_key"] // dims["l_key_dim"], dims["l_value_heads"]
    return resolve_linear_cp_mode(mode, *heads, tp, cp) == CHUNKWISE


class IndivisibleSize(NamedTuple):
    """A dimension of a model that cannot be divided evenly over the ranks that shard it."""

    setting: str  # the provider's setting, or a product of settings
    size: int  # value of the setting
    # The parallel sizes that must divide the value: "tp", "tp of vision", "ep", "etp", "tp * cp" or "ep * etp".
    parallelism: str
    ranks: int  # product of these parallel sizes
    divisor_allowed: bool = False  # True if a divisor of `ranks` is allowed as well


def indivisible_sizes(
    dims: Dimensions,
    *,
    tp: int,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    vision_tp: int | None = None,
    linear_mode: str | None = None,
) -> Iterator[IndivisibleSize]:
    """Yield the dimensions of a model that are not multiples of the number of ranks over which they are sharded.

    Args:
        dims: dimensions of the model; "vocab" includes padding.
        tp, cp, ep, etp: sizes of tensor, context, expert and expert-tensor parallelism.
        vision_tp: tensor-parallel size of the vision tower; None for `tp`, 1 to skip the tower.
        linear_mode: the setting `linear_cp_mode`.
    """
    vision_tp = tp if vision_tp is None else vision_tp
    merged = "vision_config.hidden_size * vision_config.spatial_merge_size * vision_config.spatial_merge_size"
    sizes = [
        ("num_attention_heads", dims["heads"], "tp", tp),
        ("padded_vocab_size", dims["vocab"], "tp", tp),
        ("vision_config.num_heads", dims["v_heads"], "tp of vision", vision_tp),
        ("vision_config.intermediate_size", dims["v_ffn"], "tp of vision", vision_tp),
        (merged, dims["v_merged"], "tp of vision", vision_tp),
    ]
    if dims.indices["dense_layers"]:
        sizes.append(("ffn_hidden_size", dims["ffn"], "tp", tp))
    if dims.indices["moe_layers"]:
        sizes += [("num_moe_experts", dims["experts"], "ep", ep), ("moe_ffn_hidden_size", dims["moe_ffn"], "etp", etp)]
    if dims.indices.get("linear_layers"):
        only_tp = cp == 1 or exchanges_states(dims, linear_mode, tp, cp)
        parallelism, ranks = ("tp", tp) if only_tp else ("tp * cp", tp * cp)
        sizes.append(("linear_num_key_heads", dims["l_key"] // dims["l_key_dim"], parallelism, ranks))
        sizes.append(("linear_num_value_heads", dims["l_value_heads"], parallelism, ranks))
    if dims.indices.get("ple_layers"):
        # Before the convolution of the per-layer n-gram embedding, ranks exchange tokens for channels of all residual
        # streams.
        sizes.append(("hc_count * hidden_size", dims["streams_hidden"], "tp * cp", tp * cp))
        yield from _indivisible_tables(len(dims.indices["ngram_heads"]), dims["ple_dim"], ep * etp)
    yield from (IndivisibleSize(*size) for size in sizes if size[1] % size[3])
    # With fewer query groups than ranks, each rank gathers all groups and selects its own. Source: megatron-core,
    # SelfAttention.
    if dims["kv_heads"] % tp and tp % dims["kv_heads"]:
        yield IndivisibleSize("num_query_groups", dims["kv_heads"], "tp", tp, divisor_allowed=True)


def _indivisible_tables(heads: int, columns: int, ranks: int) -> Iterator[IndivisibleSize]:
    """Yield the dimension of an n-gram table that cannot be divided evenly over ranks.

    Each rank stores one or more hash heads completely. With more ranks than heads, it stores some columns of one head.

    Args:
        heads: number of hash heads.
        columns: number of columns of all heads together.
        ranks: number of ranks.
    """
    if heads % ranks and ranks % heads:
        yield IndivisibleSize("(ngram_size - 1) * heads_per_ngram", heads, "ep * etp", ranks, divisor_allowed=True)
    elif ranks > heads and columns % ranks:
        yield IndivisibleSize("ple_embed_dim", columns, "ep * etp", ranks)


class MisalignedDim(NamedTuple):
    """A number of inputs or outputs of a linear layer that FP8 or FP4 GEMMs do not support on a rank."""

    layer: str  # such as "self_attention.in_proj"
    side: str  # "outputs" or "inputs"
    size: int  # number of outputs or inputs of the unsharded layer
    ranks: int  # number of ranks over which the dimension is sharded


# Linear layers that Transformer Engine computes in 8 bits, whose outputs or whose inputs tensor parallelism shards.
_SHARD_OUTPUTS, _SHARD_INPUTS = ("linear_qkv", "in_proj", "linear_fc1"), ("linear_proj", "out_proj", "linear_fc2")


def misaligned_dims(
    rows: Iterable[WeightRow], dims: Dimensions, *, tp: int, etp: int, multiple: int, exempt: Collection[str] = ()
) -> Iterator[MisalignedDim]:
    """Yield the dimensions of the decoder's linear layers that are not a multiple of `multiple` on a rank.

    Source: Transformer Engine, `assert_dim_for_fp8_exec` and the quantizers' `is_quantizable`.

    Args:
        rows: the weight table.
        dims: dimensions of the model.
        tp, etp: sizes of tensor and expert-tensor parallelism.
        multiple: the number that must divide a rank's part of each dimension.
        exempt: names of layers that are computed in 16 bits.
    """
    for row in rows:
        *path, layer, parameter = row.megatron.rstrip("*").split(".")
        exists = all(dims.indices.get(name) for name in row.indices) and (row.condition is None or dims[row.condition])
        if path[:2] != ["language_model", "decoder"] or parameter != "weight" or layer in exempt or not exists:
            continue
        if layer in (*_SHARD_OUTPUTS, *_SHARD_INPUTS):
            ranks = etp if "experts" in path else tp
            shards = (ranks, 1) if layer in _SHARD_OUTPUTS else (1, ranks)
            for side, size, count in zip(("outputs", "inputs"), row.megatron_shape(dims), shards, strict=True):
                if size % (count * multiple):
                    yield MisalignedDim(".".join([*path[4:], layer]), side, size, count)


def row_length_multiple(cp: int, sp: int, tokens: int = 1) -> int:
    """Return the number that must divide the length of a packed or padded row, so that all ranks get equal shares.

    Args:
        cp, sp: sizes of context and sequence parallelism.
        tokens: number that must divide each rank's number of tokens, such as 16 for FP8.
    """
    segment = 2 * cp if cp > 1 else 1  # equals `core.layout.segment_multiple`, which needs torch
    return math.lcm(segment, cp * sp * tokens)


def check_row_length(seq_length: int, cp: int, sp: int, tokens: int = 1) -> None:
    """Raise ValueError if ranks cannot get equal shares of a row of `seq_length` tokens; see `row_length_multiple`."""
    if seq_length % (multiple := row_length_multiple(cp, sp, tokens)):
        precision = f", where matrix products in FP8 or FP4 need multiples of {tokens} tokens" if tokens > 1 else ""
        raise ValueError(
            f"seq_length is {seq_length}, expected a multiple of {multiple}: rows are divided over {cp} "
            f"context-parallel ranks, and then over {sp} sequence-parallel ranks{precision}"
        )


@dataclass(frozen=True)
class Replicas:
    """Numbers of data-parallel replicas of the vision tower and the language model on separate ranks.

    One number is a multiple of the other. Each replica of the module with fewer replicas works with consecutive
    replicas of the other module, as in megatron-core.
    """

    vision: int
    language: int

    def check(self, source: str = "") -> None:
        """Raise ValueError unless one number of replicas divides the other.

        `source` ends the message, for example with an explanation of how the numbers are computed.
        """
        few, many = sorted((self.vision, self.language))
        if many % few:
            raise ValueError(
                f"the vision tower has {self.vision} data-parallel replicas and the language model {self.language}, "
                f"expected one number to be a multiple of the other{source}"
            )

    @property
    def vision_per_language(self) -> int:
        """Number of vision replicas that share the images of one microbatch."""
        return max(self.vision // self.language, 1)

    @property
    def language_per_vision(self) -> int:
        """Number of language replicas that one vision replica serves."""
        return max(self.language // self.vision, 1)

    @property
    def ratio(self) -> int | None:
        """Number of vision replicas per language replica (`vision_to_llm_dp_ratio`); None if it is less than 1."""
        return self.vision_per_language if self.vision >= self.language else None

    def language_replicas_of(self, vision: int) -> range:
        """Return the indices of the language replicas that vision replica `vision` encodes images for."""
        first = vision // self.vision_per_language * self.language_per_vision
        return range(first, first + self.language_per_vision)

    def share_of(self, vision: int) -> int:
        """Return which of `vision_per_language` shares of a microbatch's images a vision replica encodes, as an index.

        `vision` is the index of the replica.
        """
        return vision % self.vision_per_language
