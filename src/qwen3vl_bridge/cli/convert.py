"""Define the commands `qwen3vl convert` and `qwen3vl adapters`.

`qwen3vl convert` imports, exports, reformats, verifies, inspects and checks checkpoints. `qwen3vl adapters` exports
trained adapters for other libraries, or merges them into a Hugging Face model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.checkpoint.formats.layouts import LOCAL, TRANSFORMER_ENGINE, Topology
from qwen3vl_bridge.checkpoint.formats.megatron import FORMATS
from qwen3vl_bridge.checkpoint.formats.output_files import Ranks
from qwen3vl_bridge.checkpoint.formats.tensors import WEIGHT_DTYPES
from qwen3vl_bridge.core.files import CheckpointError, expanded
from qwen3vl_bridge.registry import titles
from qwen3vl_bridge.terminal import (
    BAD_INPUT,
    INTERRUPTED,
    CommandParser,
    escape_unprintable,
    in_bytes,
    show,
    show_report,
)
from qwen3vl_bridge.weights.rows import ExpertLayout

if TYPE_CHECKING:
    from qwen3vl_bridge.checkpoint.conversion import ConversionReport

_DIFFERENT = 1
_SIZES = {
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size (torch_dist only)",
    "cp": "context-parallel size; fsdp_dtensor shards weights over these ranks too; no effect on torch_dist, or with "
    "--world-size",
    "ep": "expert-parallel size",
    "etp": "expert-tensor-parallel size (default: --tp)",
    "world-size": "number of training processes, over which fsdp_dtensor shards weights; no effect on torch_dist "
    "(default: the smallest that the other sizes allow)",
}
_FLAGS = {
    "trust-remote-code": "copy the model's own Python files; they are never run here",
    "not-strict": "ignore tensors that the model does not use, instead of failing",
    "drop-vocab-padding": "drop rows beyond the vocabulary even if they are not zero, instead of failing; training "
    "with a padded vocabulary changes them",
    "verify": "compare the result with the source before it is moved into place",
    "checksums": "write a SHA-256 of every tensor to the manifest",
    "overwrite": "replace an earlier result of a conversion, if its folder contains nothing else",
    "resume": "continue an interrupted run with the same options; if this run fails, keep its partial result for the "
    "next. Without --resume a conversion starts over and removes partial results",
    "dry-run": "check everything, measure the speed of reading and writing, and print the plan; write nothing",
    "json": "print JSON",
    "no-progress": "show no progress",
}
# The first signal to end interrupts the process, the second prints a message, and the third ends it at once. Signals
# within one second count as one signal.
_MAX_SIGNALS, _SAME_SIGNAL_SECONDS = 2, 1.0
_CLEANUP_MESSAGE = "interrupted, cleaning up; interrupt again to stop at once and leave the cleanup to the next run\n"


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Run one command, in a single process or in every process that torchrun started.

    Args:
        arguments: the command line; None for the arguments of the process.
        prog: the program's name in messages; None for the name of the process.

    Returns:
        Exit code: 0 for success, 1 if `verify` found differences or `check` found faults, 2 for invalid input, 130 if
        interrupted.
    """
    return _run(_parser(prog).parse_args(arguments))


