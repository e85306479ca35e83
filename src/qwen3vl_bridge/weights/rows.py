"""Kinds of rows of the weight table: the relation between a Megatron parameter and its Hugging Face tensors.

Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qwen3vl_bridge.weights.dimensions import Dimensions

Shape = tuple[str | int, ...]


@dataclass(frozen=True)
class Row:
    """One Megatron parameter and its Hugging Face tensors.

    Attributes:
        megatron: Megatron parameter name, with Transformer Engine's layer spec.
        hf: names of its Hugging Face tensors, in the order of Megatron's parameter.
        shapes: shape of each Hugging Face tensor; a string names a size of `Dimensions`.
        indices: what each `*` counts, entries of `Dimensions.indices`. A Hugging Face name may have fewer of them.
        condition: key of `dimensions` that must be true for the row to exist, or None.
        replicated: the parameter is a plain torch one, whole on every tensor-parallel rank.
        float32: the parameter is in float32 in models of 16 bits too, and in Megatron's checkpoints of them.
        position: the numbers that replace the `*`, in an expanded row.
        pattern: the Megatron parameter name as in the table, in an expanded row.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    indices: tuple[str, ...] = ()
    condition: str | None = None
    replicated: bool = False
    float32: bool = False
    position: tuple[int, ...] = ()
    pattern: str = ""

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the tensors as which an fsdp_dtensor checkpoint stores the parameter, in parts of dimension 0."""
        return (self.megatron,)

    @property
    def of_vocabulary(self) -> bool:
        """Whether the parameter has a row for each token, so that Megatron may pad it."""
        return self.shapes[0][0] == "vocab"

    @property
    def expert(self) -> int:
        """Index of an expanded row's expert, for rows of experts."""
        return self.position[self.indices.index("experts")]

    def at(self, *numbers: int) -> Row:
        """This row with its `*` replaced by `numbers`, from left to right, on both sides."""
        hf = tuple(_fill(name, numbers) for name in self.hf)
        return replace(self, megatron=_fill(self.megatron, numbers), hf=hf, position=numbers, pattern=self.megatron)

    def numbers(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors as numbers; for a packed tensor, those of the row's expert."""
        return tuple(tuple(dimensions[d] if isinstance(d, str) else d for d in shape) for shape in self.shapes)


class Copy(Row):
    """One tensor, the same on both sides."""


class QKV(Row):
    """Three tensors q, k, v; Megatron interleaves them by query group: [q heads of the group, its k, its v] ..."""


class ConcatenatedQKV(Row):
    """One tensor [q; k; v]; Megatron interleaves it by head: [q, k, v of head 0], [q, k, v of head 1] ..."""


class GatedQKV(Row):
    """Three tensors q, k, v, where q has each head's queries and then its output gate.

    Megatron interleaves them by query group: [queries of its heads, their gates, its k, its v] ...
    """


class ZeroCentered(Row):
    """One tensor; Megatron's is less by one, because its norms multiply by 1 + weight.

    In float32 that is exact for weights of at least 0.5, and for those of bfloat16 from 2^-16 in magnitude; others are
    rounded by up to 6e-8.
    """


@dataclass(frozen=True)
class Sectioned(Row):
    """Tensors that Megatron concatenates; a checkpoint of either format stores the sections separately.

    Attributes:
        sections: the name of each, and its size along dimension 0, an entry of `Dimensions`.
    """

    sections: tuple[tuple[str, str], ...] = ()

    @property
    def stored(self) -> tuple[str, ...]:
        """The sections by name."""
        return tuple(f"{self.megatron}.{name}" for name, _ in self.sections)


class GatedMLP(Row):
    """Two tensors gate, up; Megatron concatenates them [gate; up]. fsdp_dtensor checkpoints store them separately."""

    @property
    def stored(self) -> tuple[str, ...]:
        """See `gate_and_up`."""
        return gate_and_up(self.megatron)


@dataclass(frozen=True)
class PackedExpert(Row):
    """One expert of a tensor that has all experts of a layer, [experts, ...].

    Attributes:
        transposed: the tensor is input-major, [experts, in, out], unlike Megatron's [out, in].
        gated: it is the gate and the up projection, concatenated; stored separately in an fsdp_dtensor checkpoint, like
            `GatedMLP`.
    """

    transposed: bool = False
    gated: bool = False

    @property
    def stored(self) -> tuple[str, ...]:
        """As for a GatedMLP if it is one."""
        return gate_and_up(self.megatron) if self.gated else (self.megatron,)


@dataclass(frozen=True)
class ExpertInput(Row):
    """One expert's rows of a matrix of all experts of a layer, [experts * rows, in]: expert by expert."""


@dataclass(frozen=True)
class ExpertOutput(Row):
    """One expert's columns of a matrix of all experts of a layer, [out, columns * experts].

    The first column of every expert comes first, then the second of every expert, and so on.

    Attributes:
        gated: it is the gate and the up projection, concatenated.
        whole: these are one tensor in an fsdp_dtensor checkpoint, where those of a `GatedMLP` are two.
    """

    gated: bool = False
    whole: bool = False

    @property
    def stored(self) -> tuple[str, ...]:
        """As for a GatedMLP if it is one."""
        return gate_and_up(self.megatron) if self.gated and not self.whole else (self.megatron,)


def stored_rows(row: Row, rows: int, dimensions: Dimensions) -> tuple[int, ...]:
    """Number of a parameter's rows in each of `Row.stored`: its section's, or equal parts."""
    if isinstance(row, Sectioned):
        return tuple(dimensions[size] for _, size in row.sections)
    return (rows // len(row.stored),) * len(row.stored)


def gate_and_up(megatron: str) -> tuple[str, str]:
    """Names of a concatenated parameter's gate and up projection in an fsdp_dtensor checkpoint."""
    return f"{megatron}_w", f"{megatron}_v"


def _fill(name: str, numbers: Sequence[int]) -> str:
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name


def hf_shapes(row: Row, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
    """Shapes of a row's whole Hugging Face tensors: some have all experts, where `Row.numbers` gives one's part."""
    shapes, experts = row.numbers(dimensions), dimensions["experts"]
    if isinstance(row, PackedExpert):
        return tuple((experts, *shape) for shape in shapes)
    if isinstance(row, ExpertInput):
        return tuple((experts * rows, width) for rows, width in shapes)
    if isinstance(row, ExpertOutput):
        return tuple((out, columns * experts) for out, columns in shapes)
    return shapes


def expand(rows: tuple[Row, ...], dimensions: Dimensions) -> Iterator[Row]:
    """The rows of a model of these dimensions, one per Megatron parameter, without any `*`.

    Args:
        rows: rows of the table, with `*`.
        dimensions: from `dimensions_of`.
    """
    for row in rows:
        if row.condition is None or dimensions[row.condition]:
            for numbers in itertools.product(*(dimensions.indices[name] for name in row.indices)):
                yield row.at(*numbers)


def parameter_count(rows: tuple[Row, ...], dimensions: Dimensions) -> int:
    """Number of parameters of a model of these dimensions, without building it."""
    return sum(math.prod(shape) for row in expand(rows, dimensions) for shape in row.numbers(dimensions))
