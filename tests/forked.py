"""A module of the tests on several ranks: real processes, each of which runs it as a program.

They are forked from a server that has imported Megatron and joined nothing, one for each process of pytest: an import
takes a rank longer than most of what it is started for. `torchrun` itself starts the README's commands in their tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
PATIENCE = 1200  # seconds


def run_ranks(module: str, ranks: int, *arguments: object, timeout: float = PATIENCE, show: bool = False) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.imported"])
    # The ranks meet at a store of this process, which outlives them, as under torchrun.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | dict(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
    )
    command = [module, *map(str, arguments)]
    # The server is started from the root, where it finds the tests.
    with tempfile.TemporaryDirectory() as logs, contextlib.chdir(ROOT):
        processes = torch.multiprocessing.start_processes(
            _run,
            (command, environment, None if show else logs, timeout),
            nprocs=ranks,
            join=False,
            start_method="forkserver",
        )
        try:
            while not processes.join(grace_period=5):
                pass
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            said = [
                f"rank {log.name}:\n{log.read_text(errors='replace')[-4000:]}" for log in sorted(Path(logs).iterdir())
            ]
            raise RuntimeError("\n".join([f"{module} on {ranks} ranks: {error}", *said])) from None


def results_of_ranks(module: str, ranks: int, *arguments: object, **options: Any) -> Any:
    """What a module saves, by torch, in the file that its first argument names."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(module, ranks, output := f"{folder}/found.pt", *arguments, **options)
        return torch.load(output, weights_only=False)


def _run(rank: int, command: list[str], environment: dict[str, str], logs: str | None, timeout: float) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if logs is not None:
        log = os.open(f"{logs}/{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
    faulthandler.dump_traceback_later(timeout, exit=True)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
