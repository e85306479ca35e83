"""The converter's command line: import, export, verify, inspect.

What lives here: options, and what is printed. What may not: torch at import time (so that `--help` answers at once),
and work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.topology import Topology

if TYPE_CHECKING:
    from qwen3vl_bridge.checkpoint.reports import ConversionReport

_BAD_INPUT, _DIFFERENT = 2, 1
_DTYPES = ("float32", "float16", "bfloat16")
_FORMATS = ("fsdp_dtensor",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: as typed; None for those of the process.

    Returns:
        Exit status: 0, 1 if `verify` found differences, 2 for bad input.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert.py",
        description="Convert Qwen3-VL between Hugging Face safetensors and Megatron checkpoints. No GPU is needed, "
        "and no model in memory.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _import(verbs.add_parser("import", help="Hugging Face model to Megatron checkpoint"))
    _export(verbs.add_parser("export", help="Megatron checkpoint to Hugging Face model"))
    _verify(verbs.add_parser("verify", help="compare a Megatron checkpoint with a Hugging Face model, bit for bit"))
    _inspect(verbs.add_parser("inspect", help="say what a checkpoint holds"))
    return parser


def _import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-model", required=True, metavar="MODEL", help="folder of the model, or hub id")
    parser.add_argument("--megatron-path", required=True, metavar="FOLDER", help="checkpoint to write")
    parser.add_argument("--layer-spec", choices=("transformer_engine", "local"), default="transformer_engine",
                        help="whose parameter names to use (default: %(default)s)")  # fmt: skip
    for name, what in (
        ("tp", "tensor"),
        ("pp", "pipeline"),
        ("cp", "context"),
        ("ep", "expert"),
        ("etp", "expert-tensor"),
    ):
        default = None if name == "etp" else 1
        text = f"{what}-parallel size the checkpoint is meant for; it loads at any other too"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--verify", action="store_true", help="compare with the source before putting it into place")
    _writing(parser)
    parser.set_defaults(run=_run_import)


def _export(parser: argparse.ArgumentParser) -> None:
    _megatron_path(parser)
    parser.add_argument("--hf-path", required=True, metavar="FOLDER", help="model to write")
    parser.add_argument("--hf-model", metavar="MODEL",
                        help="take configuration, tokenizer and processor from this folder or hub id instead of from "
                        "the checkpoint")  # fmt: skip
    _writing(parser)
    parser.set_defaults(run=_run_export)


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-model", required=True, metavar="MODEL", help="folder of the model, or hub id")
    _megatron_path(parser)
    parser.add_argument("--no-progress", action="store_true", help="show no progress")
    parser.set_defaults(run=_run_verify)


def _inspect(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--megatron-path", metavar="FOLDER", help="checkpoint, or one iteration of it")
    which.add_argument("--hf-model", metavar="FOLDER", help="folder of a model")
    parser.add_argument("--iteration", type=int, metavar="N", help="which iteration (default: the latest)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_inspect)


def _megatron_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megatron-path", required=True, metavar="FOLDER", help="checkpoint, or one iteration of it")
    parser.add_argument("--iteration", type=int, metavar="N", help="which iteration (default: the latest)")


def _writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch-dtype", choices=_DTYPES, help="cast the weights (default: leave them as they are)")
    parser.add_argument("--ckpt-format", choices=_FORMATS, default=_FORMATS[0],
                        help="format of the Megatron side (default: %(default)s)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result at that place")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan; write nothing")
    parser.add_argument("--no-progress", action="store_true", help="show no progress")


def _run_import(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint.importing import import_checkpoint

    report = import_checkpoint(
        options.hf_model,
        options.megatron_path,
        torch_dtype=options.torch_dtype,
        topology=Topology(options.tp, options.pp, options.cp, options.ep, options.etp),
        naming=options.layer_spec,
        overwrite=options.overwrite,
        verify=options.verify,
        dry_run=options.dry_run,
        progress=not options.no_progress,
    )
    return _print(report)


def _run_export(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint.exporting import export_checkpoint

    report = export_checkpoint(
        options.megatron_path,
        options.hf_path,
        hf_model=options.hf_model,
        torch_dtype=options.torch_dtype,
        iteration=options.iteration,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
        progress=not options.no_progress,
    )
    return _print(report)


def _print(report: ConversionReport) -> int:
    if report.dry_run:
        print(json.dumps(report.as_dict(), indent=2))
        return 0
    for note in report.notes:
        print(f"note: {note}")
    rate = report.nbytes / 1e9 / max(report.seconds, 1e-9)
    print(
        f"{report.target}: {report.tensors} tensors, {report.parameters:,} parameters in {', '.join(report.dtypes)}, "
        f"{report.nbytes / 1e9:.2f} GB in {report.seconds:.1f} s ({rate:.2f} GB/s)"
    )
    return 0


def _run_verify(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint.verifying import verify_checkpoint

    report = verify_checkpoint(
        options.hf_model, options.megatron_path, iteration=options.iteration, progress=not options.no_progress
    )
    for note in report.notes:
        print(f"note: {note}")
    if report.same:
        print(f"same: {report.tensors} tensors, {report.nbytes:,} bytes compared")
        return 0
    print(f"different: {len(report.differences)} of {report.tensors} tensors", file=sys.stderr)
    for entry in report.differences:
        print(f"  {entry}", file=sys.stderr)
    return _DIFFERENT


def _run_inspect(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.checkpoint.inspection import as_table, inspect_checkpoint

    found = inspect_checkpoint(options.megatron_path or options.hf_model, iteration=options.iteration)
    print(json.dumps(found, indent=2) if options.json else as_table(found))
    return 0
