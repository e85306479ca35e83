"""Test that `qwen3vl generate` gives the answer of transformers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.cli.main import main
from qwen3vl_bridge.training import weight_loading

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.models.qwen3_5.tiny import make_checkpoint

QUESTION = "Which digit is this?"


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(path)
    return path


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow), "qwen3_5 moe"])
def folder(request, untied_folder, tmp_path_factory):
    if request.param == "qwen3_vl":
        return untied_folder
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_5"), moe=request.param.endswith("moe"))


def reference(folder: Path, picture: Path, tokens: int) -> list[int]:
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(folder)
    new = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)[:, inputs["input_ids"].shape[1] :]
    return new[0].tolist()


def answer(folder: Path, picture: Path, tokens: int, capsys) -> dict:
    words = ["generate", QUESTION, "--hf-model", str(folder), "--image", str(picture)]
    assert main([*words, "--max-new-tokens", str(tokens), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_matches_transformers(folder, picture, capsys):
    new = reference(folder, picture, 6)
    expected = AutoProcessor.from_pretrained(folder).decode(new, skip_special_tokens=True)
    found = answer(folder, picture, 6, capsys)
    assert found == {"question": QUESTION, "images": [str(picture)], "answer": expected}
    assert expected


def test_generate_reads_rotated_transparent_image_as_upright_on_white(untied_folder, picture, capsys, tmp_path):
    """Compare with the answer of transformers about the same image, upright and on white."""
    upright = tmp_path / "upright.png"
    Image.eval(Image.open(picture).convert("L"), lambda level: 255 - level).save(upright)
    sideways = Image.merge("LA", [Image.new("L", (64, 64)), Image.open(picture).convert("L")]).transpose(
        Image.ROTATE_90
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways.save(tmp_path / "sideways.png", exif=exif)
    decode = AutoProcessor.from_pretrained(untied_folder).decode
    expected = decode(reference(untied_folder, upright, 12), skip_special_tokens=True)
    assert answer(untied_folder, tmp_path / "sideways.png", 12, capsys)["answer"] == expected
    Image.open(tmp_path / "sideways.png").convert("RGB").save(tmp_path / "black.png")
    assert decode(reference(untied_folder, tmp_path / "black.png", 12), skip_special_tokens=True) != expected


def test_generate_exits_with_code_2_if_image_does_not_decode(untied_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(weight_loading, "load_model", None)  # no model is built before
    (tmp_path / "x.png").write_bytes(b"no picture")
    assert main(["generate", QUESTION, "--hf-model", str(untied_folder), "--image", str(tmp_path / "x.png")]) == 2
    assert f"error: --image: {tmp_path / 'x.png'} does not decode as an image" in capsys.readouterr().err


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("said", ["config", "tokenizer_config", "generation_config"])
def test_generate_stops_at_eos_token_of_any_config_file(folder, picture, capsys, tmp_path, said):
    new, tokenizer = reference(folder, picture, 12), AutoProcessor.from_pretrained(folder).tokenizer
    asked = f"user {QUESTION} assistant"  # of which a part would be read as another token, once it ends turns
    later = (token for number, token in enumerate(new) if number > 3 and token not in new[:number])
    end = next(token for token in later if tokenizer.decode([token]).strip() not in asked)
    changed = shutil.copytree(folder, tmp_path / "changed")
    file = changed / f"{said}.json"
    values = json.loads(file.read_text()) if file.is_file() else {}
    if said == "config":
        values["text_config"]["eos_token_id"] = end
    elif said == "tokenizer_config":
        values["eos_token"] = tokenizer.convert_ids_to_tokens(end)
    else:
        values["eos_token_id"] = [end]
    file.write_text(json.dumps(values))
    found = answer(changed, picture, 12, capsys)["answer"]
    until = new[: new.index(end)]
    ended = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (until, [*until, end])]  # it may be special now
    assert found in ended and found != tokenizer.decode(new, skip_special_tokens=True)


def test_generate_exits_with_code_2_if_megatron_checkpoint_is_missing(untied_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(weight_loading, "load_model", None)  # no model is built before
    words = ["generate", QUESTION, "--hf-model", str(untied_folder), "--megatron-path", str(tmp_path / "none")]
    assert main(words) == 2
    assert f"error: {tmp_path / 'none'}" in capsys.readouterr().err


def test_generate_draws_same_tokens_for_same_seed(folder, picture, capsys):
    words = ["generate", QUESTION, "--hf-model", str(folder), "--image", str(picture), "--max-new-tokens", "6"]
    sampled = [*words, "--do-sample", "--temperature", "5", "--top-k", "50", "--top-p", "0.9"]
    found = []
    for seed in ("1", "1", "2"):
        assert main([*sampled, "--seed", seed]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]


def test_generate_exits_with_code_2_if_temperature_lacks_do_sample(untied_folder, capsys, monkeypatch):
    monkeypatch.setattr(weight_loading, "load_model", None)  # no model is built before
    assert main(["generate", QUESTION, "--hf-model", str(untied_folder), "--temperature", "0.5"]) == 2
    assert "error: temperature has an effect only with do_sample=True" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tp", "pp", "cp"])
def test_generate_under_torchrun_gives_same_answer_as_one_rank(folder, picture, capsys, size):
    words = [
        "generate",
        QUESTION,
        "--hf-model",
        str(folder),
        "--image",
        str(picture),
        "--max-new-tokens",
        "6",
        "--json",
    ]
    assert main(words) == 0
    expected = json.loads(capsys.readouterr().out)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "qwen3vl_bridge", *words]
    done = subprocess.run([*command, f"--{size}", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
