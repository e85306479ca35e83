"""Earlier names of `qwen3vl`'s commands: they run the same code for one release, and say what they are called now.

What lives here: console scripts such as `qwen3vl-data`, and the warning, also for `python -m qwen3vl_bridge.cli.data`.
What may not: the commands, and any import that takes time.
"""

from __future__ import annotations

import importlib
import os
import sys

from qwen3vl_bridge.cli import main as program
from qwen3vl_bridge.terminal import show


def warn(earlier: str, command: str) -> None:
    """Name a command's present name on standard error; under torchrun in the first process only.

    Args:
        earlier: the name by which it was called.
        command: its present one.
    """
    if os.environ.get("RANK", "0") == "0":
        show(f"warning: {earlier} is deprecated and will go in the next release; use `{command}`", error=True)


def run(command: str, earlier: str | None = None) -> int:
    """Run a command of `qwen3vl` that was called by an earlier name, with the arguments of the process.

    Args:
        command: its name after `qwen3vl`.
        earlier: the name by which it was called; None: `qwen3vl-` and its name.

    Returns:
        Exit status.
    """
    warn(earlier or f"qwen3vl-{command}", f"qwen3vl {command}")
    return program.main([command, *sys.argv[1:]])


def convert() -> int:
    """`qwen3vl-convert`."""
    return run("convert")


def adapters() -> int:
    """`qwen3vl-adapters`."""
    return run("adapters")


def data() -> int:
    """`qwen3vl-data`."""
    return run("data")


def plan() -> int:
    """`qwen3vl-plan`."""
    return run("plan")


def finetune() -> None:
    """`qwen3vl-finetune`."""
    warn("qwen3vl-finetune", "qwen3vl train")
    importlib.import_module("qwen3vl_recipes.cli").finetune()


def pretrain() -> None:
    """`qwen3vl-pretrain`, which also accepts weights."""
    warn("qwen3vl-pretrain", "qwen3vl train --from-scratch")
    importlib.import_module("qwen3vl_recipes.cli").pretrain()
