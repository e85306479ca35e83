"""The process that saving in `torch_dist` starts in Megatron-Bridge's loop.

What lives here: starting it before the run, blocking the run's signals in it, and refusing to train in it. What may
not: what is saved (`training/checkpoint_manager.py`).

megatron-core's writer passes its threads' results through a process of `multiprocessing`. By default it starts with the
first save, hours into a run, and lives as long as the run. It is spawned, so it runs the user's script again as a
module: if the script trains at once, instead of under `if __name__ == "__main__":`, both would wait for each other
forever. And launchers send it the signal that asks the run to save and exit.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

logger = logging.getLogger(__name__)

_PATIENCE = 120.0  # seconds, including the script's imports
_LATE = "the process that saves checkpoints has not answered for %.0f s; it imports the script that trains, and %s"
_GUARD = 'the script must do its work under `if __name__ == "__main__":`'


def check_script() -> None:
    """Refuse to continue if a spawned process runs the user's script again.

    Raises:
        RuntimeError: this is such a process.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the test that multiprocessing itself uses
        raise RuntimeError(f"this process was started to save checkpoints, but ran the training script again: {_GUARD}")


def start_saving_process() -> None:
    """Start it now. Megatron-core keeps it for all saves.

    Raises:
        RuntimeError: it ended at once.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    late = threading.Timer(_PATIENCE, logger.warning, [_LATE, _PATIENCE, _GUARD])
    late.daemon = True
    late.start()
    try:
        with signals_blocked():
            get_write_results_queue()
    except (EOFError, OSError) as error:
        raise RuntimeError(
            f"the process that saves checkpoints ended at once, for the reason printed above; {_GUARD}"
        ) from error
    finally:
        late.cancel()


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals that this process handles in the processes that the body starts; this one receives them as
    usual.

    They inherit the signal mask of this thread. Another thread receives a signal meanwhile, or this one afterwards, and
    Python calls the handler.
    """
    handled = {number for number in signal.valid_signals() if callable(signal.getsignal(number))} - {signal.SIGINT}
    resource_tracker.ensure_running()  # otherwise the process would start it, which ends with SIGTERM unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
