"""`qwen3vl`: one program for all commands.

qwen3vl convert import --hf-model HF_FOLDER --megatron-path MEGATRON
torchrun --nproc_per_node 8 --no-python qwen3vl train --recipe qwen3_vl_8b_sft_config --data-path DATA --save RUN
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from qwen3vl_bridge.terminal import BAD_INPUT, CommandParser, show

# Each is a function of the arguments after its name and of the program's name, which returns the exit status. Training
# is in the recipes: they depend on this package, which knows them only by this name, and may be missing.
COMMANDS = {
    "convert": ("qwen3vl_bridge.cli.convert:main", "import, export, reformat, verify or inspect a checkpoint"),
    "adapters": ("qwen3vl_bridge.cli.convert:adapters", "export or merge the adapters that a run trained"),
    "train": ("qwen3vl_recipes.cli:train", "train with a recipe, from given weights or from scratch"),
    "data": ("qwen3vl_bridge.cli.data:main", "inspect or pack conversations, or download their media, before training"),
    "plan": ("qwen3vl_bridge.cli.plan:main", "estimate the memory of a run on each GPU, and propose ways to split it"),
    "generate": ("qwen3vl_bridge.cli.generate:main", "ask a checkpoint a question without exporting it"),
    "doctor": ("qwen3vl_bridge.cli.doctor:main", "show what this machine has, what will be used, and what is missing"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, with the words of the process if none are given.

    Returns:
        Exit status: 0; 1 if a comparison found differences, nothing fits, samples are bad or something is missing; 2
        for bad input; 130 if interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = CommandParser(
        prog="qwen3vl",
        description="Train Qwen3-VL and Qwen3.5-VL with NVIDIA's Megatron-Bridge: convert checkpoints, inspect and "
        "pack data, plan the memory of a run, train, and ask the result.",
        epilog="`qwen3vl COMMAND --help` shows its options; docs/command_line.md has examples.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    options = parser.parse_args(words[:1])
    if options.version:
        from importlib.metadata import version

        show(version("qwen3vl-bridge"))
        return 0
    if options.command is None:
        parser.error("COMMAND is missing")
    module, _, function = COMMANDS[options.command][0].partition(":")
    try:
        run = getattr(importlib.import_module(module), function)
        return run(words[1:], prog=f"{parser.prog} {options.command}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or importlib.util.find_spec(package) is not None:
            raise
        get = "requirements/README.md has what to install"
        if package == module.partition(".")[0]:
            get = "it comes with qwen3vl-bridge's wheel, and with `pip install --no-deps -e .` from a clone"
        show(f"error: {options.command} needs the package {package}, which is not installed; {get}", error=True)
        return BAD_INPUT
