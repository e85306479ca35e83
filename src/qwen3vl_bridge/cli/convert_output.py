"""Output of the converter's commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.terminal import show, show_report

if TYPE_CHECKING:
    from qwen3vl_bridge.checkpoint.conversion import ConversionReport
    from qwen3vl_bridge.checkpoint.verification import VerifyReport

_DIFFERENT = 1


def conversion(report: ConversionReport, options: argparse.Namespace) -> int:
    """Print what was converted, or would be; returns the exit status.

    Raises:
        OSError: a plan, which is the whole result of a dry run, cannot be printed.
    """
    if not options.ranks.first:
        return 0
    if options.json:
        text = json.dumps(report.as_dict(), indent=2)
    else:
        text = "\n".join([*(f"note: {note}" for note in report.notes), (_plan if report.dry_run else _done)(report)])
    if report.dry_run:
        show(text)
    else:
        show_report(text, report.target)
    return 0


def _plan(report: ConversionReport) -> str:
    copied = report.tensors - report.cast - report.transposed
    lines = {
        report.name: f"{report.source} -> {report.target} ({report.format})",
        "tensors": f"{report.tensors:,} in {report.files} files, {report.parameters:,} parameters in "
        f"{', '.join(report.dtypes)}",
        "bytes": _gigabytes(report.nbytes),
        "computed": f"{report.cast:,} tensors cast, {report.transposed:,} transposed, {max(copied, 0):,} copied",
        "disk": f"{_gigabytes(report.disk_needed)} needed, {_gigabytes(report.disk_free)} free"
        + (": not enough" if report.disk_needed > report.disk_free else ""),
        "processes": f"{report.processes}",
        "time": f"about {report.estimate:.0f} s, at the speed at which samples were read and written",
    }
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())


def _done(report: ConversionReport) -> str:
    # Files are a little longer than the tensors in them.
    rate = report.written / 1e9 / max(report.seconds, 1e-9)
    resumed = f"; {_gigabytes(report.resumed)} of its files existed already" if report.resumed else ""
    return (
        f"{report.target}: {report.tensors} tensors, {report.parameters:,} parameters in {', '.join(report.dtypes)}, "
        f"{_gigabytes(report.nbytes)}; {_gigabytes(report.written)} written in {report.seconds:.1f} s "
        f"({rate:.2f} GB/s){resumed}"
    )


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def comparison(report: VerifyReport, options: argparse.Namespace) -> int:
    """Print the differences; returns the exit status."""
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


def contents(found: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Print the contents of a checkpoint; returns the exit status."""
    from qwen3vl_bridge.checkpoint.inspection import as_table

    show(json.dumps(found, indent=2) if options.json else as_table(found))
    return 0
