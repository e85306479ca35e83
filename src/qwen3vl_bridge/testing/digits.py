"""Write scanned handwritten digits as a data set of conversations: images, `train.jsonl` and `test.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

QUESTION = "Which digit is this?"
SIDE = 64  # pixels: 4 x 4 patches, 4 vision tokens


class Dataset(NamedTuple):
    """Paths of the two JSON-lines files. Their image paths are relative to their folder."""

    train: Path
    test: Path


def conversation(image: str, answer: str) -> dict[str, list[dict]]:
    """Return a question about an image and its answer as chat messages."""
    question = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    }


def pair(image: str, answer: str, wrong: str) -> dict[str, list]:
    """Return a question about an image with its answer and a wrong one, as TRL's records of preference data."""
    question, right = conversation(image, answer)["messages"]
    return {"prompt": [question], "chosen": [right], "rejected": conversation(image, wrong)["messages"][1:]}


def _to_image(scan: np.ndarray) -> Image.Image:
    """Draw an 8 x 8 scan with values 0 to 16 as dark ink on white."""
    gray = Image.fromarray((255 - scan * 255 / 16).astype(np.uint8), mode="L")
    return gray.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def make_dataset(folder: str | Path, *, seed: int = 0, held_out: float = 0.2, pairs: bool = False) -> Dataset:
    """Write the digits as PNG files and two JSON-lines files of conversations.

    Args:
        folder: Where to write. It is created if necessary.
        seed: Seed of the split and of the order.
        held_out: Share of the images of each digit that goes to `test.jsonl`.
        pairs: Also write preference data to the folder `pairs`: each question with its answer and a wrong digit.
            `pairs/train.jsonl` has the questions of `train.jsonl`, and `pairs/valid.jsonl` those of `test.jsonl`. The
            media root of both is `folder`.

    Returns:
        The paths of `train.jsonl` and `test.jsonl`.
    """
    folder = Path(folder)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    names = [f"images/{number:04d}.png" for number in range(len(digits.target))]
    for name, scan in zip(names, digits.images, strict=True):
        _to_image(scan).save(folder / name)
    halves = train_test_split(
        np.arange(len(names)), test_size=held_out, stratify=digits.target, shuffle=True, random_state=seed
    )
    paths = Dataset(folder / "train.jsonl", folder / "test.jsonl")
    for path, half in zip(paths, halves, strict=True):
        lines = (json.dumps(conversation(names[i], str(digits.target[i]))) for i in half)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if pairs:
        (folder / "pairs").mkdir(exist_ok=True)
        wrong = (digits.target + np.random.default_rng(seed).integers(1, 10, len(names))) % 10
        for split, half in zip(("train", "valid"), halves, strict=True):
            records = (pair(names[i], str(digits.target[i]), str(wrong[i])) for i in half)
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / "pairs" / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return paths
