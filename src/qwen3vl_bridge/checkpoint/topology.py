"""Parallel sizes for which a checkpoint is laid out.

A written checkpoint can be loaded with any topology. But a loader reads every chunk of which it needs a part as a
whole, so chunks are small, and cut at rank boundaries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.formats.tensors import Shape, TensorSpec
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.models.divisibility import indivisible
from qwen3vl_bridge.weights.rows import Dimensions

# Minimum size of chunks. In a small model each of many ranks has less of a layer, and a separate item for each would
# take longer to find than to read.
_LEAST_BYTES = 1 << 20

# Identifies ranks, or groups of them; equal values have more of the same rows.
Owner = tuple[int, ...]


class Part(NamedTuple):
    """Rows of a tensor from `first` on, up to the next part."""

    first: int
    owner: Owner


@dataclass(frozen=True)
class Topology:
    """Parallel sizes, and the maximum size of a chunk.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: expert-tensor-parallel size; None for `tp`.
        world_size: number of training processes; None for the minimum of the other sizes.
        chunk_bytes: maximum size of a chunk, unless a single row is larger.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    world_size: int | None = None
    chunk_bytes: int = 32 << 20

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks that share an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def ranks(self) -> int:
        """Number of training processes."""
        return math.lcm(*self._products().values()) if self.world_size is None else self.world_size

    def _products(self) -> dict[str, int]:
        """The divisors of the number of processes, as text."""
        products = {"tp * pp * cp": self.tp * self.pp * self.cp}
        if self.ep > 1 or self.etp is not None:
            products["etp * ep * pp"] = self.expert_tp * self.ep * self.pp
        return products

    def check(self, dimensions: Dimensions, *, stages: bool) -> None:
        """Check that a model can be split this way.

        Args:
            dimensions: from `dimensions_of`; "vocab" includes padding.
            stages: whether the format has pipeline stages.

        Raises:
            CheckpointError: it cannot; the message says why.
        """
        self.check_numbers()
        if self.pp > 1 and not stages:
            raise CheckpointError(f"--pp is {self.pp}, expected 1: an fsdp_dtensor checkpoint has no pipeline stages")
        if not dimensions.indices["moe_layers"] and (self.ep > 1 or (self.etp or 1) > 1):
            name, size = ("ep", self.ep) if self.ep > 1 else ("etp", self.etp)
            raise CheckpointError(f"--{name} is {size}, expected 1: a dense model has no experts to distribute")
        shares = indivisible(dimensions, tp=self.tp, cp=self.cp, ep=self.ep, etp=self.expert_tp)
        for setting, size, split, ranks, either in shares:
            option = "tp, which --etp follows," if split == "etp" and self.etp is None else split.split(" of ")[0]
            divisor = "multiple or divisor" if either else "divisor"
            raise CheckpointError(f"--{option} is {ranks}, expected a {divisor} of {setting}, which is {size}")
        layers = len(dimensions.indices["text_layers"])
        if layers % self.pp:
            raise CheckpointError(f"--pp is {self.pp}, expected a divisor of the {layers} text layers")
        self._check_world()

    def check_numbers(self) -> None:
        """Check only the sizes.

        Raises:
            CheckpointError: one is not a positive number.
        """
        for name in ("tp", "pp", "cp", "ep", "etp", "world_size", "chunk_bytes"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise CheckpointError(f"{_option(name)} is {size}, expected 1 or more")

    def _check_world(self) -> None:
        for name, product in self._products().items():
            if self.ranks % product:
                raise CheckpointError(
                    f"--world-size is {self.world_size}, expected a multiple of {name}, which is {product}"
                )

    def chunks(
        self, spec: TensorSpec, leading: int = 0, parts: Mapping[Shape, Sequence[Part]] | None = None
    ) -> Iterator[tuple[Owner, Shape, Shape]]:
        """Cut a tensor into boxes that are consecutive in memory.

        Args:
            spec: the tensor.
            leading: number of its leading dimensions that count layers or experts; every one gets its own boxes, of
                whole rows.
            parts: rows of different ranks, by the indices in the leading dimensions; all rows are one part if there is
                none.

        Yields:
            Owner of a box's first row; offsets and sizes of the box, in order.
        """
        counts, shape = spec.shape[:leading], spec.shape[leading:]
        rows, nbytes = shape[0] if shape else 1, spec.nbytes // max(math.prod(counts), 1)
        for index in itertools.product(*map(range, counts)):
            held = (parts or {}).get(index, (Part(0, ()),))
            for start, count, owner in self._rows(rows, nbytes, held):
                offsets = (start, *(0 for _ in shape[1:])) if shape else ()
                sizes = (count, *shape[1:]) if shape else ()
                yield owner, (*index, *offsets), (*(1 for _ in counts), *sizes)

    def _rows(self, rows: int, nbytes: int, held: Sequence[Part]) -> Iterator[tuple[int, int, Owner]]:
        """First row, number of rows and owner of each box."""
        least = min(_LEAST_BYTES, self.chunk_bytes) * rows / max(nbytes, 1)
        most = max(self.chunk_bytes * rows // max(nbytes, 1), 1)
        first, owner = 0, held[0].owner
        for part in (*held[1:], Part(rows, ())):
            if part.first < rows and (part.first - first < least or rows - part.first < least):
                continue
            segments = math.ceil((part.first - first) / most)
            step = math.ceil((part.first - first) / max(segments, 1))
            for start in range(first, part.first, max(step, 1)):
                yield start, min(step, part.first - start), owner
            first, owner = part.first, part.owner


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
