"""Processes that read ahead for a training loop, and the signal that asks a run to save and leave.

What lives here: how such a process begins, and how it ends. What may not: loaders, what the run does about the signal.

torchrun and Slurm send the signal to all processes of a rank. A worker that ends by it ends the run too, which is then
in no state to save. So workers ignore it, and leave when the process that they read for does.

A worker is a fork: it has the objects of the process that it reads for, and none of that one's threads. An object that
owns threads, such as a video decoder that waits to be collected there, must not be collected here, which would wait for
them for ever.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize

_GRACE = 1.0  # seconds


def ignoring(number: int | None, begin: Callable[[int], None] | None = None) -> Callable[[int], None]:
    """What a loader is to be given as `worker_init_fn`.

    Args:
        number: of the signal that its workers ignore; None for none.
        begin: what workers begin with anyway.
    """
    if number is not None:
        end_workers_at_exit()
    return partial(_begin, number, begin)


def _begin(number: int | None, begin: Callable[[int], None] | None, worker: int) -> None:
    gc.freeze()  # what was there before the fork is not this process's to collect
    if begin is not None:
        begin(worker)
    if number is not None:
        signal.signal(number, signal.SIG_IGN)  # in place of torch's handler, which ends the worker


def end_workers_at_exit() -> None:
    """Let no worker that ignores SIGTERM keep this process from ending.

    Python sends it to those whose loader is still there when a process exits, as after an error, and then waits for
    them without end.
    """
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    """End this process's daemons as Python does, and those that don't mind by force."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would take it for an accident
    daemons = [process for process in multiprocessing.active_children() if process.daemon]
    for process in daemons:
        process.terminate()
    deadline = time.monotonic() + _GRACE
    for process in daemons:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
