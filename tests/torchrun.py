"""A module of the tests on several ranks, real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def torchrun(module: str, ranks: int, *arguments: object, timeout: float | None = None, show: bool = False) -> None:
    """Run it to its end.

    Args:
        module: its dotted name.
        ranks: how many.
        arguments: of its command line.
        timeout: in seconds, where it might hang; a hang has no end.
        show: let its output through.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    done = subprocess.run(
        [*start, module, *map(str, arguments)],
        cwd=ROOT,
        stdout=None if show else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{module} on {ranks} ranks: {done.stderr[-6000:]}")
