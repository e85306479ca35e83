"""Parallel sizes a checkpoint is meant for.

What lives here: whether a model can be split so, and how a tensor's rows are cut into chunks. What may not: files.

A written checkpoint loads at any topology. But a loader reads every chunk it needs a part of as a whole, so chunks are
small, and cut where tensor-parallel ranks are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.tensors import Shape, TensorSpec
from qwen3vl_bridge.dimensions import Dimensions


@dataclass(frozen=True)
class Topology:
    """Tensor, pipeline, context, expert and expert-tensor parallel sizes, and how large a chunk may be."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    chunk_bytes: int = 32 << 20

    def check(self, dimensions: Dimensions) -> None:
        """Check that a dense model can be split so.

        Args:
            dimensions: from `dimensions_of`.

        Raises:
            CheckpointError: it cannot; the message says why.
        """
        for name in ("tp", "pp", "cp", "ep", "etp"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise CheckpointError(f"--{name} is {size}, expected 1 or more")
        if self.pp > 1:
            raise CheckpointError(f"--pp is {self.pp}, expected 1: an fsdp_dtensor checkpoint has no pipeline stages")
        if self.ep > 1 or (self.etp or 1) > 1:
            name, size = ("ep", self.ep) if self.ep > 1 else ("etp", self.etp)
            raise CheckpointError(f"--{name} is {size}, expected 1: a dense model has no experts to distribute")
        for name in ("heads", "ffn", "vocab", "v_heads", "v_ffn", "v_merged"):
            if dimensions[name] % self.tp:
                raise CheckpointError(f"--tp is {self.tp}, expected a divisor of {name}, which is {dimensions[name]}")
        groups = dimensions["kv_heads"]
        if groups % self.tp and self.tp % groups:
            raise CheckpointError(f"--tp is {self.tp}, expected a multiple or divisor of kv_heads, which is {groups}")

    def chunks(self, spec: TensorSpec) -> Iterator[tuple[Shape, Shape]]:
        """Cut a tensor into boxes of whole rows, of `chunk_bytes` at most unless one row has more.

        Args:
            spec: the tensor.

        Yields:
            Offsets and sizes of each box, in order.
        """
        if spec.nbytes <= self.chunk_bytes or not spec.shape:
            yield (0,) * len(spec.shape), spec.shape
            return
        rows, inner = spec.shape[0], spec.shape[1:]
        share = rows // self.tp if rows % self.tp == 0 else rows
        pieces = math.ceil(share / max(self.chunk_bytes // (spec.nbytes // rows), 1))
        step = math.ceil(share / pieces)
        for first in range(0, rows, share):
            for start in range(first, first + share, step):
                yield (start, *(0 for _ in inner)), (min(step, first + share - start), *inner)
