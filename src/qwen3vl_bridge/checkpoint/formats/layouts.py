"""Layouts of the weights in each format: which tensors it has, and the positions of a Megatron parameter's elements.

Every layout gives the positions of a row's Megatron parameter, element by element in its row-major order. That order is
common to all layouts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from qwen3vl_bridge.checkpoint.formats.tensors import Shape
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights.rows import (
    NAMED_IF_MIXED,
    QKV,
    ConcatenatedQKV,
    Copy,
    Dimensions,
    ExpertInput,
    ExpertOutput,
    GatedMLP,
    GatedQKV,
    PackedExpert,
    WeightRow,
    ZeroCentered,
    hf_shapes,
    local_name,
    stacked_name,
    stored_rows,
)

# Layer specs, whose parameter names differ where one fuses a norm and a linear layer, or groups experts.
TRANSFORMER_ENGINE = "transformer_engine"
LOCAL = "local"


class ParamSlice(NamedTuple):
    """Position of consecutive elements of a Megatron parameter: elements [start, start + length) of a tensor.

    If `columns` is not 0 they are a matrix with this many columns, stored transposed. If `stride` is not 1, they are
    that far apart. The stored values are `plus` more than the elements.
    """

    tensor: str
    start: int
    length: int
    columns: int = 0
    stride: int = 1
    plus: int = 0


@dataclass(frozen=True)
class TensorLayout:
    """A format, for one model."""

    dimensions: Dimensions
    # Whether its tensors of the vocabulary may have more rows than the model; then `dimensions["vocab"]` includes them.
    pads_vocabulary: ClassVar[bool] = True

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """Names and shapes of the tensors that contain an expanded row; they may contain others too."""
        raise NotImplementedError

    def slices(self, row: WeightRow) -> Iterator[ParamSlice]:
        """Positions of the elements of an expanded row's Megatron parameter, in order."""
        for name, shape in self.tensors(row).items():
            yield ParamSlice(name, 0, math.prod(shape))

    def leading(self, row: WeightRow) -> int:
        """Number of leading dimensions of the tensors that count rows, such as layers and experts."""
        del row
        return 0


