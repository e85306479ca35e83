"""A tiny model and data of which two pictures, of 24 and 4 tokens, make the largest row; others have more tokens."""

import json
from pathlib import Path

from PIL import Image

from examples.digits.checkpoint import make_checkpoint


def make_rows(folder: Path) -> None:
    make_checkpoint(folder / "model")
    for name, size in {"small": (64, 64), "large": (192, 128)}.items():
        Image.new("RGB", size).save(folder / f"{name}.png")
    pictures = [], ["small"], ["large", "small"], ["small"] * 3, ["small"] * 2
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(asked_about(names))}\n" for names in pictures))


def asked_about(names: list[str]) -> dict:
    question = [*({"type": "image", "image": f"{name}.png"} for name in names), {"type": "text", "text": "Well?" * 4}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes"}]}
