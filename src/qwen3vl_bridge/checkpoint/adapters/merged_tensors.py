"""Joins several sources of tensors into one, which includes weights with adapters merged in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qwen3vl_bridge.checkpoint.conversion_plan import Task
from qwen3vl_bridge.checkpoint.formats.tensors import (
    ITEMSIZE,
    Extent,
    Segment,
    SegmentReader,
    Segments,
    Slice,
    TensorSource,
    TensorSpec,
    TransposedSlice,
    cast,
)

import torch
from torch import Tensor

# Elements of a weight that are computed at a time.
_BLOCK = 1 << 22


class JoinedTensors:
    """Sources whose tensors have prefixed names.

    Attributes:
        specs: all tensors by prefixed name.
    """

    def __init__(self, sources: Mapping[str, TensorSource]) -> None:
        """Join sources.

        Args:
            sources: by a prefix, such as "base/".
        """
        self._sources = dict(sources)
        self.specs: Mapping[str, TensorSpec] = {
            f"{prefix}{name}": spec for prefix, source in sources.items() for name, spec in source.specs.items()
        }

    @property
    def files(self) -> list[Path]:
        """The files that contain the tensors."""
        return [path for source in self._sources.values() for path in source.files]

    def drop(self, name: str) -> None:
        """Remove a tensor from the source."""
        self.specs = {key: spec for key, spec in self.specs.items() if key != name}

    def check(self, names: Iterable[str]) -> None:
        """See `TensorSource`."""
        for name in names:
            source, inner = self._find(name)
            source.check([inner])

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """See `TensorSource`."""
        source, inner = self._find(wanted.source)
        return source.extents(wanted._replace(source=inner))

    def _find(self, name: str) -> tuple[TensorSource, str]:
        prefix = next(prefix for prefix in self._sources if name.startswith(prefix))
        return self._sources[prefix], name.removeprefix(prefix)


def prefixed(task: Task, prefix: str) -> Task:
    """A task whose segments are read from a source that was joined under a prefix."""

    def renamed(segment: Segment) -> Segment:
        if isinstance(segment, Slice):
            return segment._replace(source=prefix + segment.source)
        if isinstance(segment, TransposedSlice):
            return segment._replace(
                slices=tuple(wanted._replace(source=prefix + wanted.source) for wanted in segment.slices)
            )
        return segment

    return replace(task, segments=Segments(renamed(segment) for segment in task.segments))


@dataclass(frozen=True)
class Merge:
    """A weight and its adapter, to be read from joined sources.

    Attributes:
        weight: [out, in]; its target is the merged weight.
        a: [dim, in].
        b: [out, dim], possibly in several tensors of rows.
        magnitude: [out] of DoRA, or None.
        scale: alpha / dim.
        transposed: the weight is [in, out]; only without a magnitude.
    """

    weight: Task
    a: Task
    b: tuple[Task, ...]
    magnitude: Task | None
    scale: float
    transposed: bool = False

    @property
    def name(self) -> str:
        """Name of the merged weight as a source. Another scale gives another name, and so another plan."""
        return f"{self.weight.target.name}, merged with {self.scale!r}"


class MergedTensors:
    """Joined sources, and merged weights under separate names.

    A merged weight is computed when it is read, and stored in an unnamed file until the next one is read. So only one
    weight is ever stored; reading two of them alternately computes them repeatedly.

    Attributes:
        specs: all tensors.
    """

    def __init__(self, joined: JoinedTensors, merges: Iterable[Merge]) -> None:
        self._joined, self._merges = joined, {merge.name: merge for merge in merges}
        merged = {name: replace(merge.weight.target, name=name) for name, merge in self._merges.items()}
        self.specs: Mapping[str, TensorSpec] = {**joined.specs, **merged}
        # A separate reader: the calling one is in the middle of filling a buffer.
        self._reader = SegmentReader(joined)
        # One file for all: readers cache open files by path, which a second file might get again.
        self._file, self._latest = tempfile.TemporaryFile(), ""  # noqa: SIM115

    @property
    def files(self) -> list[Path]:
        """The files that contain the tensors."""
        return self._joined.files

    def drop(self, name: str) -> None:
        """Remove a tensor from the source."""
        self.specs = {key: spec for key, spec in self.specs.items() if key != name}

    def check(self, names: Iterable[str]) -> None:
        """See `TensorSource`."""
        self._joined.check(name for name in names if name not in self._merges)

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """See `TensorSource`."""
        if wanted.source not in self._merges:
            yield from self._joined.extents(wanted)
            return
        if wanted.source != self._latest:
            self._latest = ""
            self._compute(self._merges[wanted.source])
            self._latest = wanted.source
        size = ITEMSIZE[self.specs[wanted.source].dtype]
        yield Extent(Path(f"/proc/self/fd/{self._file.fileno()}"), wanted.start * size, wanted.length * size)

    def _compute(self, merge: Merge) -> None:
        target = merge.weight.target
        count, width = target.shape
        right = self._floats(merge.a.segments, merge.a)
        left = torch.cat([self._floats(part.segments, part) for part in merge.b])
        if merge.transposed:
            left, right = right.t(), left.t()
        magnitude = None if merge.magnitude is None else self._floats(merge.magnitude.segments, merge.magnitude)
        self._file.seek(0)
        self._file.truncate()
        step = max(1, _BLOCK // width)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            segments = merge.weight.segments.cut(start * width, (rows.stop - start) * width)
            weight = self._floats(segments).view(-1, width)
            weight += merge.scale * (left[rows] @ right)
            if magnitude is not None:
                weight *= (magnitude[rows] / torch.linalg.norm(weight, dim=1))[:, None]
            data = memoryview(weight.view(torch.uint8).numpy()).cast("B")
            self._file.write(cast(data, "float32", target.dtype, target.name))
        self._file.flush()

    def _floats(self, segments: Iterable[Segment], whole: Task | None = None) -> Tensor:
        """Elements in float32; in the shape of the task that they form."""
        data = bytearray()
        for block in self._reader.blocks(segments, "float32"):
            data += block
        values = torch.frombuffer(data, dtype=torch.float32)
        return values if whole is None else values.view(whole.target.shape)
