"""`qwen3vl convert`: import, export, reformat, verify, inspect, adapters."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from qwen3vl_bridge.checkpoint.formats.layouts import LOCAL, TRANSFORMER_ENGINE
from qwen3vl_bridge.checkpoint.formats.megatron import FORMATS
from qwen3vl_bridge.checkpoint.processes import Ranks
from qwen3vl_bridge.checkpoint.topology import Topology
from qwen3vl_bridge.cli import adapters as adapters_cli
from qwen3vl_bridge.cli import convert_options, convert_output
from qwen3vl_bridge.io.files import CheckpointError, expanded
from qwen3vl_bridge.terminal import BAD_INPUT, INTERRUPTED, show, show_anything
from qwen3vl_bridge.weights.rows import ExpertLayout

_SIZES = {
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size (torch_dist only)",
    "cp": "context-parallel size; fsdp_dtensor shards weights over these ranks too, so it matters if --world-size is "
    "not given; no effect on torch_dist",
    "ep": "expert-parallel size",
    "etp": "expert-tensor-parallel size (default: --tp)",
    "world-size": "number of training processes, over which fsdp_dtensor shards weights; no effect on torch_dist "
    "(default: the smallest that the other sizes allow)",
}


# Of the signals that tell a process to end: the first one is obeyed, the next one gets this message. Signals within
# this many seconds count as one.
_ENDS_AT_ONCE, _ONE = 2, 1.0
_TIDYING = "interrupted, cleaning up; interrupt again to stop at once and leave the cleanup to the next run\n"


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Run one command, in one process or in each of those that torchrun started.

    Args:
        arguments: as on the command line; None for those of the process.
        prog: the program's name, for messages; None for that of the process.

    Returns:
        Exit status: 0, 1 if `verify` found differences, 2 for bad input, 130 if interrupted.
    """
    return _run(_parser(prog).parse_args(arguments))


def adapters(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """The verb `adapters`, as a separate command; arguments and exit status as for `main`."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.set_defaults(shared=True)
    adapters_cli.add_verbs(parser)
    return _run(parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    show_anything()
    first = True
    try:
        with Ranks.of_torchrun() if options.shared else Ranks() as options.ranks:
            first = options.ranks.first
            with _stoppable(first):
                return options.run(options)
    except (CheckpointError, OSError) as error:
        if first:
            show(f"error: {error}", error=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        if first:
            show("interrupted", error=True)
        return INTERRUPTED


@contextlib.contextmanager
def _stoppable(first: bool) -> Iterator[None]:
    """Treat a signal to terminate as Ctrl-C: the process cleans up, and a second signal does not interrupt the cleanup.

    A third signal ends the process at once. Signals within a second count as one: under torchrun a Ctrl-C comes from
    the terminal and from torchrun. Signals that were ignored when the process was started, as by `nohup`, stay ignored.
    """
    count, latest = 0, -math.inf

    def stop(*_: object) -> None:
        nonlocal count, latest
        if time.monotonic() - latest < _ONE:
            return
        count, latest = count + 1, time.monotonic()
        if count == 1:
            raise KeyboardInterrupt
        if count > _ENDS_AT_ONCE:
            os._exit(INTERRUPTED)
        if first:
            with contextlib.suppress(OSError):  # not print: it may be what was interrupted
                os.write(2, _TIDYING.encode())

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        handlers = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
        for number in handlers:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Convert Qwen3-VL and Qwen3.5-VL between Hugging Face safetensors and Megatron checkpoints. Needs "
        "no GPU and never holds the model in memory. Under torchrun the processes share the work.",
    )
    parser.set_defaults(shared=True)  # except where processes have nothing to share
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _import(verbs.add_parser("import", help="Hugging Face model to Megatron checkpoint"))
    _export(verbs.add_parser("export", help="Megatron checkpoint to Hugging Face model"))
    _reformat(verbs.add_parser("reformat", help="Megatron checkpoint to the other format"))
    _verify(verbs.add_parser("verify", help="compare a Megatron checkpoint with its source, bit for bit"))
    _inspect(verbs.add_parser("inspect", help="show what a checkpoint contains"))
    adapters_cli.add_verbs(
        verbs.add_parser("adapters", help="export a run's adapters for other libraries, or merge them")
    )
    return parser


def _import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-model", required=True, metavar="MODEL", help="folder of the model, or hub id")
    parser.add_argument("--megatron-path", required=True, metavar="FOLDER", help="checkpoint to write")
    _storing(parser)
    _lenient(parser)
    convert_options.writing_options(parser)
    parser.set_defaults(run=_run_import)


def _export(parser: argparse.ArgumentParser) -> None:
    convert_options.megatron_path(parser)
    parser.add_argument("--hf-path", required=True, metavar="FOLDER", help="model to write")
    _other_model(parser)
    layouts = [layout.name.lower() for layout in ExpertLayout]
    parser.add_argument("--expert-layout", choices=layouts,
                        help="layout of the experts' weights (default: that of the imported model)")  # fmt: skip
    convert_options.vocab_padding(parser)
    _lenient(parser)
    convert_options.writing_options(parser)
    parser.set_defaults(run=_run_export)


def _reformat(parser: argparse.ArgumentParser) -> None:
    convert_options.megatron_path(parser)
    parser.add_argument("--new-path", required=True, metavar="FOLDER", help="checkpoint to write")
    _other_model(parser)
    _storing(parser, required=True)
    convert_options.remote_code(parser)
    convert_options.writing_options(parser)
    parser.set_defaults(run=_run_reformat)


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-model", metavar="MODEL",
                        help="folder or hub id of the model that it was imported from or exported to")  # fmt: skip
    convert_options.megatron_path(parser)
    parser.add_argument(
        "--new-path", metavar="FOLDER", help="compare with this checkpoint, which `reformat` made from the first"
    )
    convert_options.vocab_padding(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-progress", action="store_true", help="show no progress")
    parser.epilog = "Without --hf-model and --new-path the checkpoint is compared with the checksums in its manifest."
    parser.set_defaults(run=_run_verify)


def _inspect(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--megatron-path", metavar="FOLDER", help="checkpoint, or one iteration of it")
    which.add_argument("--hf-model", metavar="FOLDER", help="folder of a model")
    parser.add_argument("--iteration", type=int, metavar="N", help="which iteration (default: the latest)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_inspect, shared=False)


def _other_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-model", metavar="MODEL",
                        help="take configuration, tokenizer and processor from this folder or hub id instead of from "
                        "the checkpoint")  # fmt: skip


def _storing(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Options of a Megatron checkpoint to be written."""
    text = "format to write" if required else "format to write (default: %(default)s)"
    parser.add_argument("--ckpt-format", choices=FORMATS, required=required, default=FORMATS[0], help=text)
    parser.add_argument("--layer-spec", choices=(TRANSFORMER_ENGINE, LOCAL), default=TRANSFORMER_ENGINE,
                        help="layer spec whose parameter names are written (default: %(default)s)")  # fmt: skip
    parser.add_argument("--make-vocab-size-divisible-by", type=int, metavar="N", dest="vocab_divisor",
                        help="pad the vocabulary to a multiple of N times --tp, as a model with should_pad_vocab does "
                        "(default: no padding)")  # fmt: skip
    group = parser.add_argument_group(
        "parallel sizes for which the files are laid out",
        "A rank reads whole items of the files. With these sizes, items end where the shards of ranks end, and the "
        "items of one rank are stored together. The checkpoint loads at any other sizes too.",
    )
    for name, text in _SIZES.items():
        default = None if name in ("etp", "world-size") else 1
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)