def megatron_shape(row: WeightRow, dimensions: Dimensions) -> Shape:
    """Shape of the Megatron parameter of an expanded row."""
    shapes = row.numbers(dimensions)
    if isinstance(row, PackedExpert) and row.transposed:
        return shapes[0][::-1]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class HuggingFace(TensorLayout):
    """safetensors, with the names and shapes of transformers."""

    pads_vocabulary: ClassVar[bool] = False

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """See `TensorLayout`."""
        return dict(zip(row.hf, hf_shapes(row, self.dimensions), strict=True))

    def leading(self, row: WeightRow) -> int:
        """See `TensorLayout`."""
        return int(isinstance(row, PackedExpert))

    def slices(self, row: WeightRow) -> Iterator[ParamSlice]:
        """See `TensorLayout`."""
        dimensions, shapes = self.dimensions, row.numbers(self.dimensions)
        if isinstance(row, QKV):
            heads, groups, head_dim = dimensions["heads"], dimensions["kv_heads"], dimensions["head_dim"]
            head = head_dim * math.prod(shapes[0][1:])
            parts = [(row.hf[0], 0, heads // groups * head), (row.hf[1], 0, head), (row.hf[2], 0, head)]
            yield from _interleaved(parts, groups)
        elif isinstance(row, ConcatenatedQKV):
            groups = dimensions["v_heads"]
            third = math.prod(shapes[0]) // 3
            yield from _interleaved([(row.hf[0], i * third, third // groups) for i in range(3)], groups)
        elif isinstance(row, PackedExpert):
            size = math.prod(shapes[0])
            yield ParamSlice(row.hf[0], row.expert * size, size, columns=shapes[0][0] if row.transposed else 0)
        elif isinstance(row, ExpertInput):
            yield ParamSlice(row.hf[0], row.expert * math.prod(shapes[0]), math.prod(shapes[0]))
        elif isinstance(row, ExpertOutput):
            yield ParamSlice(row.hf[0], row.expert, math.prod(shapes[0]), stride=dimensions["experts"])
        elif isinstance(row, GatedQKV):
            query, *others = row.hf
            heads = dimensions["heads"] // dimensions["kv_heads"]  # of a group
            head = dimensions["head_dim"] * math.prod(shapes[0][1:])
            for group in range(dimensions["kv_heads"]):
                for part in range(2):  # queries, gates
                    for number in range(group * heads, (group + 1) * heads):
                        yield ParamSlice(query, (2 * number + part) * head, head)
                for name in others:
                    yield ParamSlice(name, group * head, head)
        elif isinstance(row, ZeroCentered):
            yield ParamSlice(row.hf[0], 0, math.prod(shapes[0]), plus=1)
        elif isinstance(row, Copy | GatedMLP):
            for name, shape in zip(row.hf, shapes, strict=True):
                yield ParamSlice(name, 0, math.prod(shape))
        else:
            raise TypeError(f"{row.megatron}: no rule for rows of the kind {type(row).__name__}")


def _interleaved(parts: list[tuple[str, int, int]], groups: int) -> Iterator[ParamSlice]:
    """For each group, its part of every tensor in turn. A part is (tensor, first element, elements per group)."""
    for group in range(groups):
        for name, first, length in parts:
            yield ParamSlice(name, first + group * length, length)


@dataclass(frozen=True)
class FsdpDtensor(TensorLayout):
    """A Megatron-FSDP checkpoint: each parameter is a tensor, gate and up projections separate."""

    naming: str = TRANSFORMER_ENGINE

    def __post_init__(self) -> None:
        if self.naming not in (TRANSFORMER_ENGINE, LOCAL):
            raise CheckpointError(f"naming is {self.naming!r}, expected {TRANSFORMER_ENGINE!r} or {LOCAL!r}")

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """See `TensorLayout`."""
        rows, *width = megatron_shape(row, self.dimensions)
        names = (local_name(name) if self.naming == LOCAL else name for name in row.stored)
        return {name: (part, *width) for name, part in zip(names, stored_rows(row, rows, self.dimensions), strict=True)}


@dataclass(frozen=True)
class TorchDist(TensorLayout):
    """A checkpoint of megatron-core's own format: layers, and the experts of a layer, stacked in one tensor.

    Attributes:
        named: indices that stay in the names of tensors instead.
        local: whether it has the names of megatron-core's own local layer spec.
    """

    named: frozenset[str] = frozenset()
    local: bool = False

    @classmethod
    def of(cls, dimensions: Dimensions) -> TorchDist:
        """The layout with which megatron-core saves a model: layers that differ keep their indices in their names."""
        indices = dimensions.indices
        mixed = (bool(indices["dense_layers"]) and bool(indices["moe_layers"])) or bool(indices.get("linear_layers"))
        return cls(dimensions, frozenset(NAMED_IF_MIXED) if mixed else frozenset())

    @classmethod
    def found(cls, rows: Collection[WeightRow], dimensions: Dimensions, names: Collection[str]) -> TorchDist:
        """The layout of an existing checkpoint, by its names. Training may leave indices in them in any model."""
        stacks = (frozenset(NAMED_IF_MIXED), frozenset({"vision_layers"}), frozenset({"deepstack_mergers"}))
        named: frozenset[str] = frozenset()
        for stack in stacks:
            first = next((row for row in rows if stack.intersection(row.indices)), None)
            if first is not None and stacked_name(first, dimensions, stack)[0] in names:
                named |= stack
        spelled = {local: cls(dimensions, named, local) for local in (False, True)}
        count = {local: sum(layout.name(row)[0] in names for row in rows) for local, layout in spelled.items()}
        return spelled[count[True] > count[False]]

    def name(self, row: WeightRow) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Name of an expanded row's tensor, and its index in each of the first dimensions with their sizes."""
        return stacked_name(row, self.dimensions, self.named, local=self.local)

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """See `TensorLayout`."""
        name, stacked = self.name(row)
        rows, *width = megatron_shape(row, self.dimensions)
        counts = tuple(count for _, count in stacked)
        return {name + section: (*counts, part, *width) for section, part in self._sections(row, rows)}

    def _sections(self, row: WeightRow, rows: int) -> list[tuple[str, int]]:
        """Suffixes of the name, and the number of the parameter's rows for each."""
        return [(f".{name}", self.dimensions[size]) for name, size in row.sections] or [("", rows)]

    def leading(self, row: WeightRow) -> int:
        """See `TensorLayout`."""
        return len(self.name(row)[1])

    def slices(self, row: WeightRow) -> Iterator[ParamSlice]:
        """See `TensorLayout`."""
        name, stacked = self.name(row)
        index = 0
        for number, count in stacked:
            index = index * count + number
        rows, *width = megatron_shape(row, self.dimensions)
        for section, part in self._sections(row, rows):
            size = part * math.prod(width)
            yield ParamSlice(name + section, index * size, size)
