"""The command `qwen3vl train`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.config.other_trainers import explain_unsupported
from qwen3vl_bridge.registry import titles
from qwen3vl_bridge.terminal import BAD_INPUT, INTERRUPTED, CommandParser, escape_unprintable, show, show_error
from qwen3vl_bridge.training.allocator import use_expandable_segments

from qwen3vl_recipes import setting_names
from qwen3vl_recipes.early_validation import check_command_line, check_model, early_checks
from qwen3vl_recipes.registry import Recipe, find, recipes

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

_FAILED = 1  # exit status
# Option of another trainer -> option of this command.
_OTHER_OPTIONS = {
    "model": "--hf-model", "model-name-or-path": "--hf-model", "dataset": "--data-path", "output-dir": "--save",
    "resume-from-checkpoint": "--save, whose run is continued", "mcore-adapter": "--save, whose run is continued",
    "mcore-model": "--pretrained-checkpoint, or --save, whose run is continued",
    "finetune": "--pretrained-checkpoint for a new run, or --save, whose run is continued",
    **dict.fromkeys(("tuner-type", "train-type", "finetuning-type"), "--recipe with a name of sft or peft (--list)"),
}  # fmt: skip
_EPILOG = """\
Override settings of the recipe with arguments such as `optimizer.lr=1e-5 train.global_batch_size=64 dataset.path=DATA`,
or with YAML files (--config). --dry-run shows what the run would do, and with --full all settings. The training
loop is Megatron-Bridge's own; for several devices, start it under torchrun."""