def _lenient(parser: argparse.ArgumentParser) -> None:
    convert_options.remote_code(parser)
    parser.add_argument("--not-strict", action="store_true",
                        help="ignore tensors that the model does not use, instead of failing")  # fmt: skip


def _stored(options: argparse.Namespace) -> dict[str, Any]:
    sizes = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in _SIZES}
    return {
        "ckpt_format": options.ckpt_format,
        "torch_dtype": options.torch_dtype,
        "topology": Topology(**sizes),
        "naming": options.layer_spec,
        "vocab_divisor": options.vocab_divisor,
    }


def _run_import(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint.commands import import_checkpoint

    report = import_checkpoint(
        options.hf_model,
        options.megatron_path,
        strict=not options.not_strict,
        trust_remote_code=options.trust_remote_code,
        **_stored(options),
        **convert_options.conversion_options(options),
    )
    return convert_output.conversion(report, options)


def _run_export(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint.commands import export_checkpoint

    report = export_checkpoint(
        options.megatron_path,
        options.hf_path,
        hf_model=options.hf_model,
        torch_dtype=options.torch_dtype,
        iteration=options.iteration,
        expert_layout=options.expert_layout,
        strict=not options.not_strict,
        drop_vocab_padding=options.drop_vocab_padding,
        trust_remote_code=options.trust_remote_code,
        **convert_options.conversion_options(options),
    )
    return convert_output.conversion(report, options)


def _run_reformat(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint.commands import reformat_checkpoint

    report = reformat_checkpoint(
        options.megatron_path,
        options.new_path,
        hf_model=options.hf_model,
        iteration=options.iteration,
        trust_remote_code=options.trust_remote_code,
        **_stored(options),
        **convert_options.conversion_options(options),
    )
    return convert_output.conversion(report, options)


def _run_verify(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint import verification

    how = {"iteration": options.iteration, "progress": not options.no_progress, "ranks": options.ranks}
    if options.new_path is not None or options.hf_model is not None:
        how["drop_vocab_padding"] = options.drop_vocab_padding
    elif options.drop_vocab_padding:
        raise CheckpointError("--drop-vocab-padding: checksums cover all rows, expected --hf-model or --new-path")
    if options.new_path is not None:
        report = verification.verify_reformatted(
            options.megatron_path, options.new_path, hf_model=options.hf_model, **how
        )
    elif options.hf_model is not None:
        report = verification.verify_checkpoint(options.hf_model, options.megatron_path, **how)
    else:
        report = verification.verify_checksums(options.megatron_path, **how)
    return convert_output.comparison(report, options)


def _run_inspect(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint.inspection import inspect_checkpoint, inspect_model

    if options.hf_model is not None:
        found = inspect_model(expanded(options.hf_model))
    else:
        found = inspect_checkpoint(options.megatron_path, iteration=options.iteration)
    return convert_output.contents(found, options)
