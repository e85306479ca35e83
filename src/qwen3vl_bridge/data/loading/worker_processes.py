"""Data-loading processes of a training loop, and the signal that asks a run to save and exit.

torchrun and Slurm send the signal to all processes of a rank. A worker that is killed by it ends the run too, before it
can save. So workers ignore it, and exit with the process that they read for.

A worker is a fork: it has the objects of its parent process, but none of its threads. An object that owns threads, such
as an uncollected video decoder, must not be collected in the worker, which would wait for them forever.
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
    """The `worker_init_fn` of a loader.

    Args:
        number: of the signal that its workers ignore; None for none.
        begin: another initialisation of the workers, called first.
    """
    if number is not None:
        end_workers_at_exit()
    return partial(_begin, number, begin)


def _begin(number: int | None, begin: Callable[[int], None] | None, worker: int) -> None:
    gc.freeze()  # objects from before the fork must not be collected in this process
    if begin is not None:
        begin(worker)
    if number is not None:
        signal.signal(number, signal.SIG_IGN)  # replaces torch's handler, which ends the worker


def end_workers_at_exit() -> None:
    """Make sure that workers that ignore SIGTERM do not keep this process from exiting.

    If a loader still exists when a process exits, as after an error, Python sends SIGTERM to its workers, and then
    waits for them without a timeout.
    """
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    """Terminate this process's daemons as Python does, and kill those that ignore it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report an error
    daemons = [process for process in multiprocessing.active_children() if process.daemon]
    for process in daemons:
        process.terminate()
    deadline = time.monotonic() + _GRACE
    for process in daemons:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