def train(arguments: Sequence[str] | None = None, *, prog: str = "qwen3vl train") -> int:
    """Run the command and return its exit status.

    Invalid input ends the process with exit status 2. If another run uses the same folder, or data-loading workers have
    died, the exit status is 1.
    """
    args = _parse(_parser(prog), arguments)
    escape_unprintable()
    use_expandable_segments()
    if args.list:
        _show_recipes(as_json=args.json)
        return 0
    from qwen3vl_bridge.upstream.library_logs import quiet, without_prints

    if args.verbose:
        logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        if args.dry_run:
            return _dry_run(args)
        check_command_line(args)
        if not args.verbose:
            quiet()
        chosen = find(args.recipe)
        if args.simulate_gpu:
            return _simulate_gpu(args, chosen, sys.argv[1:] if arguments is None else arguments)
        with contextlib.nullcontext() if args.verbose else without_prints():
            _run(_build_config(args, chosen), needs_weights=not args.from_scratch)
    # Megatron-Bridge checks a configuration with assertions, and raises ModuleNotFoundError for optional packages.
    except (ValueError, AssertionError, OSError, ModuleNotFoundError) as error:
        if args.verbose:
            raise
        from qwen3vl_bridge.data.errors import DataError
        from qwen3vl_bridge.training.run_lock import FolderInUseError

        if isinstance(error, DataError):
            error = error.without_traceback()
        show_error(str(error) or repr(error), "\n(--verbose shows the traceback)")
        sys.exit(_FAILED if isinstance(error, FolderInUseError) else BAD_INPUT)
    except RuntimeError as error:
        from qwen3vl_bridge.data.errors import describe_lost_worker

        if args.verbose or not (lost := describe_lost_worker(error)):
            raise
        show_error(f"{lost}. The same command continues from the latest checkpoint, if there is one")
        sys.exit(_FAILED)
    except KeyboardInterrupt as interruption:  # `_run` has set its text
        show(str(interruption) or "interrupted before the run began", error=True)
        return INTERRUPTED
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog, description="Train a model with a recipe, from given weights or from scratch. Supported are "
        f"{', '.join(titles().values())}.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--recipe", metavar="NAME", help="name of a recipe, or FILE.py:FUNCTION for your own")
    add("--list", action="store_true", help="list the recipes and exit")
    add("--hf-model", metavar="MODEL", help="Hugging Face folder or hub id with configuration and "
        "processor, and the weights unless --pretrained-checkpoint is given (default: the released model of the "
        "recipe's size)")  # fmt: skip
    add("--data-path", metavar="DATA", help="folder with train.jsonl and perhaps valid.jsonl, or a file (dataset.path)")
    add("--pretrained-checkpoint", metavar="FOLDER", help="weights to start from: a Megatron checkpoint in either "
        "format, or a Hugging Face folder")  # fmt: skip
    add("--from-scratch", action="store_true", help="start from random weights")
    add("--save", metavar="FOLDER", type=Path, help="folder of the run; an existing run there is continued")
    add("--config", metavar="FILE", action="append", default=[],
        help="YAML file with settings; may be given several times")  # fmt: skip
    add("--dry-run", action="store_true", help="show the run's parallelism, memory, samples, rows, steps, epochs and "
        "output, and exit")  # fmt: skip
    add("--full", action="store_true", help="with --dry-run: show all settings and the memory of each stage too")
    add("--simulate-gpu", action="store_true", help="take three steps of one rank at their real sizes on a fake GPU, "
        "show its memory and the kernels of a step, and exit, with status 1 if the run would fail or leave less "
        "than 4 GiB free; needs gcc and torch for CUDA, but no GPU")  # fmt: skip
    add("--rank", metavar="N", help="with --simulate-gpu: the rank, or `last` (default: 0)")
    add("--gpus", type=int, metavar="N",
        help="with --dry-run or --simulate-gpu: number of GPUs (default: the recipe's)")  # fmt: skip
    add("--gpu", metavar="KIND", help="with --dry-run or --simulate-gpu: kind of GPU, such as H100, H200, B200 "
        "(default: the recipe's)")  # fmt: skip
    add("--json", action="store_true", help="with --list, --dry-run or --simulate-gpu: print JSON")
    add("--verbose", action="store_true", help="show Megatron's log and warnings, and the traceback of an error")
    add("settings", nargs="*", metavar="SETTING=VALUE", help="settings that override the recipe's")
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    args, unknown = parser.parse_known_intermixed_args(arguments)  # settings may be at any position
    if unknown:
        words = sys.argv[1:] if arguments is None else arguments
        parser.error(f"there is no option {unknown[0]}{_suggest_option(unknown[0], words, parser)}")
    without_training = args.dry_run or args.simulate_gpu
    if args.json and not (args.list or without_training):
        parser.error("--json works only with --list, --dry-run and --simulate-gpu")
    if args.full and not args.dry_run:
        parser.error("--full works only with --dry-run")
    if args.list:
        return args
    if args.recipe is None:
        parser.error("--recipe is missing; --list shows all recipes")
    if args.save is not None and args.save.exists() and not args.save.is_dir():
        parser.error(f"--save is {args.save}, a file; expected a folder, or the name of a new folder")
    if wrong := [item for item in args.settings if "=" not in item or item[0] in "+~"]:
        parser.error(f"expected settings as NAME=VALUE, found {' '.join(wrong)}")
    if args.gpus is not None and args.gpus < 1:
        parser.error(f"--gpus is {args.gpus}, expected 1 or more")
    if not without_training and (args.gpus or args.gpu):
        parser.error("--gpus and --gpu work only with --dry-run and --simulate-gpu; torchrun sets the number of ranks")
    if args.rank is not None and not args.simulate_gpu:
        parser.error("--rank works only with --simulate-gpu")
    if args.rank not in (None, "last") and not args.rank.isdecimal():
        parser.error(f"--rank is {args.rank}, expected a number or `last`")
    if args.from_scratch and args.pretrained_checkpoint is not None:
        parser.error("--from-scratch and --pretrained-checkpoint exclude each other: use only one")
    return args