def adapters(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Run `qwen3vl adapters`, which is the verb `adapters` of `qwen3vl convert`. Arguments and result as for `main`."""
    parser = CommandParser(prog=prog)
    parser.set_defaults(shared=True)
    _adapters(parser)
    return _run(parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    escape_unprintable()
    first = True
    try:
        with Ranks.from_torchrun() if options.shared else Ranks() as options.ranks:
            first = options.ranks.first
            with _handle_signals(first):
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
def _handle_signals(first: bool) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C: clean up, and do not let a second signal interrupt the cleanup.

    A third signal ends the process at once. Signals within one second count as one signal: under torchrun, Ctrl-C comes
    from the terminal and from torchrun. Signals that were ignored at the start, as by `nohup`, stay ignored.
    """
    count, latest = 0, -math.inf

    def stop(*_: object) -> None:
        nonlocal count, latest
        if time.monotonic() - latest < _SAME_SIGNAL_SECONDS:
            return
        count, latest = count + 1, time.monotonic()
        if count == 1:
            raise KeyboardInterrupt
        if count > _MAX_SIGNALS:
            os._exit(INTERRUPTED)
        if first:
            with contextlib.suppress(OSError):  # `print` may be the function that was interrupted
                os.write(2, _CLEANUP_MESSAGE.encode())

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
    parser = CommandParser(
        prog=prog,
        description="Convert models between Hugging Face safetensors and Megatron checkpoints. Needs no GPU and never "
        "holds the model in memory. Under torchrun the processes share the work. Supported are "
        f"{', '.join(titles().values())}.",
    )
    parser.set_defaults(shared=True)  # `inspect` runs in a single process
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    verb = verbs.add_parser("import", help="Hugging Face model to Megatron checkpoint")
    verb.add_argument("--hf-model", required=True, metavar="MODEL", help="folder of the model, or hub id")
    verb.add_argument("--megatron-path", required=True, metavar="FOLDER", help="checkpoint to write")
    _megatron_options(verb)
    _flags(verb, "trust-remote-code", "not-strict")
    _writing_options(verb)
    verb.set_defaults(run=_convert, function="import_checkpoint")

    verb = verbs.add_parser("export", help="Megatron checkpoint to Hugging Face model")
    _megatron_path(verb)
    verb.add_argument("--hf-path", required=True, metavar="FOLDER", help="model to write")
    _other_model(verb)
    layouts = [layout.name.lower() for layout in ExpertLayout]
    verb.add_argument("--expert-layout", choices=layouts,
                      help="layout of the experts' weights (default: that of the imported model)")  # fmt: skip
    verb.add_argument("--quantize", choices=["fp8"],
                      help="write the linear layers of text layers in FP8, like the models named -FP8")  # fmt: skip
    _flags(verb, "drop-vocab-padding", "trust-remote-code", "not-strict")
    _writing_options(verb)
    verb.set_defaults(run=_convert, function="export_checkpoint")

    verb = verbs.add_parser("reformat", help="Megatron checkpoint to the other format")
    _megatron_path(verb)
    verb.add_argument("--new-path", required=True, metavar="FOLDER", help="checkpoint to write")
    _other_model(verb)
    _megatron_options(verb, required=True)
    _flags(verb, "trust-remote-code")
    _writing_options(verb)
    verb.set_defaults(run=_convert, function="reformat_checkpoint")

    verb = verbs.add_parser("verify", help="compare a Megatron checkpoint with its source, bit for bit")
    verb.add_argument("--hf-model", metavar="MODEL",
                      help="folder or hub id of the model that was imported or exported")  # fmt: skip
    _megatron_path(verb)
    verb.add_argument(
        "--new-path", metavar="FOLDER", help="compare with this checkpoint, which `reformat` made from --megatron-path"
    )
    _flags(verb, "drop-vocab-padding", "json", "no-progress")
    verb.epilog = "Without --hf-model and --new-path the checkpoint is compared with the checksums in its manifest."
    verb.set_defaults(run=_verify)

    verb = verbs.add_parser("inspect", help="show the contents of a checkpoint")
    which = verb.add_mutually_exclusive_group(required=True)
    which.add_argument("--megatron-path", metavar="FOLDER", help="checkpoint, or one iteration of it")
    which.add_argument("--hf-model", metavar="FOLDER", help="folder of a model")
    _iteration(verb)
    _flags(verb, "json")
    verb.set_defaults(run=_inspect, shared=False)

    verb = verbs.add_parser("check", help="check that an inference engine reads all of an exported model or adapter")
    verb.add_argument("folder", metavar="FOLDER", help="folder of a Hugging Face model, or of adapters")
    verb.add_argument("--engine", required=True, choices=("vllm", "sglang", "transformers"), help="the engine")
    verb.add_argument("--base-model", metavar="MODEL", help="folder or hub id of the model of adapters (default: the "
                      "one that adapter_config.json names)")  # fmt: skip
    _flags(verb, "json")
    verb.set_defaults(run=_check, shared=False)

    _adapters(verbs.add_parser("adapters", help="export a run's adapters for other libraries, or merge them"))
    return parser


def _adapters(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Export or merge the adapters that a run trained, from its checkpoint in either format. Needs no GPU and "
        "never holds the model in memory."
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    export = verbs.add_parser("export", help="a folder of adapters, for peft.PeftModel.from_pretrained and vLLM")
    merge = verbs.add_parser("merge", help="a complete Hugging Face model with the adapters merged in")
    for verb, target, base in (
        (export, "folder of adapters to write", "folder or hub id of the base model, if the run does not name it or "
         "names another one"),
        (merge, "model to write", "initial weights of the run, a Hugging Face model or a Megatron checkpoint, if they "
         "have moved since"),
    ):  # fmt: skip
        _megatron_path(verb)
        verb.add_argument("--hf-path", required=True, metavar="FOLDER", help=target)
        verb.add_argument("--base-model", metavar="MODEL", help=base)
        _flags(verb, "trust-remote-code")
        _writing_options(verb)
    _flags(merge, "drop-vocab-padding")
    export.set_defaults(run=_convert, function="export_adapters")
    merge.set_defaults(run=_convert, function="merge_adapters")


def _iteration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iteration", type=int, metavar="N", help="which iteration (default: the latest)")


def _megatron_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megatron-path", required=True, metavar="FOLDER", help="checkpoint, or one iteration of it")
    _iteration(parser)


def _other_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-model", metavar="MODEL",
                        help="take configuration, tokenizer and processor from this folder or hub id instead of from "
                        "the checkpoint")  # fmt: skip


def _flags(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        no, _, positive = name.partition("-")
        if no in ("no", "not"):
            parser.add_argument(f"--{name}", action="store_false", dest=positive, help=_FLAGS[name])
        else:
            parser.add_argument(f"--{name}", action="store_true", help=_FLAGS[name])


def _megatron_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the options that describe a Megatron checkpoint to write. With `required`, --ckpt-format must be given."""
    text = "format to write" if required else "format to write (default: %(default)s)"
    parser.add_argument("--ckpt-format", choices=FORMATS, required=required, default=FORMATS[0], help=text)
    parser.add_argument("--layer-spec", choices=(TRANSFORMER_ENGINE, LOCAL), default=TRANSFORMER_ENGINE, dest="naming",
                        help="layer spec whose parameter names are written (default: %(default)s)")  # fmt: skip
    parser.add_argument("--make-vocab-size-divisible-by", type=int, metavar="N", dest="vocab_divisor",
                        help="pad the vocabulary to a multiple of N times --tp, as a model with should_pad_vocab does "
                        "(default: no padding)")  # fmt: skip
    group = parser.add_argument_group(
        "parallel sizes that the files are optimized for",
        "A rank reads complete chunks of tensors. With these sizes, chunks end where the shards of ranks end, and the "
        "chunks of one rank are stored together. The checkpoint can be loaded with any other sizes too.",
    )
    for name, text in _SIZES.items():
        default = None if name in ("etp", "world-size") else 1
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)


def _writing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all commands that write a checkpoint have."""
    parser.add_argument(
        "--torch-dtype",
        choices=WEIGHT_DTYPES,
        help="cast the weights, except those that the model keeps in float32 (default: keep their dtypes)",
    )
    _flags(parser, "verify", "checksums", "overwrite", "resume", "dry-run", "json", "no-progress")


def _convert(options: argparse.Namespace) -> int:
    """Run a command that writes a checkpoint, print its report, and return the exit status.

    `options.function` names the function of `qwen3vl_bridge.checkpoint` to call.

    Raises:
        OSError: the plan of a dry run cannot be printed.
    """
    from qwen3vl_bridge import checkpoint

    given = vars(options).copy()
    function, as_json, _, _ = (given.pop(name) for name in ("function", "json", "run", "shared"))
    if "tp" in given:
        sizes = (name.replace("-", "_") for name in _SIZES)
        given["topology"] = Topology(**{name: given.pop(name) for name in sizes})
    # Each remaining option has the name of a parameter of the function, or of a field of `ConversionOptions`.
    report: ConversionReport = getattr(checkpoint, function)(**given)
    if not options.ranks.first:
        return 0
    if as_json:
        text = json.dumps(report.as_dict(), indent=2)
    else:
        text = "\n".join(
            [
                *(f"note: {note}" for note in report.notes),
                (_describe_plan if report.dry_run else _describe_result)(report),
            ]
        )
    if report.dry_run:
        show(text)
    else:
        show_report(text, report.target)
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Compare two checkpoints, print the differences, and return the exit status."""
    from qwen3vl_bridge.checkpoint.verification import verify_checkpoint, verify_checksums, verify_reformatted

    how: dict[str, Any] = {name: getattr(options, name) for name in ("iteration", "ranks", "progress")}
    if options.new_path is not None or options.hf_model is not None:
        how["drop_vocab_padding"] = options.drop_vocab_padding
    elif options.drop_vocab_padding:
        raise CheckpointError(
            "--drop-vocab-padding: checksums cover all rows of the vocabulary, with padding; omit this option, or name "
            "a model to compare with (--hf-model or --new-path)"
        )
    if options.new_path is not None:
        report = verify_reformatted(options.megatron_path, options.new_path, hf_model=options.hf_model, **how)
    elif options.hf_model is not None:
        report = verify_checkpoint(options.hf_model, options.megatron_path, **how)
    else:
        report = verify_checksums(options.megatron_path, **how)
    status = 0 if report.same else _DIFFERENT
    if not options.ranks.first:
        return status
    if options.json:
        show(json.dumps(report.as_dict(), indent=2))
        return status
    for note in report.notes:
        show(f"note: {note}")
    if report.same:
        show(f"same: {report.tensors} tensors, {report.nbytes:,} bytes compared")
        return status
    show(f"different: {len(report.differences)} of {report.tensors} tensors", error=True)
    for entry in report.differences:
        show(f"  {entry}", error=True)
    return status


def _inspect(options: argparse.Namespace) -> int:
    """Print the contents of a checkpoint, and return the exit status."""
    from qwen3vl_bridge.checkpoint.verification import inspect_checkpoint, inspect_model

    if options.hf_model is not None:
        found = inspect_model(expanded(options.hf_model))
    else:
        found = inspect_checkpoint(options.megatron_path, iteration=options.iteration)
    # Only JSON has the complete manifest: its main values are lines of their own.
    lines = (f"{name.replace('_', ' '):14} {_format(value)}" for name, value in found.items() if name != "manifest")
    show(json.dumps(found, indent=2) if options.json else "\n".join(lines))
    return 0


def _check(options: argparse.Namespace) -> int:
    """Check that an inference engine can load a folder, print the faults, and return the exit status."""
    from qwen3vl_bridge.inference.engine_check import check_for_engine

    report = check_for_engine(options.folder, options.engine, base_model=options.base_model)
    verdict = f"{len(report.faults)} faults" if report.faults else "no fault"
    if options.json:
        show(json.dumps(report.as_dict(), indent=2))
    else:
        for note in report.notes:
            show(f"note: {note}")
        for fault in report.faults:
            show(fault, error=True)
        show(f"{report.engine}: {report.tensors} tensors of {report.folder} checked, {verdict}")
    return _DIFFERENT if report.faults else 0


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items() if entry is not None)
    if isinstance(value, list):
        return ", ".join(map(str, value[:8])) + (f" and {len(value) - 8} more" if len(value) > 8 else "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value in (None, "") else str(value)


def _describe_plan(report: ConversionReport) -> str:
    copied = report.tensors - report.cast - report.transposed
    lines = {
        report.name: f"{report.source} -> {report.target} ({report.format})",
        "tensors": f"{report.tensors:,} in {report.files} files, {report.parameters:,} parameters in "
        f"{', '.join(report.dtypes)}",
        "bytes": in_bytes(report.nbytes),
        "computed": f"{report.cast:,} tensors cast, {report.transposed:,} transposed, {max(copied, 0):,} copied",
        "disk": f"{in_bytes(report.disk_needed)} needed, {in_bytes(report.disk_free)} free"
        + (": not enough" if report.disk_needed > report.disk_free else ""),
        "processes": f"{report.processes}",
        "time": f"about {report.estimate:.0f} s, at the speed at which samples were read and written",
    }
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())


def _describe_result(report: ConversionReport) -> str:
    # `written` counts bytes of files, which are a little longer than the tensors in them.
    rate = report.written / max(report.seconds, 1e-9)
    resumed = f"; {in_bytes(report.resumed)} of its files existed already" if report.resumed else ""
    return (
        f"{report.target}: {report.tensors} tensors, {report.parameters:,} parameters in {', '.join(report.dtypes)}, "
        f"{in_bytes(report.nbytes)}; {in_bytes(report.written)} written in {report.seconds:.1f} s "
        f"({in_bytes(rate)}/s){resumed}"
    )
