"""Parameters that one rank holds, from the weight table.

What lives here: which dimension of a row each kind of parallelism divides, and the sums. Standard library only. What
may not: shapes and names of parameters (a family's table), bytes (`model_states.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from qwen3vl_bridge.planning.settings import Lora, Training
from qwen3vl_bridge.planning.split import Chunk, Split
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.model_parts import Part, part_of
from qwen3vl_bridge.weights.names import is_of_experts, is_of_mtp
from qwen3vl_bridge.weights.rows import Row

_EMBEDDING = "language_model.embedding.word_embeddings.weight"
# Whole on every tensor-parallel rank, in addition to the rows marked so: norms, the router, and biases of layers whose
# inputs are split. Everything else is split along one of its dimensions, which gives the same count.
_WHOLE = ("norm.", "_norm_", "mlp.router.", "linear_proj.bias", "linear_fc2.bias")
# Indices that count text layers, each of which is on one pipeline stage.
_LAYERS = ("text_layers", "dense_layers", "moe_layers", "linear_layers", "full_layers")

_BEHIND = Chunk(0, 0, range(0), first=False, last=True)  # what comes after the text layers, and nothing else

# A row of a family's table, its kind, and its divisor over ranks.
_Row = tuple[Row, str, Callable[[Split], int]]
_KINDS = ("language_model", "experts", "vision_model", "vision_projection")


@dataclass(frozen=True)
class Count:
    """Parameters by part; of the language model, experts separately."""

    language_model: int = 0
    experts: int = 0
    vision_model: int = 0
    vision_projection: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(**{kind: getattr(self, kind) + getattr(other, kind) for kind in _KINDS})

    def __sub__(self, other: Count) -> Count:
        return Count(**{kind: getattr(self, kind) - getattr(other, kind) for kind in _KINDS})

    @property
    def total(self) -> int:
        """All of them."""
        return self.language_model + self.experts + self.vision_model + self.vision_projection

    @property
    def shared(self) -> int:
        """All except experts, of which other ranks hold copies."""
        return self.total - self.experts

    def without(self, parts: Iterable[Part]) -> Count:
        """The same with nothing in these parts."""
        gone = {part.value for part in parts} | ({"experts"} if Part.LANGUAGE_MODEL in parts else set())
        return Count(**{kind: 0 if kind in gone else getattr(self, kind) for kind in _KINDS})


def chunk_count(n: Dimensions, split: Split, chunk: Chunk) -> Count:
    """Number of parameters that a rank holds of this chunk.

    Args:
        n: the model's dimensions.
        split: parallel sizes.
        chunk: of the pipeline.
    """
    return _count(n, split, chunk, _rows(n.family))


def _count(n: Dimensions, split: Split, chunk: Chunk, rows: Iterable[_Row]) -> Count:
    inside = {name: len(set(chunk.layers).intersection(n.indices.get(name, ()))) for name in _LAYERS}
    found: dict[str, int] = {kind: 0 for kind in _KINDS}  # noqa: C420
    for row, kind, divided in rows:
        if copies := _copies(row, n, split, chunk, inside):
            found[kind] += copies * _numbers(row, n) // divided(split)
    return Count(**found)


def held_and_trained(n: Dimensions, split: Split, chunks: Sequence[Chunk], training: Training) -> tuple[Count, Count]:
    """Parameters that a rank of these chunks holds, and those of them that are trained; without adapters."""
    held = sum((chunk_count(n, split, chunk) for chunk in chunks), Count())
    kept = Count() if training.trains_mtp else sum((mtp_count(n, split, chunk) for chunk in chunks), Count())
    return held, (held - kept).without(training.frozen_weights)


def mtp_count(n: Dimensions, split: Split, chunk: Chunk) -> Count:
    """Parameters of multi-token prediction that a rank of this chunk holds."""
    return _count(n, split, chunk, [one for one in _rows(n.family) if is_of_mtp(one[0].megatron)])


def layer_count(n: Dimensions, split: Split, layer: int) -> Count:
    """Parameters of one text layer that a rank holds."""
    return chunk_count(n, split, Chunk(0, 0, range(layer, layer + 1), first=False, last=False))


def mtp_layer_count(n: Dimensions, split: Split) -> Count:
    """Parameters of multi-token prediction's layer that a rank of the last stage holds."""
    return _count(n, split, _BEHIND, [one for one in _rows(n.family) if ".mtp_model_layer." in one[0].megatron])


