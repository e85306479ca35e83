"""The processes that megatron-core and Megatron-Bridge start in order to save checkpoints.

Set inside a `with` block: `filesystem_async._results_queue`, the queue through which megatron-core's writer of
`torch_dist` gets the results of its threads. megatron-core has no setting for it. Delete `results_in_this_process` when
a synchronous save no longer starts a process.

Read: `_inheriting`, which Python's multiprocessing sets and reads in a spawned process while the process imports
the main script. Delete `is_importing_main_script` when Python has a public test.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from collections.abc import Iterator

from megatron.core.dist_checkpointing.strategies import filesystem_async


@contextlib.contextmanager
def results_in_this_process() -> Iterator[None]:
    """Make megatron-core's checkpoint writer collect its threads' results in this process, inside the `with` block.

    Otherwise the writer starts a process to collect them, even for a synchronous save. It is spawned, so it imports
    the user's script. It lives as long as the run, and launchers send it the signal that asks a run to save and exit.
    """
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = None  # Megatron-Bridge would end its process when a run fails


def is_importing_main_script() -> bool:
    """Return True if multiprocessing has spawned this process, and it is importing the user's main script."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)