def _suggest_option(option: str, words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return a suggestion for an unknown option, to end an error message with. `words` are all arguments."""
    name, _, value = option.lstrip("-").partition("=")
    if instead := explain_unsupported(name.replace("-", "_")):
        return f": {instead}"
    name, value = name.replace("_", "-"), value or _value_after(option, words)
    if (similar := _OTHER_OPTIONS.get(name)) is None and (settings := setting_names.find_setting(name, value)):
        return f"; settings are given as NAME=VALUE: {settings}"
    if similar is None:
        known = ["--help", *re.findall(r"--[\w-]+", parser.format_usage())]
        similar = next(iter(difflib.get_close_matches(f"--{name}", known, n=1)), None)
    return (
        f"; did you mean {similar}?" if similar else "; --help shows all; settings of the run are given as NAME=VALUE"
    )


def _value_after(option: str, words: Sequence[str]) -> str:
    """Return the value that follows an option on the command line; "..." if it has none or several."""
    after = itertools.dropwhile(lambda word: word != option, words)
    values = [*itertools.takewhile(lambda word: word[:1] != "-" and "=" not in word, itertools.islice(after, 1, None))]
    return values[0] if len(values) == 1 else "..."


def _dry_run(args: argparse.Namespace) -> int:
    """Show a description of the run and all errors. Return the exit status, which is 1 if there are errors."""
    from qwen3vl_bridge.upstream.library_logs import quiet

    from qwen3vl_recipes import dry_run

    report, gpu = dry_run.DryRunReport([]), args.gpu
    for check in early_checks(args):
        number = len(report.errors)
        with dry_run.collect_error(report.errors, verbose=args.verbose):
            check()
        if len(report.errors) > number:  # remove the wrong argument, and check the others
            if check.func is check_model:
                args.hf_model = None
            if check.func is setting_names.check_names:
                args.settings = [word for word in args.settings if word.partition("=")[0] not in check.args[0]]
    if not args.verbose:
        quiet()
    with contextlib.redirect_stdout(sys.stderr), dry_run.collect_error(report.errors, verbose=args.verbose):
        chosen = find(args.recipe)
        gpu = gpu or (chosen.gpu if chosen.gpus or args.gpus else None)
        dry_run.examine_run(
            _build_config(args, chosen), report, title=f"{args.recipe}: {chosen.summary}",
            from_scratch=args.from_scratch, gpus=args.gpus or chosen.gpus or 1, gpu=gpu, proposes=args.full,
        )  # fmt: skip
    if args.json:
        show(json.dumps(dry_run.report_as_json(report, gpu), indent=2))
    else:
        dry_run.show_report(report, gpu, full=args.full)
    return _FAILED if report.errors else 0


def _simulate_gpu(args: argparse.Namespace, chosen: Recipe, arguments: Sequence[str]) -> int:
    from qwen3vl_recipes import simulation

    gpus, gpu = args.gpus or chosen.gpus or 1, args.gpu or chosen.gpu
    rank = gpus - 1 if args.rank == "last" else int(args.rank or 0)
    if rank >= gpus:
        raise ValueError(f"--rank is {rank}, expected 0 to {gpus - 1} of {gpus} GPUs")
    simulation.enter(gpu, arguments)
    cfg = _build_config(args, chosen)
    return simulation.run(cfg, rank=rank, gpus=gpus, gpu=gpu, as_json=args.json, verbose=args.verbose)


def _show_recipes(*, as_json: bool) -> None:
    known = dict(sorted(recipes().items(), key=lambda item: item[1].gpus > 0))  # recipes for a CPU first
    if as_json:
        found = [dict(name=name, summary=one.summary, gpus=one.gpus, gpu=one.gpu) for name, one in known.items()]
        show(json.dumps(found, indent=2))
        return
    width = max(map(len, known))
    show("\n".join(f"{name:{width}}  {one.summary}" for name, one in known.items()))
    print("Some of these names also exist in Megatron-Bridge, with other settings: docs/recipes.md.", file=sys.stderr)


def _build_config(args: argparse.Namespace, chosen: Recipe) -> ConfigContainer:
    """Return the recipe's configuration with the paths and settings of the command line."""
    from qwen3vl_bridge.checkpoint.formats.huggingface import find_model

    from qwen3vl_recipes import overrides
    from qwen3vl_recipes.paths import check_data, set_paths

    cfg = chosen()
    if not hasattr(cfg, "dataset"):
        raise ValueError(
            f"--recipe {args.recipe} returned {cfg!r:.80}, expected a ConfigContainer: the function must return its "
            "configuration"
        )
    set_paths(
        cfg,
        hf_path=args.hf_model,
        data_path=args.data_path,
        pretrained_checkpoint=args.pretrained_checkpoint,
        save=args.save,
    )
    overrides.apply(cfg, args.settings, args.config)
    if args.from_scratch and (weights := cfg.checkpoint.pretrained_checkpoint) is not None:
        raise ValueError(
            f"checkpoint.pretrained_checkpoint is {weights} with --from-scratch, expected None: remove one of them"
        )
    if cfg.peft is not None and args.from_scratch and cfg.checkpoint.pretrained_checkpoint is None:
        raise ValueError(
            "peft is set with --from-scratch, but adapters need initial weights: use --pretrained-checkpoint instead, "
            "or set peft=null"
        )
    if args.dry_run or args.simulate_gpu:
        return cfg
    if cfg.checkpoint.save is None:
        raise ValueError("checkpoint.save is None, expected a folder used only by this run: give --save")
    check_data(cfg)
    if not args.from_scratch and cfg.checkpoint.pretrained_checkpoint is None:
        model = cfg.model.hf_model_id
        cfg.checkpoint.pretrained_checkpoint = model if Path(model).is_dir() else str(find_model(model))
    return cfg


def _run(cfg: ConfigContainer, *, needs_weights: bool) -> None:
    import qwen3vl_bridge
    from qwen3vl_bridge.training.callbacks import training_callbacks
    from qwen3vl_bridge.training.run_log import RunLog

    try:
        if needs_weights:
            from megatron.bridge.training.finetune import finetune as loop
        else:
            from megatron.bridge.training.pretrain import pretrain as loop
    except ModuleNotFoundError as error:
        raise ValueError(f"Megatron-Bridge's training loop needs {error.name}, which is missing; install it") from error
    callbacks = training_callbacks(cfg)
    *_, log = callbacks
    assert isinstance(log, RunLog)
    try:
        loop(cfg, qwen3vl_bridge.forward_step, callbacks=callbacks)
    except SystemExit as end:  # Megatron-Bridge has saved a checkpoint after a signal or a time limit
        if not end.code and os.environ.get("RANK", "0") == "0":
            done = f"stopped after step {log.finished} of {cfg.train.train_iters}, as asked"
            show(f"{done}: the same command continues from the checkpoint", error=True)
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_describe_interruption(log.finished, cfg.checkpoint)) from None
    if os.environ.get("RANK", "0") == "0":
        kind, to = ("convert", "EXPORTED") if cfg.peft is None else ("adapters", "ADAPTER")
        run = shlex.quote(str(cfg.checkpoint.save))
        show(f"to export: qwen3vl {kind} export --megatron-path {run} --hf-path {to}", error=True)


def _describe_interruption(finished: int | None, checkpoint: Any) -> str:
    """Return a message that says where a run was interrupted, and where the same command continues."""
    from qwen3vl_bridge.checkpoint.formats.megatron import TRACKER

    folders = [str(folder) for folder in (checkpoint.save, checkpoint.load) if folder]
    steps = [tracker.read_text().strip() for tracker in (Path(one, TRACKER) for one in folders) if tracker.is_file()]
    if any("://" in folder for folder in folders):
        then = "the same command continues from the last checkpoint"
    elif steps:
        then = f"the same command continues from step {steps[0]}"
    else:
        then = "there is no checkpoint yet, and the same command starts over"
    where = f"after step {finished}" if finished else "before the end of the first step"
    return f"interrupted {where}: {then}; SIGTERM instead of Ctrl-C would save a checkpoint first"
