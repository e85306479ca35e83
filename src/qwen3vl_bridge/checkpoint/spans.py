"""Where each element of a row's Hugging Face tensors is stored on the Megatron side.

What lives here: the arithmetic of the weight table's kinds of row, stated once; import and export read it from either
end. What may not: names and shapes (`mappings.py`), files, torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.tensors import Shape
from qwen3vl_bridge.dimensions import Dimensions
from qwen3vl_bridge.mappings import local_name
from qwen3vl_bridge.weight_rows import QKV, ConcatenatedQKV, Copy, GatedMLP, Row

# Layer specs, whose parameter names differ where one fuses a norm and a linear layer.
TRANSFORMER_ENGINE = "transformer_engine"
LOCAL = "local"


class Span(NamedTuple):
    """Consecutive elements that lie together on both sides."""

    hf: str
    hf_start: int
    stored: str
    stored_start: int
    length: int


def stored_shapes(row: Row, dimensions: Dimensions, naming: str) -> dict[str, Shape]:
    """Names and shapes under which an fsdp_dtensor checkpoint holds a row.

    Args:
        row: an expanded row.
        dimensions: from `dimensions_of`.
        naming: "transformer_engine" or "local".
    """
    shapes = row.numbers(dimensions)
    rows = sum(shape[0] for shape in shapes) // len(row.stored)
    names = (local_name(name) if naming == LOCAL else name for name in row.stored)
    return dict.fromkeys(names, (rows, *shapes[0][1:]))


def spans(row: Row, dimensions: Dimensions, naming: str) -> Iterator[Span]:
    """All elements of a row, in the order of the Megatron side.

    Args:
        row: an expanded row.
        dimensions: from `dimensions_of`.
        naming: "transformer_engine" or "local".
    """
    stored = stored_shapes(row, dimensions, naming)
    names, part = list(stored), math.prod(next(iter(stored.values())))
    position = 0
    for hf, start, length in _pieces(row, dimensions):
        yield Span(hf, start, names[position // part], position % part, length)
        position += length


def _pieces(row: Row, dimensions: Dimensions) -> Iterator[tuple[str, int, int]]:
    """The Megatron parameter as (Hugging Face tensor, first element, number of elements), in order."""
    shapes = row.numbers(dimensions)
    if isinstance(row, QKV):
        heads, groups, head_dim = dimensions["heads"], dimensions["kv_heads"], dimensions["head_dim"]
        head = head_dim * math.prod(shapes[0][1:])
        parts = [(row.hf[0], 0, heads // groups * head), (row.hf[1], 0, head), (row.hf[2], 0, head)]
        yield from _interleaved(parts, groups)
    elif isinstance(row, ConcatenatedQKV):
        groups = dimensions["v_heads"]
        third = math.prod(shapes[0]) // 3
        yield from _interleaved([(row.hf[0], i * third, third // groups) for i in range(3)], groups)
    elif isinstance(row, Copy | GatedMLP):
        yield from ((hf, 0, math.prod(shape)) for hf, shape in zip(row.hf, shapes, strict=True))
    else:
        raise TypeError(f"{row.megatron}: no rule for rows of the kind {type(row).__name__}")


def _interleaved(parts: list[tuple[str, int, int]], groups: int) -> Iterator[tuple[str, int, int]]:
    """For each group, its share of every part in turn. A part is (tensor, first element, elements per group)."""
    for group in range(groups):
        for hf, first, length in parts:
            yield hf, first + group * length, length
