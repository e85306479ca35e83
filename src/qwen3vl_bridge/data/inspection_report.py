"""An inspection, a packing or a download as text for a terminal, as JSON, or as one HTML file that needs no network.

Text of samples is not trusted: control characters are escaped, and the page allows neither scripts nor anything from
elsewhere.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from qwen3vl_bridge.data.downloading import DownloadReport
from qwen3vl_bridge.data.inspection import Inspection, Picture, Piece, SampleView, without_repeated_advice
from qwen3vl_bridge.data.offline_packing import PackingReport
from qwen3vl_bridge.terminal import visible

from PIL import Image
from rich.console import Console
from rich.text import Text
from torch import Tensor

MOST_ERRORS = 10
_TRAINED, _VISION, _TITLE, _ERROR = "bold green", "dim cyan", "bold", "red"


def print_text(inspection: Inspection) -> None:
    """Print an inspection: trained tokens in colour on a terminal, in [[ ]] elsewhere."""
    console = Console()
    if console.is_terminal and not console.no_color:
        console.print(as_text(inspection), soft_wrap=True, highlight=False)
    else:
        sys.stdout.write(as_text(inspection, brackets=True).plain)


def report_as_json(report: PackingReport | DownloadReport) -> str:
    """All fields of a report."""
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
        text.append(f"{visible(view.sample_id)}\n", _TITLE)
        for line in headlines(view):
            text.append(f"  {line}\n")
        for (trained, vision), pieces in groupby(view.pieces, key=lambda piece: (piece.trained, piece.vision)):
            words = "".join(map(shortened, pieces))
            style = _TRAINED if trained else _VISION if vision else ""
            text.append(f"[[{words}]]" if brackets and trained else words, style)
        text.append("\n\n")
    for name, value in summary(inspection).items():
        text.append(f"{name:15}", _TITLE).append(f"{value}\n")
    for message in without_repeated_advice(message for _, message in inspection.errors[:MOST_ERRORS]):
        text.append(f"  {visible(message)}\n", _ERROR)
    if len(inspection.errors) > MOST_ERRORS:
        text.append(f"  and {len(inspection.errors) - MOST_ERRORS} more\n", _ERROR)
    return text


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

    def piece_of(piece: Piece) -> dict[str, Any]:
        common = {"text": piece.text, "trained": piece.trained}
        return common | ({"id": piece.ids[0], "count": len(piece.ids)} if piece.vision else {"ids": list(piece.ids)})

    names = ("kind", "grid", "height", "width", "num_tokens")
    found = {
        "num_samples": inspection.num_samples,
        "seq_length": inspection.seq_length,
        "pack": inspection.pack,
        "trained_share": inspection.trained_share,
        "length": _spread(inspection.lengths),
        "too_long": inspection.too_long,
        "num_rows": len(inspection.row_fills),
        "fill": inspection.fill,
        "num_errors": len(inspection.errors),
        "errors": [{"sample_id": sample_id, "message": message} for sample_id, message in inspection.errors],
        "samples": [
            {
                "sample_id": view.sample_id,
                "num_tokens": view.num_tokens,
                "num_trained": view.num_trained,
                "pictures": [{name: getattr(picture, name) for name in names} for picture in view.pictures],
                "pieces": [piece_of(piece) for piece in view.pieces],
            }
            for view in inspection.samples
        ],
        "lengths": inspection.lengths,
        "row_fills": inspection.row_fills,
    }
    return json.dumps(found, indent=2)


_MOST_PAGE_ERRORS = 100
_MOST_FRAMES = 16
_MOST_PNG_PIXELS = 2**16  # larger images take far less space as JPEG
_MOST_OPEN = 1500  # pieces of a sample that is not folded
_BINS = 24
# Of a histogram: as wide as a phone's page, so that its text has the stated size there; and margins of the axes.
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 340, 200, 44, 36, 40
_TURN = "<|im_start|>"
_ROLES = ("system", "user", "assistant", "tool")

_PAGE_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #222; --faint: #5a5a5a; --line: #ccc; --on: #b7e4c7;
  --vision: #2a6f97; --error: #b00020; --system: #6e6e6e; --user: #2a6f97; --assistant: #277a4a; --tool: #9c5d00 }}
@media (prefers-color-scheme: dark) {{
:root {{ --page: #16181b; --ink: #e4e4e4; --faint: #a6a6a6; --line: #444; --on: #1f5136;
  --vision: #7cc0e8; --error: #ff8a94; --system: #a6a6a6; --user: #7cc0e8; --assistant: #6fcf97; --tool: #e8a84c }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em;
  color: var(--ink); background: var(--page) }}
h1 {{ font-size: 1.4em; overflow-wrap: anywhere }}
section {{ border-top: 1px solid var(--line); margin-top: 2em }}
h2 {{ font-size: 1.1em; overflow-wrap: anywhere }}
th {{ text-align: left; vertical-align: top; padding-right: 1.5em; white-space: nowrap }}
td {{ overflow-wrap: anywhere }}
.text {{ font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }}
.text span:hover {{ outline: 1px solid var(--faint) }}
.turn {{ border-left: 4px solid var(--line); padding-left: .7em; margin: .5em 0 }}
{roles}
.on {{ background: var(--on) }}
.vision {{ color: var(--vision) }}
.error, .long {{ color: var(--error); white-space: pre-wrap; overflow-wrap: anywhere }}
.long {{ font-weight: bold }}
summary {{ cursor: pointer; color: var(--faint) }}
figure {{ display: inline-block; margin: 0 0 1em; padding-right: 1em; box-sizing: border-box; vertical-align: top;
  max-width: 100% }}
img {{ display: block; max-width: 100%; image-rendering: pixelated }}
figcaption, .frame {{ font-size: 12px; color: var(--faint) }}
.strip {{ display: flex; gap: 6px; overflow-x: auto; padding-bottom: 4px }}
.frame {{ flex: none; max-width: 80% }}
svg {{ width: 100%; max-width: 30em }}
svg rect {{ fill: var(--vision) }}
svg line {{ stroke: var(--faint) }}
svg .limit {{ stroke: var(--error); stroke-dasharray: 4 3 }}
svg text {{ font-size: 11px; fill: var(--faint) }}
svg .name {{ font-size: 12px; fill: var(--ink) }}
</style></head><body>
<h1>{title}</h1>
<p>Tokens <span class="on">marked like this</span> are trained on. Point at a token for its id. The bar next to a
turn has the colour of its role: {legend}.</p>
"""


