"""The processes that share a conversion, and the progress that they show.

They communicate over gloo on all machines. If one of them dies, the others notice at the next collective.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import Any

from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.terminal import in_bytes, show

# How long processes wait for each other to start, and for each other's part of the work. A process that dies while
# working is noticed at once.
_START, _WORK = datetime.timedelta(minutes=10), datetime.timedelta(hours=12)
_SECONDS_BETWEEN_LINES = 5.0


class Ranks:
    """This process (`rank` of `size`) among those that work together: a single one, unless created by `of_torchrun`.

    As a context manager it shuts down the communication in order at the end.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        self._started = False

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._group is None:
            return
        import torch.distributed as dist

        # If a process simply exits, gloo's threads in another abort that one.
        if kind is None:
            self.all_gather(lambda: None)
        dist.destroy_process_group(None if self._started else self._group)
        self._group = None

    @classmethod
    def of_torchrun(cls) -> Ranks:
        """The processes that torchrun started, or only this one; a CheckpointError if they cannot reach each other."""
        number = os.environ.get("WORLD_SIZE", "1")
        if not number.isdecimal() or int(number) < 1:
            raise CheckpointError(f"WORLD_SIZE is {number!r}, expected the number of processes")
        size = int(number)
        if size == 1:
            return cls()
        import torch.distributed as dist

        alone = not dist.is_initialized()
        if alone:
            _check_environment(size)
        try:
            if alone:
                dist.init_process_group("gloo", timeout=_START)
            ranks = cls(dist.get_rank(), dist.get_world_size())
            ranks._started = alone
            ranks._group = dist.new_group(backend="gloo", timeout=_WORK)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"WORLD_SIZE is {size}, but the processes cannot connect to each other: {error}; expected processes "
                "started by torchrun, or no WORLD_SIZE for a single process"
            ) from error
        return ranks

    @property
    def first(self) -> bool:
        """Whether this is the process that does what is done only once."""
        return self.rank == 0

    def all_gather[Result](self, work: Callable[[], Result]) -> list[Result]:
        """Call a function in every process; returns the results of all. If one fails or dies, all raise an error."""
        if self.size == 1:
            return [work()]
        import torch.distributed as dist

        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # whatever it is, the others must not wait for this one
            error = failure
        outcomes: list[Any] = [None] * self.size
        mine = (result, None if error is None else f"{error}" or type(error).__name__)
        try:
            dist.all_gather_object(outcomes, mine, group=self._group)
        except RuntimeError as failure:
            reason = str(failure).splitlines()[0]
            raise CheckpointError(f"another of the {self.size} processes ended: {reason}") from failure
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise CheckpointError(f"process {rank} of {self.size}: {message}")
        return [outcome for outcome, _ in outcomes]

    def run_on_rank0[Result](self, work: Callable[[], Result]) -> Result:
        """Call a function in the first process; returns its result in every process; fails as `all_gather`."""
        return self.all_gather(lambda: work() if self.first else None)[0]  # pyright: ignore[reportReturnType]


def _check_environment(size: int) -> None:
    """Check what torch does not, before processes wait for each other; the message says if none was started."""
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal() or int(rank) >= size:
        raise CheckpointError(f"RANK is {rank!r}, expected 0 to {size - 1} for WORLD_SIZE {size}")
    if os.environ.get("MASTER_PORT", "").isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
        show(
            f"WORLD_SIZE is {size}, and this process (rank {rank}) was not started by torchrun: waiting up to "
            f"{int(_START.total_seconds() // 60)} minutes for the others; unset WORLD_SIZE to run as a single process",
            error=True,
        )


class Progress:
    """Bytes done of a total, on standard error. Thread-safe."""

    def __init__(self, label: str, total: int, *, shown: bool = True) -> None:
        self._label, self._total, self._done = label, total, 0
        self._shown, self._lock = shown, Lock()
        self._begun = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._shown and kind is None:
            self._line()

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self._begun

    def counted(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same blocks, counted as they pass."""
        for block in blocks:
            count = len(block)
            yield block
            self.advance(count)

    def advance(self, count: int) -> None:
        """Add a number of finished bytes."""
        with self._lock:
            self._done += count
            if self._shown and time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
                self._said = time.monotonic()
                self._line()

    def _line(self) -> None:
        rate = self._done / max(self.seconds, 1e-9)
        left = (self._total - self._done) / max(rate, 1.0)
        share = 100 * self._done / self._total if self._total else 100
        done, total, speed = map(in_bytes, (self._done, self._total, rate))
        text = f"{self._label}: {share:3.0f} %, {done} of {total}, {speed}/s, {left:.0f} s left"
        show(text, error=True)
