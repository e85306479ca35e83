"""Kill ranks of a run, or let them fail, at several moments of a save.

    python -m tests.training.checkpointing.ranks_that_die CASES

CASES is a JSON list of [journey, moments], see `journeys.Journey` and MOMENTS. Ranks are forked from this process, so
that many runs need one import. The last line of the output is a JSON list: for each case and moment the exit codes of
the ranks, the seconds until the end, and the step in the tracker.
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

from tests.helpers.ranks import begin
from tests.helpers.steps import save, set_up, train_step
from tests.training.checkpointing.journeys import Journey

RANKS = 2
TIMEOUT = 120  # seconds until running ranks count as hanging
# Seconds that other ranks get to end after one has failed. A rank that waits in a collective of Megatron-Bridge does
# not notice the failure.
GRACE = 5
# Written last: then the checkpoint is complete, and a run resumes from that step.
TRACKER = "the tracker"
# The rank to kill, the Python audit event before which it is killed, and the end of the event's path or target.
DEATHS = {
    "a rank's tensors": (1, "open", ".distcp"), "the metadata": (0, "open", ".metadata.tmp"),
    "the run's state": (0, "open", "run_config.yaml"), "the folder's way into place": (0, "os.rename", "iter_0000002"),
    TRACKER: (0, "open", ".latest_checkpointed_iteration.txt.unfinished"),
}  # fmt: skip
# At these moments ranks get an error that the disk is full.
FULL = "no space for "
STEP = "a step"  # the first rank is killed between two microbatches
MOMENTS = {name: where for moment, where in DEATHS.items() for name in (moment, FULL + moment)}


def arm(event: str, ending: str, *, dies: bool) -> None:
    """Kill this process before an event, or raise an error in it."""

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
    """Fork the ranks and return their process ids. They meet by a file, which needs no port."""
    children = []
    for rank in range(RANKS):
        if child := os.fork():
            children.append(child)
            continue
        os.setpgid(0, 0)  # a group with its children, which would outlive it and keep this program's output open
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


def wait_for_ranks(children: list[int]) -> tuple[list[int | None], float]:
    """Wait for the ranks. Return their exit codes and the seconds until then.

    A negative code is a signal; None means that the rank had to be killed here, GRACE seconds after another failed.
    """
    begun, codes = time.monotonic(), dict.fromkeys(children)
    last = begun + TIMEOUT
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
        with contextlib.suppress(ProcessLookupError):  # already gone
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
        codes, seconds = wait_for_ranks(start(step, meeting))
        hidden = sorted(path.name for path in Path(journey.save).glob(".*"))
        found[str(moment)] = dict(codes=codes, seconds=seconds, tracker=tracker.read_text(), hidden=hidden)
    return found


if __name__ == "__main__":
    begin()
    print(json.dumps([main(Journey(**journey), moments) for journey, moments in json.loads(sys.argv[1])]))
