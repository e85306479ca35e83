"""How many samples a second one process measures and collates: what packing while reading asks of a run's hosts.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/measuring.py
    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/measuring.py --rounds 3 --samples 20 --csv /tmp/measuring.csv

One core, this process alone. Conversations lie in a file of JSON lines, pictures beside it, of 224 to 384 pixels a
side, and every sample is read anew each time. The tokenizer is trained on the spot: a byte-level BPE as Qwen's models
have, of toy size, so that it makes about twice as many tokens of a text.

- tokenise: a rendered conversation to ids, as measuring needs them. "wrapper" calls transformers' tokenizer, "backend"
  the tokenizer it wraps, which gives the same ids (`tests/data/processing/test_tokenizer.py`).
- sizes of pictures: `image_size` of each. "decoded" lets Pillow decode a PNG to know how it is held, "header" reads
  what its chunks are (`tests/data/media/test_media.py`); JPEG is the same by both.
- measure: `Samples.size`: read, check, pictures' headers, chat template, tokens. Both ways of tokenising; "decoded" is
  the backend's with PNG decoded.
- encode: what a row's samples take besides: tokens, where answers are, pixels.
- collate: `Collator.packed` of the encoded samples, in rows of 4,096 tokens. "before" as `collating_before.py` has it,
  "now" as it is; both make the same batches, which is checked before they are measured.

Rounds take every way in turn, so that a busy machine slows all of them; the median of each is kept, the ratio to the
first way, and the machine's load, beyond whose number of cores samples a second are too few and ratios alone say
something.

What lives here: the measurement. What may not: code that training needs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data import encoding
from qwen3vl_bridge.data.collation import Collator, VisionSettings, pad_token_id
from qwen3vl_bridge.data.encoding import Encoder
from qwen3vl_bridge.data.media import images
from qwen3vl_bridge.data.packing.row_plan import best_fit
from qwen3vl_bridge.data.samples import SampleFilter, Samples
from qwen3vl_bridge.data.sources.opening import JsonLines

import numpy as np
import record
import torch
from collating_before import as_before
from PIL import Image

from examples.digits.processor import make_processor

_RESULTS = record.RESULTS / "measuring.csv"
_WORDS = ("which", "digit", "is", "this", "the", "picture", "seven", "quick", "brown", "fox", "describe", "same", "9.5")
_ROW, _SIDES = 4096, (224, 384)
# Turns of each kind of conversation, words of a message, pictures and their format.
KINDS = {
    "text": (3, 120, 0, ""),
    "one picture": (1, 60, 1, "jpg"),
    "one picture, PNG": (1, 60, 1, "png"),
    "three pictures": (2, 100, 3, "jpg"),
}


def write_samples(folder: Path, kind: str, count: int) -> Path:
    """A file of conversations of a kind."""
    turns, words, pictures, ending = KINDS[kind]
    random, lines = np.random.default_rng(0), []
    for number in range(count):
        parts = []
        for place in range(pictures):
            noise = random.integers(0, 256, (*random.integers(*_SIDES, 2), 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"{kind}-{number}-{place}.{ending}")
            parts.append({"type": "image", "image": f"{kind}-{number}-{place}.{ending}"})
        messages = []
        for turn in range(turns):
            asked, said = (" ".join(random.choice(_WORDS, random.integers(words // 2, words * 2))) for _ in range(2))
            content = [*(parts if turn == 0 else []), {"type": "text", "text": asked}]
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": messages}))
    path = folder / f"{kind}.jsonl"
    path.write_text("\n".join(lines))
    return path


@contextmanager
def wrapped() -> Iterator[None]:
    """With transformers' wrapper around the tokenizer."""
    backend = encoding._backend_of
    encoding._backend_of = lambda _: None
    try:
        yield
    finally:
        encoding._backend_of = backend


@contextmanager
def decoded() -> Iterator[None]:
    """With Pillow's own reading of EXIF."""
    exif = images._exif
    images._exif = lambda opened: opened.getexif()
    try:
        yield
    finally:
        images._exif = exif


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each way, in rounds that take every way in turn, after one that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if number:
                taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in taken.items()}


def by_both(work: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """The same work by the wrapper and by the backend."""
    return {"wrapper": within(wrapped, work), "backend": work}


def within(context: Callable[[], AbstractContextManager[None]], work: Callable[[], object]) -> Callable[[], None]:
    """Work that is done in a context."""

    def do() -> None:
        with context():
            work()

    return do


def subjects(path: Path) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """What is measured of a file, and the ways to do it."""
    processor, source = make_processor(512), JsonLines(path)
    encoder = Encoder(processor)
    conversations = [source[number] for number in range(len(source))]
    texts = [encoder.template.render(one, one.messages) for one in conversations]
    numbers = range(len(source))

    def sizes() -> list:
        samples = Samples(source, SampleFilter(encoder, limit=_ROW))
        return [samples.size(number) for number in numbers]

    def tokens() -> None:
        for text in texts:
            encoding.ids_of(processor.tokenizer, text)

    def pictures() -> None:
        for one in conversations:
            for picture in one.images:
                images.image_size(picture, one.sample_id)

    has_pictures = bool(conversations[0].images)
    yield "tokenise", by_both(tokens)
    if has_pictures:
        yield "sizes of pictures", {"decoded": within(decoded, pictures), "header": pictures}
    yield "measure", by_both(sizes) | ({"decoded": within(decoded, sizes)} if has_pictures else {})
    yield "encode", by_both(lambda: [encoder(one, _ROW) for one in conversations])
    encoded = [encoder(one, _ROW) for one in conversations]
    vision = VisionSettings(processor.image_token_id, processor.video_token_id, 2, 48**2)
    collator = Collator(vision, pad_token_id(processor.tokenizer), _ROW, pixel_dtype=torch.bfloat16)
    rows = best_fit([len(sample) for sample in encoded], _ROW)

    def batch(row: Sequence[int]) -> PackedBatch:
        return collator.packed([encoded[number] for number in row])

    def collate() -> None:
        for row in rows:
            batch(row)

    for row in rows:
        with as_before():
            before = batch(row)
        if not same(before, batch(row)):
            raise AssertionError("collating before and now give different batches")
    yield "collate", {"before": within(as_before, collate), "now": collate}


def same(first: PackedBatch, second: PackedBatch) -> bool:
    """Whether two batches have the same positions, pixels and indices, to the bit."""
    if not torch.equal(first.position_ids, second.position_ids) or (first.vision is None) != (second.vision is None):
        return False
    if first.vision is None or second.vision is None:
        return True
    pairs = [(getattr(first.vision, one.name), getattr(second.vision, one.name)) for one in fields(first.vision)]
    return all(torch.equal(*pair) for pair in pairs if isinstance(pair[0], torch.Tensor))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--csv", type=Path, default=_RESULTS, help="file to append to (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            for subject, ways in subjects(write_samples(Path(folder), kind, options.samples)):
                seconds = measure(ways, options.rounds)
                for way, took in seconds.items():
                    first = next(iter(seconds.values()))
                    ratio, pace = f"{first / took:.2f}", f"{options.samples / took:.0f}"
                    print(f"{kind:16} {subject:17} {way:8} {pace:>8} samples/s  {ratio} x the first")
                    rows.append(
                        {
                            "kind": kind,
                            "samples": options.samples,
                            "rounds": options.rounds,
                            "subject": subject,
                            "way": way,
                            "samples/s": pace,
                            "of the first way": ratio,
                            "load": f"{os.getloadavg()[0]:.1f}",
                        }
                    )
    record.append(options.csv, rows)


if __name__ == "__main__":
    main()
