"""Parameters that one rank holds, from the weight table.

What lives here: which dimension of a row each kind of parallelism divides, and the sums. Standard library only. What
may not: shapes and names of parameters (a family's table), bytes (`model_states.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from qwen3vl_bridge.planning.settings import Lora
from qwen3vl_bridge.planning.split import Chunk, Split
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.model_parts import Part, part_of
from qwen3vl_bridge.weights.rows import PackedExpert, Row

_EMBEDDING = "language_model.embedding.word_embeddings.weight"
_LAST = ("language_model.decoder.final_layernorm.weight", "language_model.output_layer.weight")
# Whole on every tensor-parallel rank, beside the rows marked so: norms, the router, and biases of layers whose inputs
# are split. Everything else is cut along one of its dimensions, which comes to the same count.
_WHOLE = ("norm.", "_norm_", "mlp.router.", "linear_proj.bias", "linear_fc2.bias")
_LAYERS = ("text_layers", "dense_layers", "moe_layers")


_KINDS = ("language_model", "experts", "vision_model", "vision_projection")


@dataclass(frozen=True)
class Count:
    """Parameters by part; of the language model, experts apart."""

    language_model: int = 0
    experts: int = 0
    vision_model: int = 0
    vision_projection: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(**{kind: getattr(self, kind) + getattr(other, kind) for kind in _KINDS})

    @property
    def total(self) -> int:
        """All of them."""
        return self.language_model + self.experts + self.vision_model + self.vision_projection

    @property
    def shared(self) -> int:
        """All but experts, which other ranks hold copies of."""
        return self.total - self.experts

    def without(self, parts: Iterable[Part]) -> Count:
        """The same with nothing in these parts."""
        gone = {part.value for part in parts} | ({"experts"} if Part.LANGUAGE_MODEL in parts else set())
        return Count(**{kind: 0 if kind in gone else getattr(self, kind) for kind in _KINDS})


def chunk_count(n: Dimensions, split: Split, chunk: Chunk) -> Count:
    """Parameters that a rank of this chunk holds.

    Args:
        n: the model's numbers.
        split: over how many ranks.
        chunk: of the pipeline.
    """
    inside = {name: len(_inside(n, chunk, name)) for name in _LAYERS}
    found: dict[str, int] = {kind: 0 for kind in _KINDS}  # noqa: C420
    for row, kind, divided in _rows(n.family):
        if copies := _copies(row, n, split, chunk, inside):
            found[kind] += copies * _numbers(row, n) // divided(split)
    return Count(**found)


def layer_count(n: Dimensions, split: Split, layer: int) -> Count:
    """Parameters of one text layer that a rank holds."""
    return chunk_count(n, split, Chunk(0, 0, range(layer, layer + 1), first=False, last=False))


def vision_layer_count(n: Dimensions, split: Split) -> int:
    """Parameters of one layer of the tower that a rank holds."""
    rows = ((row, divided) for row, _, divided in _rows(n.family) if row.indices == ("vision_layers",))
    return sum(_numbers(row, n) // divided(split) for row, divided in rows)


def adapter_count(n: Dimensions, split: Split, chunk: Chunk, lora: Lora) -> int:
    """Parameters of a chunk's adapters that a rank holds: both matrices are cut over tensor-parallel ranks."""
    dense = len(_inside(n, chunk, "dense_layers"))
    total = 0
    for name, wide in adapter_widths(n).items():
        if name in lora.targets:
            total += lora.rank * sum(wide) * (dense if "fc" in name else len(chunk.layers))
    return total // split.tp


def adapter_widths(n: Dimensions) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers of a text layer without experts."""
    return {
        "linear_qkv": (n["hidden"], n["q"] + 2 * n["kv"]),
        "linear_proj": (n["q"], n["hidden"]),
        "linear_fc1": (n["hidden"], 2 * n["ffn"]),
        "linear_fc2": (n["ffn"], n["hidden"]),
    }


def _numbers(row: Row, n: Dimensions) -> int:
    return sum(math.prod(shape) for shape in row.numbers(n))


def _divisor(row: Row) -> Callable[[Split], int]:
    if isinstance(row, PackedExpert):
        return lambda split: split.expert_tp
    whole = row.replicated or any(name in row.megatron for name in _WHOLE)
    return lambda split: 1 if whole else split.tp


def _kind(row: Row) -> str:
    return "experts" if isinstance(row, PackedExpert) else part_of(row.megatron).value


@functools.cache
def _rows(name: str) -> list[tuple[Row, str, Callable[[Split], int]]]:
    """A family's table, each row with its kind and what its ranks divide it by."""
    return [(row, _kind(row), _divisor(row)) for row in family(name).rows()]


def _copies(row: Row, n: Dimensions, split: Split, chunk: Chunk, inside: Mapping[str, int]) -> int:
    """How many parameters of this row the chunk has."""
    if row.condition is not None and not n[row.condition]:
        return 0
    if not row.indices and row.megatron in _LAST:
        return int(chunk.last)
    if row.megatron == _EMBEDDING:
        # The stage with the output layer has a copy where the two are one weight.
        return int(chunk.first or (chunk.last and not n["untied"]))
    if not row.indices:
        return int(chunk.tower)
    count = 1
    for name in row.indices:
        if name in _LAYERS:
            count *= inside[name]
        elif name == "experts":
            count *= len(n.indices[name]) // split.ep
        else:
            count *= len(n.indices[name]) * chunk.tower
    return count


def _inside(n: Dimensions, chunk: Chunk, name: str) -> set[int]:
    return set(chunk.layers).intersection(n.indices[name])
