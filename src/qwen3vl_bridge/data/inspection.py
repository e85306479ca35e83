"""Inspect a file of conversations: show samples as tokens and images, and report lengths, row fill and errors.

The report is text for a terminal, JSON, or one HTML file that needs no network. Text of samples is not trusted: control
characters are escaped, and the page allows neither scripts nor external resources.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from qwen3vl_bridge.core.atomic import replace_file
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError, group_errors, name_records
from qwen3vl_bridge.data.media import FrameList, load_image
from qwen3vl_bridge.data.packing import NumberedOrder, RowPlan, Size
from qwen3vl_bridge.data.samples import ON_BAD_ADVICE, Samples
from qwen3vl_bridge.terminal import visible

import torch
from PIL import Image
from rich.console import Console
from rich.text import Text
from torch import Tensor

# A longer run of tokens without the end of a character is decoded once: decoding it again with each token would take
# quadratic time.
_MOST_HELD = 64
_MOST_ERRORS, _MOST_PAGE_ERRORS = 10, 100
_TRAINED, _VISION, _TITLE, _ERROR = "bold green", "dim cyan", "bold", "red"
_MOST_FRAMES = 16
_MOST_PNG_PIXELS = 2**16  # larger images take far less space as JPEG
_MOST_OPEN = 1500  # maximum number of pieces of a sample that is shown unfolded
_MOST_BINS = 24  # of a histogram


@dataclass(frozen=True)
class Piece:
    """The fewest consecutive tokens that decode to full characters (usually one), or a run of equal vision tokens."""

    ids: tuple[int, ...]
    text: str
    trained: bool
    vision: bool = False


@dataclass(frozen=True)
class VisionView:
    """One image or video as the processor returned it: its size, number of tokens, and optionally pixels."""

    kind: str  # "image" or "video"
    grid: tuple[int, int, int]  # patches in time, height and width
    height: int  # pixels, after resizing
    width: int
    num_tokens: int
    frames: Tensor | None  # [frames, height, width, channels] uint8, if images were requested


@dataclass(frozen=True)
class SampleView:
    """One sample as a report shows it: its tokens with their text, and its images and videos."""

    sample_id: str
    pieces: tuple[Piece, ...]
    media: tuple[VisionView, ...]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the sample."""
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def num_trained(self) -> int:
        """Return the number of tokens of the sample that are trained on."""
        return sum(len(piece.ids) for piece in self.pieces if piece.trained)


@dataclass(frozen=True)
class Inspection:
    """Statistics of a file of conversations, and views of some of its samples."""

    num_samples: int  # in the file
    seq_length: int
    pack: bool
    samples: tuple[SampleView, ...]
    lengths: tuple[int, ...]  # tokens of each sample that was measured
    too_long: tuple[str, ...]  # measured samples that are longer than a row
    empty_answers: tuple[str, ...]  # measured samples with an empty answer that is trained on
    row_fills: tuple[float, ...]  # fraction of real tokens in each row, without samples that are too long
    errors: tuple[tuple[str, str, str], ...]  # sample, message, and problem, in the order of the file
    records_shown: int | None = None  # if records have several documents: `samples` are documents of these records

    @property
    def trained_share(self) -> float:
        """Return the fraction of tokens that are trained on, over the samples shown."""
        return sum(view.num_trained for view in self.samples) / max(sum(view.num_tokens for view in self.samples), 1)

    @property
    def fill(self) -> float:
        """Return the fraction of tokens that are not padding, over all rows."""
        return sum(self.row_fills) / max(len(self.row_fills), 1)


