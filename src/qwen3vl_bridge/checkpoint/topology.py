"""Parallel sizes a checkpoint is meant for.

What lives here: whether a model can be split so, and how a tensor is cut into chunks. What may not: files.

A written checkpoint loads at any topology. But a loader reads every chunk it needs a part of as a whole, so chunks are
small, and cut where ranks are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.tensors import Shape, TensorSpec
from qwen3vl_bridge.dimensions import Dimensions


@dataclass(frozen=True)
class Topology:
    """Parallel sizes, and how large a chunk may be.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: expert-tensor-parallel size; None for `tp`.
        world_size: number of processes that train; None if it doesn't matter.
        chunk_bytes: size of a chunk at most, unless a single row has more.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    world_size: int | None = None
    chunk_bytes: int = 32 << 20

    def check(self, dimensions: Dimensions, *, stages: bool) -> None:
        """Check that a model can be split so.

        Args:
            dimensions: from `dimensions_of`; "vocab" counts padding too.
            stages: whether the format has pipeline stages.

        Raises:
            CheckpointError: it cannot; the message says why.
        """
        self.check_numbers()
        if self.pp > 1 and not stages:
            raise CheckpointError(f"--pp is {self.pp}, expected 1: an fsdp_dtensor checkpoint has no pipeline stages")
        self._check_experts(dimensions)
        widths = ("heads", "vocab", "v_heads", "v_ffn", "v_merged")
        for name in widths + (("ffn",) if dimensions.indices["dense_layers"] else ()):
            if dimensions[name] % self.tp:
                raise CheckpointError(f"--tp is {self.tp}, expected a divisor of {name}, which is {dimensions[name]}")
        groups, layers = dimensions["kv_heads"], len(dimensions.indices["text_layers"])
        if groups % self.tp and self.tp % groups:
            raise CheckpointError(f"--tp is {self.tp}, expected a multiple or divisor of kv_heads, which is {groups}")
        if layers % self.pp:
            raise CheckpointError(f"--pp is {self.pp}, expected a divisor of the {layers} text layers")
        self._check_world()

    def check_numbers(self) -> None:
        """Check the sizes alone.

        Raises:
            CheckpointError: one is no positive number.
        """
        for name in ("tp", "pp", "cp", "ep", "etp", "world_size", "chunk_bytes"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise CheckpointError(f"{_option(name)} is {size}, expected 1 or more")

    def _check_experts(self, dimensions: Dimensions) -> None:
        experts, ffn = dimensions["experts"], dimensions["moe_ffn"]
        if not dimensions.indices["moe_layers"]:
            if self.ep > 1 or (self.etp or 1) > 1:
                name, size = ("ep", self.ep) if self.ep > 1 else ("etp", self.etp)
                raise CheckpointError(f"--{name} is {size}, expected 1: a dense model has no experts to distribute")
            return
        if experts % self.ep:
            raise CheckpointError(f"--ep is {self.ep}, expected a divisor of the {experts} experts")
        size = self.tp if self.etp is None else self.etp
        if ffn % size:
            name = "etp" if self.etp else "tp, which --etp follows,"
            raise CheckpointError(f"--{name} is {size}, expected a divisor of the experts' width, which is {ffn}")

    def _check_world(self) -> None:
        if self.world_size is None:
            return
        etp = self.tp if self.etp is None else self.etp
        products = {"tp * pp * cp": self.tp * self.pp * self.cp}
        if self.ep > 1 or self.etp is not None:
            products["etp * ep * pp"] = etp * self.ep * self.pp
        for name, product in products.items():
            if self.world_size % product:
                raise CheckpointError(
                    f"--world-size is {self.world_size}, expected a multiple of {name}, which is {product}"
                )

    def chunks(self, spec: TensorSpec, leading: int = 0) -> Iterator[tuple[Shape, Shape]]:
        """Cut a tensor into boxes that follow one another in memory.

        Args:
            spec: the tensor.
            leading: how many of its first dimensions count layers or experts; every one gets boxes of its own, of
                whole rows.

        Yields:
            Offsets and sizes of each box, in order.
        """
        counts, shape = spec.shape[:leading], spec.shape[leading:]
        nbytes = spec.nbytes // max(math.prod(counts), 1)
        rows = list(self._rows(shape, nbytes))
        for index in itertools.product(*map(range, counts)):
            for start, count in rows:
                offsets = (start, *(0 for _ in shape[1:])) if shape else ()
                sizes = (count, *shape[1:]) if shape else ()
                yield (*index, *offsets), (*(1 for _ in counts), *sizes)

    def _rows(self, shape: Shape, nbytes: int) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each piece of a tensor."""
        rows = shape[0] if shape else 1
        if nbytes <= self.chunk_bytes or not shape:
            yield 0, rows
            return
        share = rows // self.tp if rows % self.tp == 0 else rows
        pieces = math.ceil(share / max(self.chunk_bytes // (nbytes // rows), 1))
        step = math.ceil(share / pieces)
        for first in range(0, rows, share):
            for start in range(first, first + share, step):
                yield start, min(step, first + share - start)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
