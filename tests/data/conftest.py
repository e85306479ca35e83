"""A real processor of toy size, and files of conversations with pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from qwen3vl_bridge.data import (
    Collator,
    ConversationFile,
    Encoder,
    RowDataset,
    RowSettings,
    Samples,
    VisionSettings,
    pad_token_id,
)

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def processor():
    from examples.digits.processor import make_processor

    return make_processor(512)


@pytest.fixture(scope="session")
def encoder(processor) -> Encoder:
    return Encoder(processor)


@pytest.fixture(scope="session")
def collator(processor) -> Collator:
    vision = VisionSettings(processor.image_token_id, processor.video_token_id, 2, 36)
    return Collator(vision, pad_token_id(processor.tokenizer), seq_length=256)


def picture(path: Path, height: int, width: int, seed: int = 0) -> Path:
    """A file of coloured noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def random_record(folder: Path, number: int, random: np.random.Generator) -> dict:
    """A conversation of one or two turns, with up to two pictures of different sizes."""
    messages = []
    for turn in range(random.integers(1, 3)):
        parts = []
        for i in range(random.integers(0, 3)):
            height, width = random.choice([32, 64, 96], 2)
            name = f"images/{number}-{turn}-{i}.png"
            picture(folder / name, height, width, seed=number)
            parts.append({"type": "image", "image": name})
        words = " ".join(random.choice(["digit", "seven", "what", "fox", "is"], random.integers(1, 12)))
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": words}]})
        messages.append({"role": "assistant", "content": f"{number} " * random.integers(1, 6)})
    return {"messages": messages}


def write(path: Path, records: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def train_file(tmp_path_factory) -> Path:
    """40 random conversations."""
    folder, random = tmp_path_factory.mktemp("conversations"), np.random.default_rng(0)
    return write(folder / "train.jsonl", [random_record(folder, number, random) for number in range(40)])


@pytest.fixture
def read(tmp_path) -> Callable:
    """Reads one record, or a list of messages, back from a file."""

    def read(record):
        record = {"messages": record} if isinstance(record, list) else record
        return ConversationFile(write(tmp_path / "train.jsonl", [record]))[0]

    return read


@pytest.fixture
def make_rows(train_file, encoder, collator) -> Callable[..., Callable]:
    """Makes functions that make rows of 256 tokens, as streams take them."""

    def make(path=train_file, on_long="error", seq_length=256, multiple=1, **settings) -> Callable:
        settings = {"seed": 0, "window_size": 8, **settings}

        def rows(begin=None) -> RowDataset:
            samples = Samples(ConversationFile(path), encoder, limit=seq_length, on_long=on_long)
            lay_out = replace(collator, seq_length=seq_length, multiple=multiple)
            return RowDataset(samples, RowSettings(lay_out, **settings), begin=begin)

        return rows

    return make
