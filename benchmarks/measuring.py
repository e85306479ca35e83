"""Measure how many samples per second one process can measure, encode and collate: the host work of packing.

    OMP_NUM_THREADS=1 python -m benchmarks.measuring
    OMP_NUM_THREADS=1 python -m benchmarks.measuring --rounds 3 --samples 20 --csv /tmp/measuring.csv

One core, one process. Conversations are in a JSON-lines file with images of 224 to 384 pixels a side, and each sample
is read again each time. The tokenizer is a tiny byte-level BPE, which makes about twice as many tokens of a text as
Qwen's.

- measure: `Samples.size`: read and check a record, read image headers, apply the chat template, tokenize. "wrapper"
  calls transformers' tokenizer, "backend" the wrapped tokenizer, with the same ids (`tests/data/test_tokenization.py`).
- encode: tokens, positions of answers, pixels.
- collate: `Collator.collate_packed` of the encoded samples, in rows of 4,096 tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.data import encoding
from qwen3vl_bridge.data.collation import Collator, pad_token_id
from qwen3vl_bridge.data.encoding import Encoder
from qwen3vl_bridge.data.packing import best_fit
from qwen3vl_bridge.data.samples import SampleFilter, Samples
from qwen3vl_bridge.data.sources import JsonLines
from qwen3vl_bridge.testing.tiny_processor import make_processor

import numpy as np
import torch
from PIL import Image

from benchmarks import measurement

_WORDS = ("which", "digit", "is", "this", "the", "picture", "seven", "quick", "brown", "fox", "describe", "same", "9.5")
_ROW, _SIDES = 4096, (224, 384)
# Kind of conversation -> number of turns, words of a message, number of images, image format.
KINDS = {
    "text": (3, 120, 0, ""),
    "one picture": (1, 60, 1, "jpg"),
    "one picture, PNG": (1, 60, 1, "png"),
    "three pictures": (2, 100, 3, "jpg"),
}


def write_samples(folder: Path, kind: str, count: int) -> Path:
    """Write `count` conversations of the given kind to a JSON-lines file, and return its path."""
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
    """Tokenize with transformers' wrapper around the tokenizer, inside the `with` block."""
    backend = encoding.tokenize
    encoding.tokenize = lambda tokenizer, text, begins=True, offsets=False: tokenizer(
        text, add_special_tokens=begins, return_offsets_mapping=True
    ).encodings[0]
    try:
        yield
    finally:
        encoding.tokenize = backend


def subjects(path: Path) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield (name of a measurement, functions to time by name) for a file of conversations."""
    processor, source = make_processor(512), JsonLines(path)
    encoder = Encoder(processor)
    conversations = [source[number] for number in range(len(source))]

    def sizes() -> None:
        samples = Samples(source, SampleFilter(encoder, limit=_ROW))
        for number in range(len(source)):
            samples.size(number)

    def sizes_by_wrapper() -> None:
        with wrapped():
            sizes()

    yield "measure", {"wrapper": sizes_by_wrapper, "backend": sizes}
    yield "encode", {"backend": lambda: [encoder(one, _ROW) for one in conversations]}
    encoded = [encoder(one, _ROW) for one in conversations]
    vision = VisionSettings(processor.image_token_id, processor.video_token_id, 2, 48**2)
    collator = Collator(vision, pad_token_id(processor.tokenizer), _ROW, pixel_dtype=torch.bfloat16)
    rows = best_fit([len(sample) for sample in encoded], _ROW)
    yield "collate", {"now": lambda: [collator.collate_packed([encoded[number] for number in row]) for row in rows]}


def main() -> None:
    """Measure all kinds of conversations, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "measuring.csv", rounds=9)
    parser.add_argument("--samples", type=int, default=100, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            for subject, ways in subjects(write_samples(Path(folder), kind, options.samples)):
                seconds = measurement.median_seconds(ways, options.rounds)
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
                            "load": measurement.load(),
                        }
                    )
    measurement.append(options.csv, rows)


if __name__ == "__main__":
    main()
