"""`qwen3vl`: one program with all commands.

qwen3vl convert import --hf-model HF_FOLDER --megatron-path MEGATRON
torchrun --nproc_per_node 8 --no-python qwen3vl train --recipe qwen3_vl_8b_sft_config --data-path DATA --save RUN
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from qwen3vl_bridge.registry import titles
from qwen3vl_bridge.terminal import BAD_INPUT, CommandParser, show

# Command: (function, summary). A function takes the arguments after the command's name and the program's name, and
# returns the exit code. `train` is in the recipes, a separate package that may be missing.
COMMANDS = {
    "convert": ("qwen3vl_bridge.cli.convert:main", "import, export, reformat, verify or inspect a checkpoint"),
    "adapters": ("qwen3vl_bridge.cli.convert:adapters", "export or merge the adapters that a run trained"),
    "train": ("qwen3vl_recipes.cli:train", "train with a recipe, from given weights or from scratch"),
    "data": ("qwen3vl_bridge.cli.data:main", "inspect or pack conversations, or download their media, before training"),
    "plan": ("qwen3vl_bridge.cli.plan:main", "estimate the memory of a run on each GPU, and propose parallel layouts"),
    "generate": ("qwen3vl_bridge.cli.generate:main", "ask a checkpoint a question without exporting it"),
    "evaluate": ("qwen3vl_bridge.cli.evaluate:main", "score the answers of a checkpoint to the prompts of a data set"),
    "doctor": ("qwen3vl_bridge.cli.doctor:main", "check this machine: hardware, packages, and missing requirements"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line; None for the arguments of the process.

    Returns:
        Exit code: 0 for success; 1 if checkpoints differ, no parallel layout fits, samples are bad or a requirement is
        missing; 2 for invalid input; 130 if interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = CommandParser(
        prog="qwen3vl",
        description="Train models with NVIDIA's Megatron-Bridge: convert checkpoints, inspect and pack data, plan "
        f"the memory of a run, train, and ask the result. Supported are {', '.join(titles().values())}.",
        epilog="`qwen3vl COMMAND --help` shows its options; docs/settings.md has examples.",
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
        get = "requirements/README.md lists what to install"
        if package == module.partition(".")[0]:
            get = "install qwen3vl-bridge from its wheel, or run `pip install --no-deps -e .` in a clone"
        show(f"error: {options.command} needs the package {package}, which is not installed; {get}", error=True)
        return BAD_INPUT
