"""A run on receipts in the published format of CORD-V2, as their files are."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.receipts import write_receipts

from .running import replicated, train

THINKING = Path(__file__).parents[1] / "data" / "processing" / "thinking_template.jinja"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_run_trains_on_records_of_cord_v2(inputs, folders, family, tmp_path):
    """Each step's loss is a number, and the last is below the first; Qwen3.5's with a template that thinks."""
    data = write_receipts(tmp_path / "cord", train=8, valid=2)
    if family == "qwen3_5":
        inputs = replace(inputs, hf=shutil.copytree(folders[family, "dense"], tmp_path / "hf"))
        shutil.copyfile(THINKING, inputs.hf / "chat_template.jinja")
    cfg = replicated(
        inputs,
        None,
        train__train_iters=3,
        dataset__path=str(data),
        dataset__schema_adapter="cord_v2",
        dataset__seq_length=512,
        model__seq_length=512,
    )
    steps = [entry for entry in train(cfg) if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert all(math.isfinite(entry["loss"]) and entry["trained_tokens"] > 0 for entry in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
