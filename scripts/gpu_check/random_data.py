"""Random models, samples and conversations: of the 2B's size, or tiny for a rehearsal. Nothing is downloaded.

What lives here: making them. What may not: measuring. Batches and their form are those of `tests/parity/batches.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.models.qwen3_vl.presets import hf_config

import numpy as np
import torch
from PIL import Image

from examples.digits.checkpoint import make_config
from examples.digits.processor import CELL, make_processor
from tests.parity.batches import Sample

from .results import Place

_VOCABULARY = 512  # tokens of the processor, below those of either model
# Text tokens, and (rows, columns) of a picture's vision tokens, of each sample of a row: 8,168 tokens, unevenly long.
_FULL = (
    (1400, ((24, 32), (16, 20))),
    (1100, ((20, 28),)),
    (900, ((28, 28),)),
    (500, ((18, 24),)),
    (300, ((16, 16),)),
    (760, ()),
)
_TINY = ((40, ((3, 4), (2, 2))), (24, ((3, 3),)), (12, ()))


def model_config(place: Place) -> Any:
    """A configuration of transformers, of the 2B or tiny; with the token ids of the toy processor."""
    tiny = make_config(make_processor(_VOCABULARY).tokenizer)
    tiny.architectures = ["Qwen3VLForConditionalGeneration"]  # as a saved model's, which Megatron-Bridge goes by
    if place.size == "tiny":
        return tiny
    config = hf_config("2B")
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(tiny, name))
    return config


def dtype_of(place: Place) -> torch.dtype:
    """What large models are trained in there."""
    return torch.bfloat16 if place.device == "cuda" else torch.float32


def make_row(place: Place, config: Any, seed: int = 0) -> list[Sample]:
    """Samples that fill a row of 8K tokens when they are packed."""
    random = torch.Generator().manual_seed(seed)
    samples = []
    for text, pictures in _FULL if place.size == "full" else _TINY:
        ids = torch.randint(0, config.image_token_id - 16, (text,), generator=random).tolist()
        for rows, columns in pictures:
            ids[8:8] = [config.vision_start_token_id, *[config.image_token_id] * (rows * columns)]
            ids.insert(9 + rows * columns, config.vision_end_token_id)
        pixels = {}
        if pictures:
            grids = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in reversed(pictures)])
            pixels["pixel_values"] = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 16 * 16, generator=random)
            pixels["image_grid_thw"] = grids
        samples.append(Sample(torch.tensor(ids), torch.ones(len(ids)), pixels))
    return samples


def write_model_folder(place: Place, folder: Path) -> Path:
    """Configuration and processor, without weights."""
    processor = make_processor(_VOCABULARY)
    processor.image_processor.size = {"shortest_edge": CELL, "longest_edge": 1024 * CELL}
    model_config(place).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_conversations(place: Place, folder: Path, count: int) -> Path:
    """A folder with `train.jsonl` and random pictures, one or two to a conversation, as many as asked for."""
    random, lines = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    low, high, words = (384, 896, 300) if place.size == "full" else (64, 129, 6)
    for number in range(count):
        content = []
        for place_in_text in range(int(random.integers(1, 3))):
            name = f"{number}-{place_in_text}.png"
            coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)  # which a file of few bytes holds
            Image.fromarray(coarse).resize(tuple(random.integers(low, high, 2))).save(folder / name, compress_level=1)
            content.append({"type": "image", "image": name})
        asked, said = (
            " ".join(str(word) for word in random.integers(0, 1000, int(random.integers(2, words)))) for _ in range(2)
        )
        content.append({"type": "text", "text": asked})
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder
