"""A function of the tests, or a module as a program, on several ranks: real processes.

They are forked from a server that has imported Megatron and joined nothing, one for each process of pytest: an import
takes a rank longer than most of what it is started for. `torchrun` itself starts the README's commands in their tests.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import begin, leave

ROOT = Path(__file__).parents[1]
PATIENCE = 1200  # seconds


def run_ranks(
    target: str | Callable, ranks: int, *arguments: object, timeout: float = PATIENCE, show: bool = False
) -> None:
    """Have each rank call a function, or run a module with arguments as words."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.imported"])
    # The ranks meet at a store of this process, which outlives them, as under torchrun.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | dict(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
    )  # fmt: skip
    # The server is started from the root, where it finds the tests.
    with tempfile.TemporaryDirectory() as logs, contextlib.chdir(ROOT):
        processes = torch.multiprocessing.start_processes(
            _run, (target, arguments, environment, None if show else logs, timeout), nprocs=ranks, join=False,
            start_method="forkserver",
        )  # fmt: skip
        try:
            while not processes.join(grace_period=5):
                pass
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            said = [
                f"rank {log.name}:\n{log.read_text(errors='replace')[-4000:]}" for log in sorted(Path(logs).iterdir())
            ]
            raise RuntimeError("\n".join([f"{target} on {ranks} ranks: {error}", *said])) from None


def results_of_ranks(function: Callable, ranks: int, *arguments: object, **options: Any) -> Any:
    """What a function returns on the first rank; it is called among processes that join, if they do, and leave."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save((function, arguments), f"{folder}/call.pt")  # tensors among arguments would be file descriptors
        run_ranks(_save_result, ranks, folder, **options)
        return torch.load(f"{folder}/found.pt", weights_only=False)


def _save_result(folder: str) -> None:
    begin()
    function, arguments = torch.load(f"{folder}/call.pt", weights_only=False)
    leave(function(*arguments), f"{folder}/found.pt")


def _run(
    rank: int, target: str | Callable, arguments: tuple, environment: dict[str, str], logs: str | None, timeout: float
) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if logs is not None:
        log = os.open(f"{logs}/{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
    faulthandler.dump_traceback_later(timeout, exit=True)
    if isinstance(target, str):
        sys.argv = [target, *map(str, arguments)]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        target(*arguments)
