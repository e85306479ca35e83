"""Options that several verbs of the converter share."""

from __future__ import annotations

import argparse
from typing import Any

from qwen3vl_bridge.checkpoint.formats.tensors import WEIGHT_DTYPES


def megatron_path(parser: argparse.ArgumentParser) -> None:
    """Options that name a checkpoint."""
    parser.add_argument("--megatron-path", required=True, metavar="FOLDER", help="checkpoint, or one iteration of it")
    parser.add_argument("--iteration", type=int, metavar="N", help="which iteration (default: the latest)")


def remote_code(parser: argparse.ArgumentParser) -> None:
    """Whether a model may contain code."""
    parser.add_argument("--trust-remote-code", action="store_true",
                        help="copy Python files that belong to the model; they are never run here")  # fmt: skip


def vocab_padding(parser: argparse.ArgumentParser) -> None:
    """Whether rows of a padded vocabulary may be dropped."""
    parser.add_argument("--drop-vocab-padding", action="store_true",
                        help="drop rows beyond the vocabulary even if they are not zero, as after training with a "
                        "padded vocabulary, instead of failing")  # fmt: skip


def writing_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that writes."""
    parser.add_argument(
        "--torch-dtype",
        choices=WEIGHT_DTYPES,
        help="cast the weights, except to 16 bits those that the model keeps in float32 (default: keep their dtypes)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare the result with the source before it is moved into place"
    )
    parser.add_argument("--checksums", action="store_true", help="write a SHA-256 of every tensor to the manifest")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result of a conversion, if its "
    "folder holds nothing else")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run with the same options; if "
    "this run fails, keep its partial result for the next. Without --resume a conversion starts over and removes "
    "partial results")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check everything, measure the speed of "
    "reading and writing, print the plan; leave nothing on disk")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan or the report as JSON")
    parser.add_argument("--no-progress", action="store_true", help="show no progress")


def conversion_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `writing_options` as `ConversionOptions`."""
    names = ("overwrite", "resume", "verify", "checksums", "dry_run", "ranks")
    return {name: getattr(options, name) for name in names} | {"progress": not options.no_progress}
