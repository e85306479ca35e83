"""Reads runs of tensors as a stream of bytes, through one buffer of a fixed size.

What lives here: reading byte ranges, and the cast of a buffer from one dtype to another. What may not: formats, plans.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.tensors import ITEMSIZE, Run, TensorSource

# Small enough to stay in a processor's cache between reading and writing.
_BLOCK = 1 << 18
_OPEN_FILES = 32


class RunReader:
    """Reads runs of one source. Not for several threads at once."""

    def __init__(self, source: TensorSource, block: int = _BLOCK) -> None:
        self._source = source
        self._buffer = memoryview(bytearray(block))
        self._files: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def blocks(self, runs: Iterable[Run], dtype: str) -> Iterator[memoryview]:
        """The bytes of a concatenation of runs.

        Args:
            runs: the runs.
            dtype: what the bytes are to be; runs of another dtype are cast.

        Yields:
            Pieces; each is valid until the next is asked for.

        Raises:
            CheckpointError: a file cannot be read, or ends early, or a value does not fit the dtype.
        """
        used, current, name = 0, dtype, ""
        for run in runs:
            previous, name = name, run.source
            found = self._source.specs[run.source].dtype
            if found != current:
                if used:
                    yield cast(self._buffer[:used], current, dtype, previous)
                used, current = 0, found
            for path, offset, length in self._source.extents(run):
                file = self._open(path, run.source)
                while length:
                    take = min(length, len(self._buffer) - used)
                    self._read(file, self._buffer[used : used + take], offset, path, run.source)
                    used, offset, length = used + take, offset + take, length - take
                    if used == len(self._buffer):
                        yield cast(self._buffer, current, dtype, name)
                        used = 0
        if used:
            yield cast(self._buffer[:used], current, dtype, name)

    def _open(self, path: Path, name: str) -> int:
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path}, tensor {name}: {error.strerror}") from error
        self._files[path] = file
        return file

    def _read(self, file: int, into: memoryview, offset: int, path: Path, name: str) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(file, [into[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{path}, tensor {name}: {error.strerror} at byte {offset + done}") from error
            if not count:
                left = len(into) - done
                raise CheckpointError(
                    f"{path}, tensor {name}: ends at byte {offset + done}, expected {left} more bytes"
                )
            done += count


def cast(data: memoryview, source: str, target: str, name: str) -> memoryview:
    """Elements of one dtype as elements of another, rounded to nearest even.

    Args:
        data: the elements.
        source: their dtype.
        target: the dtype to be.
        name: the tensor they are of, for the error.

    Raises:
        CheckpointError: a finite element is too large for the other dtype.
    """
    if source == target:
        return data
    import torch

    before = torch.frombuffer(data, dtype=getattr(torch, source), count=len(data) // ITEMSIZE[source])
    after = before.to(getattr(torch, target))
    if ITEMSIZE[target] <= ITEMSIZE[source]:
        overflown = after.isinf() & before.isfinite()
        if overflown.any():
            raise CheckpointError(f"{name}: value {before[overflown][0].item():g} is too large for {target}")
    return memoryview(after.view(torch.uint8).numpy())