def write_html(inspection: Inspection, path: Path, title: str, model: str | None = None) -> None:
    """Write the report to a temporary file and rename it, so that the file is always complete; arguments as for
    `html_parts`.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(html_parts(inspection, title, model))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def html_parts(inspection: Inspection, title: str, model: str | None = None) -> Iterator[str]:
    """The page's HTML in parts, for the data called `title` and the processor and template of `model`."""
    of_model = f" for {model}" if model else ""
    yield _PAGE_HEAD.format(
        title=_escaped(f"{title}{of_model}, rows of {inspection.seq_length:,} tokens"),
        roles="\n".join(
            f".{role} {{ border-color: var(--{role}) }} b.{role} {{ color: var(--{role}) }}" for role in _ROLES
        ),
        legend=", ".join(f'<b class="{role}">{role}</b>' for role in _ROLES),
    )
    rows = (f"<tr><th>{name}</th><td>{_escaped(value)}</td></tr>\n" for name, value in summary(inspection).items())
    yield f"<table>\n{''.join(rows)}</table>\n"
    for message in without_repeated_advice(message for _, message in inspection.errors[:_MOST_PAGE_ERRORS]):
        yield f'<p class="error">{_escaped(message)}</p>\n'
    if len(inspection.errors) > _MOST_PAGE_ERRORS:
        yield f'<p class="error">and {len(inspection.errors) - _MOST_PAGE_ERRORS} more</p>\n'
    yield _histogram("samples", "tokens of a sample", inspection.lengths, limit=inspection.seq_length)
    yield _histogram("rows", "% of a row that is real tokens", [100 * fill for fill in inspection.row_fills])
    for view in inspection.samples:
        yield from _section(view, inspection.seq_length)
    yield "</body></html>\n"


def _escaped(text: str) -> str:
    return escape(visible(text))


def _section(view: SampleView, seq_length: int) -> Iterator[str]:
    yield f"<section><h2>{_escaped(view.sample_id)}</h2>\n<p>{_escaped(next(iter(headlines(view))))}</p>\n"
    fits = view.num_tokens <= seq_length
    if not fits:
        yield f'<p class="long">fits no row: {view.num_tokens:,} tokens, and a row has {seq_length:,}</p>\n'
    for number, picture in enumerate(view.pictures, start=1):
        yield from _picture(picture, number)
    shown = " open" if fits and len(view.pieces) <= _MOST_OPEN else ""
    yield f'<details{shown}><summary>{view.num_tokens:,} tokens</summary><div class="text">'
    for role, pieces in _turns(view.pieces):
        yield f'<div class="turn {role}">{"".join(map(_span, pieces))}</div>'
    yield "</div></details></section>\n"


