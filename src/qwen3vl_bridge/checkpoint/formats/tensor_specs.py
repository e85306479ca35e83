"""Common data of readers, writers and the planner: a tensor's description, and byte ranges in files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from qwen3vl_bridge.checkpoint.formats.slices import Slice

# torch name -> (name in a safetensors header, bytes per element)
_DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
DTYPE_OF_SAFETENSORS = {code: name for name, (code, _) in _DTYPES.items()}
SAFETENSORS_OF_DTYPE = {name: code for name, (code, _) in _DTYPES.items()}
ITEMSIZE = {name: size for name, (_, size) in _DTYPES.items()}
# Allowed dtypes of stored weights and of casts.
WEIGHT_DTYPES = ("float32", "float16", "bfloat16")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch's name) and shape of a tensor, contiguous and row-major."""

    name: str
    dtype: str
    shape: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * ITEMSIZE[self.dtype]

    def describe(self) -> str:
        """Shape and dtype as text."""
        return f"{list(self.shape)} {self.dtype}"


def main_dtype(specs: Iterable[TensorSpec]) -> str:
    """The dtype of most elements: that of a model which has others in addition."""
    counts: Counter[str] = Counter()
    for spec in specs:
        counts[spec.dtype] += spec.numel
    return counts.most_common(1)[0][0]


class Extent(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    offset: int
    length: int


class TensorSource(Protocol):
    """Tensors somewhere on disk."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor by name."""
        ...

    @property
    def files(self) -> Iterable[Path]:
        """The files that contain the tensors."""
        ...

    def drop(self, name: str) -> None:
        """Remove a tensor from the source."""
        ...

    def check(self, names: Iterable[str]) -> None:
        """Check that the bytes of some tensors are in their files.

        Raises:
            CheckpointError: they are not.
        """
        ...

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """Byte ranges of the elements of a slice, in order."""
        ...