def inspect_samples(
    samples: Samples,
    processor: Any,
    *,
    seq_length: int = 4096,
    show: int = 2,  # samples to show, from number `start` on, or a random choice with `seed`
    start: int = 0,
    seed: int | None = None,
    lengths: int = 2000,  # samples to measure, spread over the file; 0 for only those shown
    pack: bool = True,
    images: bool = False,  # keep images to show
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,  # wraps numbers of samples
) -> Inspection:
    """Encode `show` samples for a report, and measure the lengths of `lengths` samples, spread over the data set.

    The encoded samples begin at index `start`, or are chosen at random if `seed` is set. Raise DataError if `start` is
    too large. `samples.sample_filter` must not have a length limit, because long samples are counted here.
    """
    assert samples.total is not None  # streams are not inspected
    total, errors = samples.total, dict[int, tuple[str, str]]()
    if seed is not None:
        shown = sorted(random.Random(seed).sample(range(total), min(show, total)))
    elif start < total:
        shown = list(range(start, min(start + show, total)))
    else:
        raise DataError(f"start is {start}, expected less than {total}, the number of samples")
    count = min(lengths, total)  # spread over the file, because many files are sorted by length or kind
    measured = [place * total // count for place in range(count)] or shown

    def sound[T](indices: Sequence[int], work: Callable[[int], T]) -> Iterator[T]:
        """Yield the result of `work` for each sample that raises no DataError; collect the errors of the others."""
        for index in progress(indices):
            try:
                result = work(index)
            except DataError as error:
                errors.setdefault(index, (str(error).removesuffix(ON_BAD_ADVICE), error.problem))
            except Exception as error:  # a bug in this package, which is hard to find without the sample
                error.add_note(f"while looking at sample {index}, counted from 0")
                raise
            else:
                yield result

    def measure(index: int) -> tuple[str, int, bool]:
        sample_filter, name = samples.sample_filter, samples.source.sample_id(index)
        one = sample_filter.measure(lambda: samples.source[index], name)
        assert one is not None  # a filter that drops samples would hide errors
        for document in one.conversation.documents:
            frames = (video.frames for video in document.videos if isinstance(video, FrameList))
            for image in chain(document.images, *frames):
                load_image(image, name)  # measuring reads only headers, and a file may be truncated
        return name, one.size.tokens, any(map(sample_filter.encoder.has_empty_answer, one.conversation.documents))

    def view(index: int) -> list[SampleView]:
        return [view_sample(one, processor, images=images) for one in samples.encode(index).documents]

    views = list(sound(shown, view))
    found = tuple(sound(measured, measure))
    lengths_found = tuple(length for _, length, _ in found)
    row_fills: list[float] = []
    if kept := [length for length in lengths_found if length <= seq_length]:
        # Fill of the rows of an epoch in a random order, as in training.
        order = NumberedOrder(len(kept), seed=0)
        plan = RowPlan(lambda sample: Size(kept[sample], 0, 0), order, capacity=seq_length, pack=pack)
        rows = map(plan.row, range(plan.end_of_epoch()))
        row_fills = [sum(kept[sample] for sample in row) / seq_length for row in rows]
    return Inspection(
        num_samples=total,
        seq_length=seq_length,
        pack=pack,
        samples=tuple(chain(*views)),
        records_shown=len(views) if any(len(documents) > 1 for documents in views) else None,
        lengths=lengths_found,
        too_long=tuple(name for name, length, _ in found if length > seq_length),
        empty_answers=tuple(name for name, _, is_empty in found if is_empty),
        row_fills=tuple(row_fills),
        errors=tuple((samples.source.sample_id(index), *errors[index]) for index in sorted(errors)),
    )


def view_sample(sample: EncodedSample, processor: Any, *, images: bool = False) -> SampleView:
    """Return an encoded sample for a report, with its images if `images` is set.

    `processor` is the processor that encoded the sample.
    """
    vision = (processor.image_token_id, processor.video_token_id)
    # The mask at a position is for its label, the next token. The first token has no position before it.
    trained = [False, *sample.loss_mask[:-1].bool().tolist()]
    return SampleView(
        sample_id=sample.sample_id,
        pieces=tuple(_split_pieces(sample.input_ids.tolist(), trained, processor.tokenizer, vision)),
        media=(
            *_vision_views("image", sample.image_grid_thw, sample.pixel_values, processor.image_processor, images),
            *_vision_views(
                "video", sample.video_grid_thw, sample.pixel_values_videos, processor.video_processor, images
            ),
        ),
    )


def _split_pieces(ids: list[int], trained: list[bool], tokenizer: Any, vision: tuple[int, ...]) -> Iterator[Piece]:
    """Yield the pieces of a sample: runs of equal vision tokens, and the fewest tokens that form full characters."""

    def decoded(run: list[int]) -> str:
        return tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def kind(token: tuple[int, bool]) -> tuple[bool, int | None]:
        return token[1], token[0] if token[0] in vision else None

    for (is_trained, pad), tokens in groupby(zip(ids, trained, strict=True), key=kind):
        run = [number for number, _ in tokens]
        if pad is not None:
            yield Piece(tuple(run), decoded([pad]), is_trained, vision=True)
            continue
        held: list[int] = []
        for number in run:
            held.append(number)
            if len(held) <= _MOST_HELD and not (text := decoded(held)).endswith("\N{REPLACEMENT CHARACTER}"):
                yield Piece(tuple(held), text, is_trained)
                held = []
        if held:
            yield Piece(tuple(held), decoded(held), is_trained)


def _vision_views(
    kind: str, grids: Tensor | None, pixels: Tensor | None, processor: Any, keep: bool
) -> Iterator[VisionView]:
    if grids is None or pixels is None:
        return
    for (time, height, width), patches in zip(grids.tolist(), pixels.split(grids.prod(-1).tolist()), strict=True):
        frames = _unpatch(patches, (time, height, width), processor) if keep else None
        yield VisionView(
            kind=kind,
            grid=(time, height, width),
            height=height * processor.patch_size,
            width=width * processor.patch_size,
            num_tokens=time * height * width // processor.merge_size**2,
            # The other frames of an image are equal.
            frames=frames[:1] if frames is not None and kind == "image" else frames,
        )


def _unpatch(patches: Tensor, grid: tuple[int, int, int], processor: Any) -> Tensor:
    """Return the resized frames that a processor divided into patches: [frames, height, width, channels] uint8.

    `patches` are [patches, channels * temporal_patch * patch * patch] with the patches of a token next to each other,
    and `grid` their numbers in time, height and width. An image has as many equal frames as the temporal patch size.
    """
    time, height, width = grid
    merge, patch, temporal = processor.merge_size, processor.patch_size, processor.temporal_patch_size
    blocks = patches.reshape(time, height // merge, width // merge, merge, merge, -1, temporal, patch, patch)
    frames = blocks.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(time * temporal, height * patch, width * patch, -1)
    values = frames.float()
    if processor.do_normalize:
        values = values * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    if processor.do_rescale:
        values = values / processor.rescale_factor
    return values.round().clamp(0, 255).to(torch.uint8)


def print_text(inspection: Inspection) -> None:
    """Print an inspection, with trained tokens in color on a terminal, and in [[ ]] elsewhere."""
    console = Console()
    if console.is_terminal and not console.no_color:
        console.print(as_text(inspection), soft_wrap=True, highlight=False)
    else:
        sys.stdout.write(as_text(inspection, brackets=True).plain)


def as_text(inspection: Inspection, *, brackets: bool = False) -> Text:
    """Return the report as text, with trained tokens in color. If `brackets` is True, they are also put in [[ ]]."""
    text = Text()
    for view in inspection.samples:
        text.append(f"{visible(view.sample_id)}\n", _TITLE)
        lines = [_headline(view), *(_caption(number, medium) for number, medium in enumerate(view.media, start=1))]
        text.append("".join(f"  {line}\n" for line in lines))
        for (trained, vision), pieces in groupby(view.pieces, key=lambda piece: (piece.trained, piece.vision)):
            words = "".join(map(_piece_text, pieces))
            style = _TRAINED if trained else _VISION if vision else ""
            text.append(f"[[{words}]]" if brackets and trained else words, style)
        text.append("\n\n")
    for name, value in _summary(inspection).items():
        text.append(f"{name:15}", _TITLE).append(f"{value}\n")
    for message in group_errors(inspection.errors, _MOST_ERRORS):
        text.append(f"  {message}\n", _ERROR)
    return text


def _piece_text(piece: Piece) -> str:
    """Return the text of a piece, with control characters escaped. Write n equal vision tokens as "<token> x n"."""
    text = visible(piece.text)
    return f"{text} x {len(piece.ids)}" if piece.vision and len(piece.ids) > 1 else text


def _headline(view: SampleView) -> str:
    share = view.num_trained / max(view.num_tokens, 1)
    nothing = "" if view.num_trained else ": nothing to train on"
    return f"{view.num_tokens:,} tokens, {view.num_trained:,} trained on ({share:.1%}){nothing}"


def _caption(number: int, medium: VisionView) -> str:
    """Return the size, the number of tokens and the patch grid of an image or video, as text."""
    grid = " x ".join(map(str, medium.grid))
    size = f"{medium.width} x {medium.height} pixels (width x height)"
    tokens = f"{medium.num_tokens:,} tokens, grid {grid} (time x height x width)"
    return f"{medium.kind} {number}: {size}, {tokens}"


def _summary(inspection: Inspection) -> dict[str, str]:
    """Return the statistics of an inspection as text, by the label of each line."""
    lengths, fills, spread = inspection.lengths, inspection.row_fills, _length_summary(inspection.lengths)
    grouped = inspection.records_shown is not None
    shown = inspection.records_shown if grouped else len(inspection.samples)
    total, rows = inspection.num_samples, len(fills)
    kind = "packed" if inspection.pack else "padded, one sample each"
    long, empty = inspection.too_long, inspection.empty_answers
    is_complete = len(lengths) + len(inspection.errors) >= total
    found = {
        "records" if grouped else "samples": f"{total:,}: {shown:,} shown, {len(lengths):,} measured",
        "tokens": "min {min:,}, median {median:,g}, mean {mean:,.1f}, max {max:,}".format(**spread)
        if spread
        else "none measured",
        "trained on": f"{inspection.trained_share:.1%} of the tokens of the samples shown",
        "too long": f"{len(long):,} of {len(lengths):,} for a row of {inspection.seq_length:,} tokens (--seq-length)"
        + (f": {name_records(long)}" if long else ""),
        "empty answers": f"{len(empty):,} ({name_records(empty)})" if empty else "",
        "rows": f"{rows:,} of the samples measured, {kind}: {inspection.fill:.1%} real tokens" if rows else "none",
        "errors": f"{len(inspection.errors):,}" + ("" if is_complete else f" (--lengths {total} looks at all samples)"),
    }
    return {name: value for name, value in found.items() if value}


def _length_summary(lengths: Sequence[int]) -> dict[str, float] | None:
    if not lengths:
        return None
    return {"min": min(lengths), "median": median(lengths), "mean": mean(lengths), "max": max(lengths)}


def as_json(inspection: Inspection) -> str:
    """Return an inspection as one JSON object, without pixels."""

    def piece_of(piece: Piece) -> dict[str, Any]:
        common = {"text": piece.text, "trained": piece.trained}
        return common | ({"id": piece.ids[0], "count": len(piece.ids)} if piece.vision else {"ids": list(piece.ids)})

    found = vars(inspection) | {
        "trained_share": inspection.trained_share,
        "length": _length_summary(inspection.lengths),
        "num_too_long": len(inspection.too_long),
        "num_rows": len(inspection.row_fills),
        "fill": inspection.fill,
        "num_errors": len(inspection.errors),
        "errors": [{"sample_id": sample_id, "message": message} for sample_id, message, _ in inspection.errors],
        "samples": [
            {
                "sample_id": view.sample_id,
                "num_tokens": view.num_tokens,
                "num_trained": view.num_trained,
                "media": [{k: v for k, v in vars(one).items() if k != "frames"} for one in view.media],
                "pieces": [piece_of(piece) for piece in view.pieces],
            }
            for view in inspection.samples
        ],
    }
    return json.dumps(found, indent=2)


# The colors are translucent, for light and dark pages.
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em;
  overflow-wrap: anywhere }}
