"""Layouts of the weights in each format: which tensors it has, and the positions of a Megatron parameter's elements.

Every layout gives the positions of a row's Megatron parameter, element by element in its row-major order. That order is
common to all layouts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

from qwen3vl_bridge.checkpoint.formats.tensors import Shape
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights.rows import (
    NAMED_IF_MIXED,
    Dimensions,
    PackedExpert,
    ParamSlice,
    WeightRow,
    local_name,
    stacked_name,
    stored_rows,
)

# Layer specs, whose parameter names differ where one fuses a norm and a linear layer, or groups experts.
TRANSFORMER_ENGINE = "transformer_engine"
LOCAL = "local"


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


@dataclass(frozen=True)
class HuggingFace(TensorLayout):
    """safetensors, with the names and shapes of transformers."""

    pads_vocabulary: ClassVar[bool] = False

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """See `TensorLayout`."""
        return dict(zip(row.hf, row.hf_shapes(self.dimensions), strict=True))

    def leading(self, row: WeightRow) -> int:
        """See `TensorLayout`."""
        return int(isinstance(row, PackedExpert))

    def slices(self, row: WeightRow) -> Iterator[ParamSlice]:
        """See `TensorLayout`."""
        return row.hf_slices(self.dimensions)


@dataclass(frozen=True)
class FsdpDtensor(TensorLayout):
    """A Megatron-FSDP checkpoint: each parameter is a tensor, gate and up projections separate."""

    naming: str = TRANSFORMER_ENGINE

    def __post_init__(self) -> None:
        if self.naming not in (TRANSFORMER_ENGINE, LOCAL):
            raise CheckpointError(f"naming is {self.naming!r}, expected {TRANSFORMER_ENGINE!r} or {LOCAL!r}")

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """See `TensorLayout`."""
        rows, *width = row.megatron_shape(self.dimensions)
        names = (local_name(name) if self.naming == LOCAL else name for name in row.stored)
        return {name: (part, *width) for name, part in zip(names, stored_rows(row, rows, self.dimensions), strict=True)}


@dataclass(frozen=True)
class TorchDist(TensorLayout):
    """A checkpoint of megatron-core's own format: layers, and the experts of a layer, stacked in one tensor."""

    named: frozenset[str] = frozenset()  # indices that stay in the names of tensors instead
    local: bool = False  # whether it has the names of megatron-core's own local layer spec

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
        rows, *width = row.megatron_shape(self.dimensions)
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
        rows, *width = row.megatron_shape(self.dimensions)
        for section, part in self._sections(row, rows):
            size = part * math.prod(width)
            yield ParamSlice(name + section, index * size, size)
