"""The bytes that torch.save writes around a tensor's bytes."""

from __future__ import annotations

import io
import math
from functools import lru_cache
from typing import IO, NamedTuple, cast

import torch


class Template(NamedTuple):
    """An archive is `head`, `nbytes` of payload, `tail`."""

    head: bytes
    nbytes: int
    tail: bytes


class _Recorder(io.RawIOBase):
    """A file that records what is written and skips the tensor's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[int, bytes]] = []
        self.skipped: list[tuple[int, int]] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data) -> int:
        self.written.append((self._position, bytes(data)))
        self._position += len(self.written[-1][1])
        return len(self.written[-1][1])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset if whence == io.SEEK_SET else self._position + offset
        self.skipped.append((self._position, target - self._position))
        self._position = target
        return target


@lru_cache(maxsize=256)
def template(dtype: str, shape: tuple[int, ...]) -> Template:
    """Head and tail of the archive of a contiguous tensor.

    Args:
        dtype: torch's name of it.
        shape: the tensor's; not empty.

    Raises:
        RuntimeError: this version of torch has another archive format.
    """
    recorder = _Recorder()
    nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
    with torch.serialization.skip_data():
        # The memory is never accessed.
        torch.save(torch.empty(shape, dtype=getattr(torch, dtype)), cast(IO[bytes], recorder))
    holes = [hole for hole in recorder.skipped if hole[1] == nbytes]
    if len(holes) != 1:
        raise RuntimeError(f"torch {torch.__version__} left {recorder.skipped} open for a payload of {nbytes} bytes")
    start = holes[0][0]
    end = start + nbytes
    size = recorder.tell()
    head, tail = bytearray(start), bytearray(size - end)
    for position, data in recorder.written:
        part, base = (head, 0) if position < start else (tail, end)
        part[position - base : position - base + len(data)] = data
    return Template(bytes(head), nbytes, bytes(tail))
