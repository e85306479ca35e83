"""A program: ranks of a run are killed in the middle of a save, or fail in it, at each of several moments.

    python -m tests.training.checkpointing.ranks_that_die CASES

CASES is a JSON list of [journey, moments], see `journeys.Journey` and MOMENTS. Ranks are forked from this process,
which has imported everything and joined nothing, so that many starts cost one import. What is printed at last is a JSON
list: of each case and moment, how the ranks ended, after how many seconds, and what the tracker names then.
"""

import contextlib
import errno
import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.ranks import begin
from tests.steps import save, set_up, train_step

from .journeys import Journey

RANKS = 2
PATIENCE = 120  # seconds, after which ranks that are still there are said to hang
# Seconds that the others have to end by themselves after one has failed: a rank that waits inside Megatron-Bridge's own
# collectives for one that has failed is not told.
GRACE = 5
# When it is written the step's folder is in its place, and so is Megatron-Bridge's state: a run goes on from that step.
TRACKER = "the tracker"
# The rank that dies, the event of Python's audit before which it does, and how the event's path or target ends.
DEATHS = {
    "a rank's tensors": (1, "open", ".distcp"), "the metadata": (0, "open", ".metadata.tmp"),
    "the run's state": (0, "open", "run_config.yaml"), "the folder's way into place": (0, "os.rename", "iter_0000002"),
    TRACKER: (0, "open", ".latest_checkpointed_iteration.txt.unfinished"),
}  # fmt: skip
# Of ranks that live on and are told that the disk is full there.
FULL = "no space for "
STEP = "a step"  # in which the first rank is killed between two microbatches
MOMENTS = {name: where for moment, where in DEATHS.items() for name in (moment, FULL + moment)}


def arm(event: str, ending: str, *, dies: bool) -> None:
    """Let this process die before an event, as by `kill -9`, or fail in it."""

    def hook(name: str, arguments: tuple) -> None:
        if name == event and str(arguments[1 if event == "os.rename" else 0]).endswith(ending):
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(hook)


def dying(stream: Iterator[Any]) -> Iterator[Any]:
    yield next(stream)
    os.kill(os.getpid(), signal.SIGKILL)


def one_more_step(journey: Journey, rank: int, moment: str | None, *, done: bool) -> None:
    run = set_up(journey.config())
    if moment is not None:
        assert run.progress.step == 1 or done, run.progress.step
    if moment == STEP and rank == 0:
        run.stream = dying(run.stream)
    train_step(run)
    if moment in MOMENTS:
        victim, *where = MOMENTS[moment]
        if rank == victim:
            arm(*where, dies=moment in DEATHS)
    save(run)


def start(work: Callable[[int], None], meeting: str) -> list[int]:
    """Fork the ranks, which meet by a new file: it takes no port that another process may want. Their process ids."""
    children = []
    for rank in range(RANKS):
        if child := os.fork():
            children.append(child)
            continue
        os.setpgid(0, 0)  # with what it starts, which would outlive it and hold this program's output open
        os.environ |= dict(WORLD_SIZE=str(RANKS), RANK=str(rank))
        try:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
            work(rank)
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    return children


def ends(children: list[int]) -> tuple[list[int | None], float]:
    """Exit codes, minus the number of a signal; None of one that has to be ended here. And after how many seconds.

    Where one has failed, the others are given as long as launchers give them.
    """
    begun, codes = time.monotonic(), dict.fromkeys(children)
    last = begun + PATIENCE
    while None in codes.values() and time.monotonic() < last:
        for child in (child for child, code in codes.items() if code is None):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    last = min(last, time.monotonic() + GRACE)
        time.sleep(0.02)
    seconds = time.monotonic() - begun
    for child, code in codes.items():
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
    return list(codes.values()), seconds


def main(journey: Journey, moments: list[str]) -> dict:
    found = {}
    tracker = Path(journey.save) / "latest_checkpointed_iteration.txt"
    for moment in (None, *moments, "nothing"):
        meeting = f"{journey.save}, {moment}"
        done = TRACKER in found
        step = functools.partial(one_more_step, journey, moment=moment, done=done)
        codes, seconds = ends(start(step, meeting))
        hidden = sorted(path.name for path in Path(journey.save).glob(".*"))
        found[str(moment)] = dict(codes=codes, seconds=seconds, tracker=tracker.read_text(), hidden=hidden)
    return found


if __name__ == "__main__":
    begin()
    print(json.dumps([main(Journey(**journey), moments) for journey, moments in json.loads(sys.argv[1])]))