def kinds_of_layers(n: Dimensions, layers: Iterable[int] | None = None) -> list[list[int]]:
    """Numbers of text layers by kind: linear or full attention, experts or none; None for all of the model's."""
    linear, moe = (set(n.indices.get(name, ())) for name in ("linear_layers", "moe_layers"))
    found: dict[tuple[bool, bool], list[int]] = {}
    for layer in n.indices["text_layers"] if layers is None else layers:
        found.setdefault((layer in linear, layer in moe), []).append(layer)
    return list(found.values())


def vision_layer_count(n: Dimensions, split: Split) -> int:
    """Parameters of one layer of the tower that a rank holds."""
    rows = ((row, divided) for row, _, divided in _rows(n.family) if row.indices == ("vision_layers",))
    return sum(_numbers(row, n) // divided(split) for row, divided in rows)


def adapter_count(n: Dimensions, split: Split, chunk: Chunk, lora: Lora) -> int:
    """Parameters of a chunk's adapters that a rank holds: both matrices are split over tensor-parallel ranks."""
    numbers = sum(
        sum(wide) for layer in chunk.layers for name, wide in adapter_widths(n, layer).items() if name in lora.targets
    )
    return lora.rank * numbers // split.tp


def adapter_widths(n: Dimensions, layer: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers of a text layer that have adapters, which experts' do not."""
    if layer in n.indices.get("linear_layers", ()):
        inner = n["l_qkv"] + n["l_value"] + 2 * n["l_value_heads"]
        found = {"in_proj": (n["hidden"], inner), "out_proj": (n["l_value"], n["hidden"])}
    else:
        queries = n.sizes.get("gated_q", n["q"])
        found = {"linear_qkv": (n["hidden"], queries + 2 * n["kv"]), "linear_proj": (n["q"], n["hidden"])}
    ffn = n["ffn"] if layer in n.indices["dense_layers"] else n.sizes.get("shared_ffn", 0)
    if ffn:
        found |= {"linear_fc1": (n["hidden"], 2 * ffn), "linear_fc2": (ffn, n["hidden"])}
    return found


def _numbers(row: Row, n: Dimensions) -> int:
    return sum(math.prod(shape) for shape in row.numbers(n))


def _divisor(row: Row) -> Callable[[Split], int]:
    if is_of_experts(row.megatron):
        return lambda split: split.expert_tp
    whole = row.replicated or any(name in row.megatron for name in _WHOLE)
    return lambda split: 1 if whole else split.tp


def _kind(row: Row) -> str:
    return "experts" if is_of_experts(row.megatron) else part_of(row.megatron).value


@functools.cache
def _rows(name: str) -> list[_Row]:
    """A family's table, each row with its kind and its divisor over ranks."""
    return [(row, _kind(row), _divisor(row)) for row in family(name).rows()]


def _copies(row: Row, n: Dimensions, split: Split, chunk: Chunk, inside: Mapping[str, int]) -> int:
    """Number of parameters of this row in the chunk."""
    if row.condition is not None and not n[row.condition]:
        return 0
    if row.megatron == _EMBEDDING:
        # The stage with the output layer has a copy if the two are one weight.
        return int(chunk.first or (chunk.last and not n["untied"]))
    # Rows of no text layer are with the tower, or after all of them.
    outside = int(chunk.last if row.megatron.startswith("language_model.") else chunk.tower)
    count = 1 if set(row.indices).intersection(_LAYERS) else outside
    for name in row.indices:
        if name in _LAYERS:
            count *= inside[name]
        elif name == "experts":
            count *= len(n.indices[name]) // split.ep
        else:
            count *= len(n.indices[name])
    return count
