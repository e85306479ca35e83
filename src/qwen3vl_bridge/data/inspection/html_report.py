"""An inspection as one HTML file that needs no network.

What lives here: markup, inlined pictures, histograms drawn as SVG. What may not: finding things (`summary.py`).

Text of samples is not to be trusted: all of it is escaped, and the page's own policy allows neither scripts nor
anything from elsewhere.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from qwen3vl_bridge.data.inspection.summary import Inspection, Picture, Piece, SampleView
from qwen3vl_bridge.data.inspection.text_report import describe, headlines, shortened, summary, visible

from PIL import Image
from torch import Tensor

MOST_ERRORS = 100
_MOST_FRAMES = 16
_MOST_PNG_PIXELS = 2**16  # a larger picture takes far less room as JPEG
_BINS = 24
_WIDTH, _HEIGHT, _MARGIN = 480, 140, 24

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }}
section {{ border-top: 1px solid #ccc; margin-top: 2em }}
h2 {{ font-size: 1.1em; overflow-wrap: anywhere }}
th {{ text-align: left; padding-right: 1.5em }}
.text {{ font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }}
.text span:hover {{ outline: 1px solid #555 }}
.on {{ background: #b7e4c7 }}
.vision {{ color: #2a6f97 }}
.error {{ color: #b00020; white-space: pre-wrap; overflow-wrap: anywhere }}
figure {{ display: inline-block; margin: 0 1em 1em 0; vertical-align: top; max-width: 100% }}
figure img {{ display: block; max-width: 100%; image-rendering: pixelated }}
figcaption {{ font-size: 12px; color: #555 }}
svg {{ margin-right: 2em }}
svg rect {{ fill: #2a6f97 }}
svg text {{ font-size: 11px; fill: #555 }}
</style></head><body>
<h1>{title}</h1>
<p>Tokens <span class="on">marked like this</span> are trained on. Point at a token for its id.</p>
"""


def write_html(inspection: Inspection, path: Path, title: str) -> None:
    """Write the report beside its place, then move it there, so that no half of one is ever found.

    Args:
        inspection: what was found, with pictures.
        path: the file.
        title: of the page.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(html_parts(inspection, title))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def html_parts(inspection: Inspection, title: str) -> Iterator[str]:
    """The page, part by part."""
    yield _HEAD.format(title=_escaped(title))
    rows = (f"<tr><th>{name}</th><td>{_escaped(value)}</td></tr>\n" for name, value in summary(inspection).items())
    yield f"<table>\n{''.join(rows)}</table>\n"
    for _, message in inspection.errors[:MOST_ERRORS]:
        yield f'<p class="error">{_escaped(message)}</p>\n'
    if len(inspection.errors) > MOST_ERRORS:
        yield f'<p class="error">and {len(inspection.errors) - MOST_ERRORS} more</p>\n'
    yield _histogram("tokens of a sample", inspection.lengths)
    yield _histogram("% of real tokens in a row", [100 * fill for fill in inspection.row_fills])
    for view in inspection.samples:
        yield from _sample(view)
    yield "</body></html>\n"


def _escaped(text: str) -> str:
    return escape(visible(text))


def _sample(view: SampleView) -> Iterator[str]:
    yield f"<section><h2>{_escaped(view.sample_id)}</h2>\n<p>{_escaped(next(iter(headlines(view))))}</p>\n"
    for number, picture in enumerate(view.pictures, start=1):
        yield from _picture(picture, number)
    yield '<div class="text">'
    for piece in view.pieces:
        yield _piece(piece)
    yield "</div></section>\n"


def _piece(piece: Piece) -> str:
    kinds = [name for name, holds in (("on", piece.trained), ("vision", piece.vision)) if holds]
    ids = f"{piece.ids[0]}, {len(piece.ids)} times" if piece.vision else " ".join(map(str, piece.ids))
    title = f"{ids}: {'trained on' if piece.trained else 'not trained on'}"
    text = _escaped(shortened(piece))
    # A line break alone would leave nothing to point at.
    text = text.replace("\n", "↵\n") if piece.text.isspace() else text
    return f'<span class="{" ".join(kinds)}" title="{title}">{text}</span>'


def _picture(picture: Picture, number: int) -> Iterator[str]:
    if picture.frames is None:
        return
    total = len(picture.frames)
    count = min(total, _MOST_FRAMES)
    for place in (i * total // count for i in range(count)):
        frame = f", frame {place + 1} of {total}" if picture.kind == "video" else ""
        caption = f"{picture.kind} {number}{frame}: {describe(picture)}"
        yield (
            f'<figure><img width="{picture.width}" alt="{caption}" src="{_inlined(picture.frames[place])}">'
            f"<figcaption>{caption}</figcaption></figure>\n"
        )


def _inlined(frame: Tensor) -> str:
    image, buffer = Image.fromarray(frame.numpy()), io.BytesIO()
    kind = "png" if image.width * image.height <= _MOST_PNG_PIXELS else "jpeg"
    image.save(buffer, format=kind, quality=90)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _histogram(title: str, values: Sequence[float]) -> str:
    """How many values lie in each of some equal ranges."""
    if not values:
        return ""
    low, high = min(values), max(values)
    step = (high - low) / _BINS or 1
    counts = [0] * _BINS
    for value in values:
        counts[min(int((value - low) / step), _BINS - 1)] += 1
    wide, tall = _WIDTH / _BINS, _HEIGHT - 2 * _MARGIN
    bars = "".join(
        f'<rect x="{place * wide:.1f}" y="{_HEIGHT - _MARGIN - tall * count / max(counts):.1f}" '
        f'width="{wide - 1:.1f}" height="{tall * count / max(counts):.1f}">'
        f"<title>{low + place * step:,.1f} to {low + (place + 1) * step:,.1f}: {count:,}</title></rect>"
        for place, count in enumerate(counts)
    )
    caption, end = f"{title}; the tallest bar is {max(counts):,}", low + _BINS * step
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}"><text x="0" y="14">{caption}</text>{bars}'
        f'<text x="0" y="{_HEIGHT - 8}">{low:,.0f}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 8}" text-anchor="end">{end:,.0f}</text></svg>\n'
    )
