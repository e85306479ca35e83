"""Operations that succeed on all processes of a run or fail on all of them.

What lives here: communicating failures, a folder that all processes write and that is renamed when all have finished.
What may not: what is written, collectives themselves (`parallel/collectives.py`).

Between two collectives every process does things that may fail on only one: a full disk, a tensor that does not fit. If
one raised and left, the others would wait for it. So such things are done inside `all_or_none`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from qwen3vl_bridge.files.atomic import atomic_directory
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.parallel.collectives import broadcast_object, gather_objects, wait_for_all

import torch
from torch.distributed.checkpoint import CheckpointException

logger = logging.getLogger(__name__)


def is_first() -> bool:
    """Whether this process does what only one has to do."""
    return torch.distributed.get_rank() == 0


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """If the body fails in one process, it fails in all.

    It ends with a collective, so every process has to reach its end, and no process may fail between collectives of the
    body itself.

    Raises:
        CheckpointError: the body has failed in another process; with that process's message.
    """
    problem: Exception | None = None
    try:
        yield
    except CheckpointException as error:  # torch's own way of failing together, which is not an Exception
        problem = _said(error)
        problem.__cause__ = error
    except Exception as error:
        problem = error
    said = gather_objects(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if found := [f"rank {rank}: {words}" for rank, words in enumerate(said) if words is not None]:
        raise CheckpointError("; ".join(found))


def _said(error: CheckpointException) -> CheckpointError:
    """Messages of the processes that failed in torch's own way of failing together."""
    return CheckpointError("; ".join(f"rank {rank}: {said}" for rank, (said, _) in error.failures.items()))


@contextlib.contextmanager
def all_or_none_folder(target: Path) -> Iterator[Path]:
    """A hidden folder next to the target that all processes write; it becomes the target when all have finished.

    The body contains collectives of other packages. A process that fails between these cannot tell the others, which
    wait in one; so it raises at once, the launcher has to notice its end, and the target is unchanged.

    Args:
        target: the final path. An existing folder is replaced.

    Yields:
        The hidden folder.

    Raises:
        CheckpointError: a process has failed, and the target is unchanged.
    """
    with contextlib.ExitStack() as stack:
        aside = None
        with all_or_none():
            if is_first():
                aside = stack.enter_context(atomic_directory(target, logger.info, replace=lambda _: True))
        aside = broadcast_object(aside)
        assert aside is not None
        with all_or_none():
            if not aside.is_dir():
                raise CheckpointError(f"{aside} is not visible here, expected a file system that all ranks share")
        try:
            yield aside
        except CheckpointException as error:
            raise _said(error) from error
        wait_for_all()  # for all to have written
        with all_or_none():
            stack.close()