def _turns(pieces: Sequence[Piece]) -> Iterator[tuple[str, Sequence[Piece]]]:
    """Each turn, as delimited by the template, with its role; "" for text outside of turns."""
    starts = [place for place, piece in enumerate(pieces) if piece.text == _TURN]
    for start, end in zip(
        dict.fromkeys((0, *starts)), (*(start for start in starts if start), len(pieces)), strict=True
    ):
        turn = pieces[start:end]
        role = "".join(piece.text for piece in turn[1:8]).partition("\n")[0].strip()
        yield role if role in _ROLES else "", turn


def _span(piece: Piece) -> str:
    kinds = [name for name, holds in (("on", piece.trained), ("vision", piece.vision)) if holds]
    ids = f"{piece.ids[0]}, {len(piece.ids)} times" if piece.vision else " ".join(map(str, piece.ids))
    title = f"{ids}: {'trained on' if piece.trained else 'not trained on'}"
    text = _escaped(shortened(piece))
    # A line break by itself would have nothing to hover over.
    text = text.replace("\n", "↵\n") if piece.text.isspace() else text
    return f'<span class="{" ".join(kinds)}" title="{title}">{text}</span>'


def _picture(picture: Picture, number: int) -> Iterator[str]:
    """A figure of an image; for a video, of some or all of its frames in a row."""
    if picture.frames is None:
        return
    caption, total = f"{picture.kind} {number}: {describe(picture)}", len(picture.frames)
    if picture.kind == "video":
        shown = min(total, _MOST_FRAMES)
        places = [i * total // shown for i in range(shown)]
        named = [(f"frame {place + 1} of {total}", _inlined(picture.frames[place])) for place in places]
        frames = (
            f'<div class="frame"><img width="{picture.width}" alt="{name}" src="{source}">{name}</div>'
            for name, source in named
        )
        inner = f'<div class="strip">{"".join(frames)}</div>'
    else:
        inner = f'<img width="{picture.width}" alt="{caption}" src="{_inlined(picture.frames[0])}">'
    yield f"<figure>{inner}<figcaption>{caption}</figcaption></figure>\n"


def _inlined(frame: Tensor) -> str:
    image, buffer = Image.fromarray(frame.numpy()), io.BytesIO()
    kind = "png" if image.width * image.height <= _MOST_PNG_PIXELS else "jpeg"
    image.save(buffer, format=kind, quality=90)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _histogram(of: str, title: str, values: Sequence[float], limit: float | None = None) -> str:
    """Number of values in each of several equal ranges."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if low == high:  # one bar in the middle
        low, high = low - 0.5, high + 0.5
    step = (high - low) / _BINS
    counts = [0] * _BINS
    for value in values:
        counts[min(int((value - low) / step), _BINS - 1)] += 1
    most, floor = max(counts), _HEIGHT - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 12) * (value - low) / (high - low)

    def up(number: float) -> float:
        return floor - (floor - _TOP) * number / most

    parts = [f'<text class="name" x="0" y="14">number of {of}</text>']
    for place, number in enumerate(counts):
        left, right, top = across(low + place * step), across(low + (place + 1) * step), up(number)
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" height="{floor - top:.1f}">'
            f"<title>{low + place * step:,.5g} to {low + (place + 1) * step:,.5g}: {number:,}</title></rect>"
        )
    parts.append(f'<line x1="{_LEFT}" y1="{floor}" x2="{_WIDTH}" y2="{floor}"/>')
    parts.append(f'<line x1="{_LEFT}" y1="{floor}" x2="{_LEFT}" y2="{_TOP}"/>')
    for tick in _ticks(0, most, 3):
        parts.append(f'<line x1="{_LEFT - 4}" y1="{up(tick):.1f}" x2="{_LEFT}" y2="{up(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:,.10g}</text>')
    for tick in _ticks(low, high, 4):
        parts.append(f'<line x1="{across(tick):.1f}" y1="{floor}" x2="{across(tick):.1f}" y2="{floor + 4}"/>')
        parts.append(f'<text x="{across(tick):.1f}" y="{floor + 16}" text-anchor="middle">{tick:,.10g}</text>')
    parts.append(f'<text class="name" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{title}</text>')
    if limit is not None and low < limit < high:
        parts.append(
            f'<line class="limit" x1="{across(limit):.1f}" y1="{floor}" x2="{across(limit):.1f}" y2="{_TOP}"/>'
        )
        parts.append(f'<text x="{across(limit):.1f}" y="{_TOP - 4}" text-anchor="middle">a row</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>\n'


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers in a range, with a step of 1, 2 or 5 times a power of ten, about as many as wanted."""
    rough = max((high - low) / wanted, 1)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
