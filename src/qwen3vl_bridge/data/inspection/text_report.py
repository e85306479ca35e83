"""An inspection, a packing or a download as text for a terminal, and as JSON.

Text of samples is not trusted: control characters, which could move a terminal's cursor or colour untrained text, are
escaped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from qwen3vl_bridge.data.downloading import DownloadReport
from qwen3vl_bridge.data.inspection.summary import Inspection, Picture, Piece, SampleView, without_repeated_advice
from qwen3vl_bridge.data.offline_packing import PackingReport
from qwen3vl_bridge.terminal import visible

from rich.console import Console
from rich.text import Text

MOST_ERRORS = 10
_TRAINED, _VISION, _HEAD, _ERROR = "bold green", "dim cyan", "bold", "red"


def print_text(inspection: Inspection) -> None:
    """Print an inspection: trained tokens in colour on a terminal, in [[ ]] elsewhere."""
    console = Console()
    if console.is_terminal and not console.no_color:
        console.print(as_text(inspection), soft_wrap=True, highlight=False)
    else:
        sys.stdout.write(as_text(inspection, brackets=True).plain)


def packing_as_json(report: PackingReport) -> str:
    """All numbers of a packing."""
    return json.dumps(asdict(report), indent=2)


def downloads_as_json(report: DownloadReport) -> str:
    """All fields of a download's report."""
    return json.dumps(asdict(report), indent=2)


def downloads_as_text(report: DownloadReport, manifest: Path) -> str:
    """The number of files, and the first failed downloads."""
    lines = [f"downloaded: {report.downloaded:,}; there before: {report.present:,}"]
    final = sum(failure.final for failure in report.failures)
    if report.failures:
        lines.append(f"failed: {len(report.failures):,}, permanently {final:,}; all of them: {manifest}")
        lines += [f"  {failure.place}: {failure.problem}" for failure in report.failures[:MOST_ERRORS]]
    if report.unread:
        lines.append(f"samples that cannot be read: {len(report.unread):,}")
        lines += [f"  {problem}" for problem in report.unread[:MOST_ERRORS]]
    if final < len(report.failures):
        lines.append("training stops at those that did not fail permanently: run this again, or with --give-up")
    return "\n".join(lines)


def packing_as_text(report: PackingReport) -> str:
    """Summary of a packing."""
    lines = {
        "samples": f"{report.samples:,}, of them {report.dropped:,} dropped and {report.truncated:,} cut",
        "rows": f"{report.rows:,}, {100 * report.fill:.1f} % full of tokens",
        "tokens": f"{report.tokens:,}",
        "patches": f"{report.patches:,}, {report.patches / report.rows:,.0f} a row",
    }
    if report.patch_fill is not None:
        lines["patches"] += f", {100 * report.patch_fill:.1f} % of the most"
    return "\n".join(f"{name:15}{value}" for name, value in lines.items())


def as_text(inspection: Inspection, *, brackets: bool = False) -> Text:
    """The whole inspection, trained tokens in colour, and if requested in brackets too."""
    text = Text()
    for view in inspection.samples:
        text.append(f"{visible(view.sample_id)}\n", _HEAD)
        for line in headlines(view):
            text.append(f"  {line}\n")
        _append_tokens(text, view, brackets)
        text.append("\n\n")
    for name, value in summary(inspection).items():
        text.append(f"{name:15}", _HEAD).append(f"{value}\n")
    for message in without_repeated_advice(message for _, message in inspection.errors[:MOST_ERRORS]):
        text.append(f"  {visible(message)}\n", _ERROR)
    if len(inspection.errors) > MOST_ERRORS:
        text.append(f"  and {len(inspection.errors) - MOST_ERRORS} more\n", _ERROR)
    return text


def _append_tokens(text: Text, view: SampleView, brackets: bool) -> None:
    for (trained, vision), pieces in groupby(view.pieces, key=lambda piece: (piece.trained, piece.vision)):
        words = "".join(map(shortened, pieces))
        style = _TRAINED if trained else _VISION if vision else ""
        text.append(f"[[{words}]]" if brackets and trained else words, style)


