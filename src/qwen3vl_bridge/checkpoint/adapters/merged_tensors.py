"""Several sources of tensors as one, and in it weights that adapters have been merged into.

What lives here: W + alpha / dim * B A, and DoRA's lengths, in float32 and rounded once, a block of rows at a time. What
may not: which tensors are merged (`merging.py`), formats.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.byte_streams import PieceReader, cast
from qwen3vl_bridge.checkpoint.formats.slices import Piece, Pieces, Run, Transposed
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, Extent, TensorSource, TensorSpec
from qwen3vl_bridge.checkpoint.planning.plan import Task

import torch
from torch import Tensor

# Elements of a weight that are computed at a time.
_BLOCK = 1 << 22


class JoinedTensors:
    """Sources whose tensors go by prefixed names.

    Attributes:
        specs: all tensors by prefixed name.
    """

    def __init__(self, sources: Mapping[str, TensorSource]) -> None:
        """Join them.

        Args:
            sources: by a prefix, such as "base/".
        """
        self._sources = dict(sources)
        self.specs: Mapping[str, TensorSpec] = {
            f"{prefix}{name}": spec for prefix, source in sources.items() for name, spec in source.specs.items()
        }

    @property
    def files(self) -> list[Path]:
        """The files they lie in."""
        return [path for source in self._sources.values() for path in source.files]

    def drop(self, name: str) -> None:
        """Forget a tensor."""
        self.specs = {key: spec for key, spec in self.specs.items() if key != name}

    def check(self, names: Iterable[str]) -> None:
        """As of any source."""
        for name in names:
            source, inner = self._find(name)
            source.check([inner])

    def extents(self, run: Run) -> Iterator[Extent]:
        """As of any source."""
        source, inner = self._find(run.source)
        return source.extents(run._replace(source=inner))

    def _find(self, name: str) -> tuple[TensorSource, str]:
        prefix = next(prefix for prefix in self._sources if name.startswith(prefix))
        return self._sources[prefix], name.removeprefix(prefix)


def prefixed(task: Task, prefix: str) -> Task:
    """A task whose pieces are read from a source that was joined under a prefix."""

    def renamed(piece: Piece) -> Piece:
        if isinstance(piece, Run):
            return piece._replace(source=prefix + piece.source)
        if isinstance(piece, Transposed):
            return piece._replace(runs=tuple(run._replace(source=prefix + run.source) for run in piece.runs))
        return piece

    return replace(task, pieces=Pieces(renamed(piece) for piece in task.pieces))


@dataclass(frozen=True)
class Merge:
    """A weight and its adapter, to be read from joined sources.

    Attributes:
        weight: [out, in]; its target is what the merged weight is to be.
        a: [dim, in].
        b: [out, dim], its rows perhaps in several.
        magnitude: [out] of DoRA, or None.
        scale: alpha / dim.
        transposed: the weight is [in, out]; without a magnitude.
    """

    weight: Task
    a: Task
    b: tuple[Task, ...]
    magnitude: Task | None
    scale: float
    transposed: bool = False

    @property
    def name(self) -> str:
        """What the merged weight is called as a source. Another scale gives another name, and so another plan."""
        return f"{self.weight.target.name}, merged with {self.scale!r}"


class MergedTensors:
    """Joined sources, and merged weights under names of their own.

    A merged weight is computed when it is read, and lies in a nameless file until the next one is. So nothing but one
    weight is ever held; who reads two by turns has them computed again and again.

    Attributes:
        specs: all tensors.
    """

    def __init__(self, joined: JoinedTensors, merges: Iterable[Merge]) -> None:
        self._joined, self._merges = joined, {merge.name: merge for merge in merges}
        merged = {name: replace(merge.weight.target, name=name) for name, merge in self._merges.items()}
        self.specs: Mapping[str, TensorSpec] = {**joined.specs, **merged}
        # A reader of its own: the one who asks is in the middle of filling a buffer.
        self._reader = PieceReader(joined)
        # One file for all: readers keep what they open by its path, which a second file might get again.
        self._file, self._latest = tempfile.TemporaryFile(), ""  # noqa: SIM115

    @property
    def files(self) -> list[Path]:
        """The files they lie in."""
        return self._joined.files

    def drop(self, name: str) -> None:
        """Forget a tensor."""
        self.specs = {key: spec for key, spec in self.specs.items() if key != name}

    def check(self, names: Iterable[str]) -> None:
        """As of any source."""
        self._joined.check(name for name in names if name not in self._merges)

    def extents(self, run: Run) -> Iterator[Extent]:
        """As of any source."""
        if run.source not in self._merges:
            yield from self._joined.extents(run)
            return
        if run.source != self._latest:
            self._latest = ""
            self._compute(self._merges[run.source])
            self._latest = run.source
        size = ITEMSIZE[self.specs[run.source].dtype]
        yield Extent(Path(f"/proc/self/fd/{self._file.fileno()}"), run.start * size, run.length * size)

    def _compute(self, merge: Merge) -> None:
        target = merge.weight.target
        count, width = target.shape
        right = self._floats(merge.a.pieces, merge.a)
        left = torch.cat([self._floats(part.pieces, part) for part in merge.b])
        if merge.transposed:
            left, right = right.t(), left.t()
        magnitude = None if merge.magnitude is None else self._floats(merge.magnitude.pieces, merge.magnitude)
        self._file.seek(0)
        self._file.truncate()
        step = max(1, _BLOCK // width)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            pieces = merge.weight.pieces.cut(start * width, (rows.stop - start) * width)
            weight = self._floats(pieces).view(-1, width)
            weight += merge.scale * (left[rows] @ right)
            if magnitude is not None:
                weight *= (magnitude[rows] / torch.linalg.norm(weight, dim=1))[:, None]
            data = memoryview(weight.view(torch.uint8).numpy()).cast("B")
            self._file.write(cast(data, "float32", target.dtype, target.name))
        self._file.flush()

    def _floats(self, pieces: Iterable[Piece], whole: Task | None = None) -> Tensor:
        """Elements in float32; in the shape of a task that they are all of."""
        data = bytearray()
        for block in self._reader.blocks(pieces, "float32"):
            data += block
        values = torch.frombuffer(data, dtype=torch.float32)
        return values if whole is None else values.view(whole.target.shape)
