"""`qwen3vl generate`: the answer is transformers'."""

from __future__ import annotations

import json

from qwen3vl_bridge.cli.main import main

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

QUESTION = "Which digit is this?"


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(path)
    return path


def test_the_answer_is_that_of_transformers(untied_folder, picture, capsys):
    processor = AutoProcessor.from_pretrained(untied_folder)
    content = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(untied_folder)
    new = model.generate(**inputs, do_sample=False, max_new_tokens=6)[:, inputs["input_ids"].shape[1] :]
    expected = processor.batch_decode(new, skip_special_tokens=True)[0]
    words = ["generate", QUESTION, "--hf-model", str(untied_folder), "--image", str(picture), "--max-new-tokens", "6"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"question": QUESTION, "images": [str(picture)], "answer": expected}
    assert expected


def test_a_checkpoint_that_is_not_there_is_status_2(untied_folder, tmp_path, capsys):
    words = ["generate", QUESTION, "--hf-path", str(untied_folder), "--megatron-path", str(tmp_path / "none")]
    assert main(words) == 2
    assert f"error: {tmp_path / 'none'}" in capsys.readouterr().err
