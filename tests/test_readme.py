"""The README's commands run as they stand, on a tiny checkpoint."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def block(heading: str, language: str) -> str:
    """The first code block of a language under a heading."""
    section = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)[1]


def run(command: str) -> None:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def places(tmp_path_factory, untied_folder) -> dict[str, str]:
    from examples.digits.dataset import make_dataset

    folder = tmp_path_factory.mktemp("readme")
    make_dataset(folder / "data")
    names = {"HF_FOLDER": untied_folder, "DATA": folder / "data"}
    names |= {name: folder / name.lower() for name in ("MEGATRON", "EXPORTED", "RUN")}
    return {name: str(path) for name, path in names.items()}


def fill(text: str, places: dict[str, str]) -> str:
    return re.sub(r"\b(" + "|".join(places) + r")\b", lambda found: places[found[0]], text)


def test_convert_then_fine_tune(places):
    for command in fill(block("Convert", "bash"), places).strip().splitlines():
        run(command)
    assert (Path(places["EXPORTED"]) / "config.json").exists()
    (command,) = [fill(block("Fine-tune", "bash"), places)]
    assert "train.train_iters=400" in command
    run(command.replace("train.train_iters=400", "train.train_iters=2 scheduler.lr_warmup_iters=1"))
    assert (Path(places["RUN"]) / "iter_0000002").is_dir()


def test_the_data_line_is_a_conversation_our_data_path_reads(places):
    from qwen3vl_bridge.data.conversations import ConversationFile

    file = Path(places["DATA"]) / "readme.jsonl"
    picture = next((Path(places["DATA"]) / "images").iterdir()).name
    file.write_text(block("Fine-tune", "json").replace("0001.png", picture))
    assert len(ConversationFile(file)) == 1


def test_python(untied_folder, tmp_path):
    import torch

    code = block("Use it", "python").replace("Qwen/Qwen3-VL-8B-Instruct", str(untied_folder))
    code = code.replace('"exported"', repr(str(tmp_path / "exported")))
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(untied_folder)
    image = [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id]
    input_ids = torch.tensor([[5, *image, 6, 7]])
    names = {
        "input_ids": input_ids,
        "loss_mask": (input_ids == 6).float(),
        "pixel_values": torch.randn(16, 1536),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    exec(code, names)
    assert names["losses"].shape == input_ids.shape and names["loss"].isfinite()
    assert (tmp_path / "exported" / "config.json").exists()