def shortened(piece: Piece) -> str:
    """A piece's text with escapes; for a run of vision tokens, one token and their number."""
    text = visible(piece.text)
    return f"{text} x {len(piece.ids)}" if piece.vision and len(piece.ids) > 1 else text


def headlines(view: SampleView) -> Iterator[str]:
    """Lines before a sample's text."""
    share = view.num_trained / max(view.num_tokens, 1)
    nothing = "" if view.num_trained else ": nothing to train on"
    yield f"{view.num_tokens:,} tokens, {view.num_trained:,} trained on ({share:.1%}){nothing}"
    for number, picture in enumerate(view.pictures, start=1):
        yield f"{picture.kind} {number}: {describe(picture)}"


def describe(picture: Picture) -> str:
    """Size and grid of an image or video."""
    grid = " x ".join(map(str, picture.grid))
    size = f"{picture.width} x {picture.height} pixels (width x height)"
    return f"{size}, {picture.num_tokens:,} tokens, grid {grid} (time x height x width)"


def summary(inspection: Inspection) -> dict[str, str]:
    """The figures, each with its name."""
    lengths, fills, spread = inspection.lengths, inspection.row_fills, _spread(inspection.lengths)
    shown, total, rows = len(inspection.samples), inspection.num_samples, len(fills)
    kind = "packed" if inspection.pack else "padded, one sample each"
    return {
        "samples": f"{total:,}: {shown:,} shown, {len(lengths):,} measured",
        "tokens": "min {min:,}, median {median:,g}, mean {mean:,.1f}, max {max:,}".format(**spread)
        if spread
        else "none measured",
        "trained on": f"{inspection.trained_share:.1%} of the tokens of the samples shown",
        "too long": f"{inspection.too_long:,} of {len(lengths):,} for a row of {inspection.seq_length:,} tokens",
        "rows": f"{rows:,} of the samples measured, {kind}: {inspection.fill:.1%} real tokens" if rows else "none",
        "errors": f"{len(inspection.errors):,}",
    }


def _spread(lengths: Sequence[int]) -> dict[str, float] | None:
    if not lengths:
        return None
    return {"min": min(lengths), "median": median(lengths), "mean": mean(lengths), "max": max(lengths)}


def as_json(inspection: Inspection) -> str:
    """Everything except pixels, as one object."""
    lengths = inspection.lengths
    found = {
        "num_samples": inspection.num_samples,
        "seq_length": inspection.seq_length,
        "pack": inspection.pack,
        "trained_share": inspection.trained_share,
        "length": _spread(lengths),
        "too_long": inspection.too_long,
        "num_rows": len(inspection.row_fills),
        "fill": inspection.fill,
        "num_errors": len(inspection.errors),
        "errors": [{"sample_id": sample_id, "message": message} for sample_id, message in inspection.errors],
        "samples": [_sample(view) for view in inspection.samples],
        "lengths": list(lengths),
        "row_fills": list(inspection.row_fills),
    }
    return json.dumps(found, indent=2)


def _sample(view: SampleView) -> dict[str, Any]:
    return {
        "sample_id": view.sample_id,
        "num_tokens": view.num_tokens,
        "num_trained": view.num_trained,
        "pictures": [
            {
                "kind": picture.kind,
                "grid": list(picture.grid),
                "height": picture.height,
                "width": picture.width,
                "num_tokens": picture.num_tokens,
            }
            for picture in view.pictures
        ],
        "pieces": [_piece(piece) for piece in view.pieces],
    }


def _piece(piece: Piece) -> dict[str, Any]:
    common = {"text": piece.text, "trained": piece.trained}
    return common | ({"id": piece.ids[0], "count": len(piece.ids)} if piece.vision else {"ids": list(piece.ids)})