h1, h2 {{ font-size: 1.2em }}
section {{ border-top: 1px solid; margin-top: 2em }}
th {{ text-align: left; vertical-align: top; padding-right: 1.5em; white-space: nowrap }}
.text {{ font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap }}
.text span:hover {{ outline: 1px solid }}
.on {{ background: #2a84 }}
.vision {{ background: #28c3 }}
.error {{ background: #c223; white-space: pre-wrap }}
.bar {{ background: #28c9; height: 1em }}
summary {{ cursor: pointer }}
figure {{ margin: 0 0 1em }}
figure div {{ display: flex; align-items: start; gap: 6px; overflow-x: auto }}
img {{ flex: none; max-width: 100%; height: auto; image-rendering: pixelated }}
</style></head><body>
<h1>{title}</h1>
<p>Tokens <span class="on">marked like this</span> are trained on. Point at a token for its id.</p>
"""


def write_html(inspection: Inspection, path: Path, title: str, model: str | None = None) -> None:
    """Write the HTML report of an inspection atomically. Its title names the data (`title`) and the model."""
    replace_file(path, "".join(html_parts(inspection, title, model)).encode("utf-8", "backslashreplace"))


def html_parts(inspection: Inspection, title: str, model: str | None = None) -> Iterator[str]:
    """Yield the HTML report of an inspection in parts. Its title names the data (`title`) and the model."""
    of_model = f" for {model}" if model else ""
    yield _PAGE.format(title=_escaped(f"{title}{of_model}, rows of {inspection.seq_length:,} tokens"))
    rows = (f"<tr><th>{name}</th><td>{_escaped(value)}</td></tr>\n" for name, value in _summary(inspection).items())
    yield f"<table>\n{''.join(rows)}</table>\n"
    yield from (f'<p class="error">{escape(line)}</p>\n' for line in group_errors(inspection.errors, _MOST_PAGE_ERRORS))
    yield _histogram("tokens of a sample", "samples", inspection.lengths)
    yield _histogram("% of a row that is real tokens", "rows", [int(100 * fill) for fill in inspection.row_fills])
    for view in inspection.samples:
        yield f"<section><h2>{_escaped(view.sample_id)}</h2>\n<p>{_headline(view)}</p>\n"
        if view.num_tokens > (row := inspection.seq_length):
            yield f'<p class="error">does not fit into a row: {view.num_tokens:,} tokens, and a row has {row:,}</p>\n'
        for number, medium in enumerate(view.media, start=1):
            caption, frames = _caption(number, medium), () if medium.frames is None else medium.frames
            step = -(-len(frames) // _MOST_FRAMES) or 1  # show only some frames of a long video
            tags = (f'<img width="{medium.width}" alt="" src="{_data_url(frame)}">' for frame in frames[::step])
            yield f"<figure><div>{''.join(tags)}</div><figcaption>{caption}</figcaption></figure>\n"
        is_open = " open" if len(view.pieces) <= _MOST_OPEN else ""
        yield f'<details{is_open}><summary>{view.num_tokens:,} tokens</summary><div class="text">'
        yield from map(_html_span, view.pieces)
        yield "</div></details></section>\n"
    yield "</body></html>\n"


def _escaped(text: str) -> str:
    return escape(visible(text))


def _html_span(piece: Piece) -> str:
    kinds = [name for name, holds in (("on", piece.trained), ("vision", piece.vision)) if holds]
    ids = f"{piece.ids[0]}, {len(piece.ids)} times" if piece.vision else " ".join(map(str, piece.ids))
    title = f"{ids}: {'trained on' if piece.trained else 'not trained on'}"
    text = escape(_piece_text(piece))
    # A line break alone would have nothing to point at.
    text = text.replace("\n", "↵\n") if piece.text.isspace() else text
    return f'<span class="{" ".join(kinds)}" title="{title}">{text}</span>'


def _data_url(frame: Tensor) -> str:
    image, buffer = Image.fromarray(frame.numpy()), io.BytesIO()
    kind = "png" if image.width * image.height <= _MOST_PNG_PIXELS else "jpeg"
    image.save(buffer, format=kind, quality=90)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _histogram(of: str, counted: str, values: Sequence[int]) -> str:
    """Return an HTML table with bars: the number of values in each of several ranges of equal width.

    `of` and `counted` are the column headings: the quantity that is measured, and the things that are counted.
    """
    if not values:
        return ""
    low, high, bins = min(values), max(values), min(_MOST_BINS, len(set(values)))
    step = -(-(high - low + 1) // bins)
    counts = Counter((value - low) // step for value in values)
    most = max(counts.values())

    def range_of(place: int) -> str:
        first = low + place * step
        last = min(first + step - 1, high)
        return f"{first:,}" if first == last else f"{first:,} to {last:,}"

    rows = (
        f"<tr><td>{range_of(place)}</td><td>{counts[place]:,}</td>"
        f'<td><div class="bar" style="width: {30 * counts[place] / most:.1f}vw"></div></td></tr>\n'
        for place in range(max(counts) + 1)
    )
    return f"<table><tr><th>{of}</th><th>{counted}</th></tr>\n{''.join(rows)}</table>\n"
