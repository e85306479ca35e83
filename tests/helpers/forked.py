"""Run a function on several ranks, in real processes.

They are forked from a server that has imported Megatron, one server per pytest process, because an import takes longer
than most tests.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.ranks import begin, leave

ROOT = Path(__file__).parents[2]
PATIENCE = 1200  # seconds


def results_of_ranks(
    function: Callable, ranks: int, *arguments: object, timeout: float = PATIENCE, show: bool = False
) -> Any:
    """Call a function on several ranks and return the result of the first one."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.helpers.imported"])
    # The ranks meet at a store of this process, which outlives them, as under torchrun.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | dict(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
    )  # fmt: skip
    # The server is started from the root, where it finds the tests.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        torch.save((function, arguments), f"{folder}/call.pt")  # tensors among arguments would be file descriptors
        processes = torch.multiprocessing.start_processes(
            _run, (environment, folder, timeout, show), nprocs=ranks, join=False, start_method="forkserver"
        )
        try:
            while not processes.join(grace_period=5):
                pass
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            logs = sorted(Path(folder).glob("*.log"))
            said = [f"rank {log.stem}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs]
            raise RuntimeError("\n".join([f"{function} on {ranks} ranks: {error}", *said])) from None
        return torch.load(f"{folder}/found.pt", weights_only=False)


def _run(rank: int, environment: dict[str, str], folder: str, timeout: float, show: bool) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if not show:
        log = os.open(f"{folder}/{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
    faulthandler.dump_traceback_later(timeout, exit=True)
    begin()
    function, arguments = torch.load(f"{folder}/call.pt", weights_only=False)
    leave(function(*arguments), f"{folder}/found.pt")
