"""Create a tiny model and data; the row with most patches has two images, of 24 and 4 tokens."""

import json
from pathlib import Path

from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint

from PIL import Image


def make_rows(folder: Path) -> None:
    make_checkpoint(folder / "model")
    for name, size in {"small": (64, 64), "large": (192, 128)}.items():
        Image.new("RGB", size).save(folder / f"{name}.png")
    images = [], ["small"], ["large", "small"], ["small"] * 3, ["small"] * 2
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(conversation(names))}\n" for names in images))


def conversation(names: list[str]) -> dict:
    question = [*({"type": "image", "image": f"{name}.png"} for name in names), {"type": "text", "text": "Well?" * 4}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes"}]}
