"""`qwen3vl generate`: the answer is transformers'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from qwen3vl_bridge.cli.main import main

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.qwen3_5.tiny import make_checkpoint

QUESTION = "Which digit is this?"


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(path)
    return path


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5", "qwen3_5 moe"])
def folder(request, untied_folder, tmp_path_factory):
    """Of a model of each family."""
    if request.param == "qwen3_vl":
        return untied_folder
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_5"), moe=request.param.endswith("moe"))


def test_the_answer_is_that_of_transformers(folder, picture, capsys):
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(folder)
    new = model.generate(**inputs, do_sample=False, max_new_tokens=6)[:, inputs["input_ids"].shape[1] :]
    expected = processor.batch_decode(new, skip_special_tokens=True)[0]
    words = ["generate", QUESTION, "--hf-model", str(folder), "--image", str(picture), "--max-new-tokens", "6"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"question": QUESTION, "images": [str(picture)], "answer": expected}
    assert expected


def test_an_answer_ends_with_its_turn(folder, picture, capsys, tmp_path):
    """Where the configuration names the end of a text, the tokenizer that of a turn, and the file what is generated."""
    words = ["generate", QUESTION, "--image", str(picture), "--max-new-tokens", "12", "--json"]

    def answer(model: Path) -> str:
        assert main([*words, "--hf-model", str(model)]) == 0
        return json.loads(capsys.readouterr().out)["answer"]

    free, processor = answer(folder), AutoProcessor.from_pretrained(folder)
    ids = processor.tokenizer(free)["input_ids"]
    assert len(set(ids)) > 4
    for number, said in enumerate(("config", "tokenizer", "generation_config")):
        end = next(token for token in ids[3 + number :] if token not in ids[: 3 + number])
        changed = shutil.copytree(folder, tmp_path / said)
        file = {"tokenizer": "tokenizer_config"}.get(said, said) + ".json"
        values = json.loads((changed / file).read_text()) if (changed / file).is_file() else {}
        if said == "config":
            values["text_config"]["eos_token_id"] = end
        else:
            token = processor.tokenizer.convert_ids_to_tokens(end)
            values["eos_token" if said == "tokenizer" else "eos_token_id"] = token if said == "tokenizer" else [end]
        (changed / file).write_text(json.dumps(values))
        expected = processor.decode(ids[: ids.index(end)], skip_special_tokens=True)
        assert answer(changed).startswith(expected) and len(answer(changed)) < len(free)


def test_a_checkpoint_that_is_not_there_is_status_2(untied_folder, tmp_path, capsys):
    words = ["generate", QUESTION, "--hf-path", str(untied_folder), "--megatron-path", str(tmp_path / "none")]
    assert main(words) == 2
    assert f"error: {tmp_path / 'none'}" in capsys.readouterr().err
