"""Operations that succeed on all processes of a run or fail on all of them.

What lives here: telling each other of failures, a folder that all write and that comes into its place when all have.
What may not: what is written, collectives themselves (`parallel/collectives.py`).

Between two collectives every process does things that may fail on its own: a full disk, a tensor that does not fit. One
that raised and left would keep the others waiting for it. So such things are done inside `together`.
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
    """Whether this process does what one does for all."""
    return torch.distributed.get_rank() == 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Where the body fails in one process, it fails in all.

    It ends with a collective, so every process has to come by, and no process may fail between the body's own ones.

    Raises:
        CheckpointError: the body has failed in another process; with what that one said.
    """
    problem: Exception | None = None
    try:
        yield
    except CheckpointException as error:  # torch's own way of failing together, which is no Exception
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
    """What each process said that failed in torch's own way of failing together."""
    return CheckpointError("; ".join(f"rank {rank}: {said}" for rank, (said, _) in error.failures.items()))


@contextlib.contextmanager
def staged_together(target: Path) -> Iterator[Path]:
    """A hidden folder beside the target that all processes write; it becomes the target when all have.

    In the body are other people's collectives. A process that fails between these cannot tell the others, who wait in
    one; so it raises at once, its end is their launcher's to notice, and nothing has come into its place.

    Args:
        target: where it is to be. What is there already is replaced.

    Yields:
        The hidden folder.

    Raises:
        CheckpointError: a process has failed, and the target is as it was.
    """
    with contextlib.ExitStack() as stack:
        aside = None
        with together():
            if is_first():
                aside = stack.enter_context(atomic_directory(target, logger.info, replace=lambda _: True))
        aside = broadcast_object(aside)
        assert aside is not None
        with together():
            if not aside.is_dir():
                raise CheckpointError(f"{aside} is not visible here, expected a file system that all ranks share")
        try:
            yield aside
        except CheckpointException as error:
            raise _said(error) from error
        wait_for_all()  # to have written
        with together():
            stack.close()
