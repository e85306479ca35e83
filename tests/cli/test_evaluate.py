"""`qwen3vl evaluate` scores the answers that transformers generates."""

import json
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.cli.main import main
from qwen3vl_bridge.training import weight_loading

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

TOKENS = 4
TEXTS = ["Which digit?", "Say it in a word.", "And this one, in a word or two, please?", "Five?", "?"]


def generated_answers(hf: Path, records: list[dict], root: Path) -> list[str]:
    """Return what transformers answers to the first message of each record, without reasoning."""
    processor, answers = AutoProcessor.from_pretrained(hf), []
    model = AutoModelForImageTextToText.from_pretrained(hf, attn_implementation="eager")
    for record in records:
        user = record["messages"][0]
        parts = [
            part | {"image": Image.open(root / part["image"])} if "image" in part else part for part in user["content"]
        ]
        inputs = processor.apply_chat_template(
            [user | {"content": parts}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(ids, skip_special_tokens=True).rpartition("</think>")[2].strip())
    return answers


@pytest.fixture(scope="module")
def questions(untied_folder, tmp_path_factory) -> tuple[Path, list[str]]:
    """Return a data set in which every other accepted answer is right, and the answers of transformers."""
    root = tmp_path_factory.mktemp("questions")
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(root / "picture.png")
    records = []
    for number, text in enumerate(TEXTS):
        content = [{"type": "image", "image": "picture.png"}] * (number % 2) + [{"type": "text", "text": text}]
        records.append({"messages": [{"role": "user", "content": content}]})
    answers = generated_answers(untied_folder, records, root)
    for number, (record, answer) in enumerate(zip(records, answers, strict=True)):
        record["messages"].append({"role": "assistant", "content": "none of its words"})
        if number % 2 == 0:
            record["references"] = ["neither", answer]
    path = root / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path, answers


def words_for(hf: Path, data: Path, *more: str) -> list[str]:
    return ["evaluate", "--hf-model", str(hf), "--data", str(data), "--max-new-tokens", str(TOKENS), "--json", *more]


def test_evaluate_writes_same_answers_as_transformers(untied_folder, questions, capsys, tmp_path):
    data, answers = questions
    output = tmp_path / "answers.jsonl"
    assert main(words_for(untied_folder, data, "--batch-size", "2", "--output", str(output))) == 0
    scores = json.loads(capsys.readouterr().out)
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [one["answer"] for one in written] == answers
    assert [one["score"] for one in written] == [1, 0, 1, 0, 1]
    assert [one["question"] for one in written] == TEXTS
    assert scores == {"metric": "exact", "score": 3 / 5, "answers": 5}
    assert written[0]["references"] == ["neither", answers[0]] and written[1]["references"] == ["none of its words"]


def test_evaluate_of_mixture_prints_mean_score_of_each_data_set(untied_folder, questions, capsys, tmp_path):
    data, answers = questions
    mixture = tmp_path / "mixture.yaml"
    sets = [{"name": name, "path": str(data), "media_root": str(data.parent)} for name in ("first", "second")]
    mixture.write_text(json.dumps(sets))
    words = words_for(untied_folder, data, "--samples", "3", "--metric", "contains")
    words = ["--mixture" if word == "--data" else word for word in words if word != "--json"]
    words[words.index("--mixture") + 1] = str(mixture)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "--split is missing, which --mixture needs" in capsys.readouterr().err
    assert main([*words, "--split", "train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "contains: 0.6667, the mean of 6 answers",
        "  first: 0.6667, 3 answers",
        "  second: 0.6667, 3 answers",
        "below 1: 2 answers",
    ]
    expected = f"0.00, expected 'none of its words', the model answered {answers[1]!r}"
    assert lines[4].endswith(expected) and lines[5].endswith(expected)


@pytest.mark.parametrize(("more", "message"), [
    (["--metric", "multiple_choice"], "questions.jsonl:1: found the options [] in the question"),
    (["--temperature", "0.5"], "temperature has an effect only with do_sample=True"),
    (["--output", "missing/answers.jsonl"], "the folder for the answers does not exist"),
    (["--megatron-path", "missing"], "missing"),
])  # fmt: skip
def test_evaluate_exits_with_code_2_before_loading_if_option_is_invalid(
    untied_folder, questions, capsys, monkeypatch, more, message
):
    monkeypatch.setattr(weight_loading, "load_model", None)
    assert main(words_for(untied_folder, questions[0], *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("size", [[], ["--pp", "2"], ["--tp", "2"], ["--cp", "2"]], ids=["data", "pp", "tp", "cp"])
def test_evaluate_under_torchrun_gives_same_answers_as_one_rank(untied_folder, questions, tmp_path, size):
    data, answers = questions
    words = words_for(untied_folder, data, "--output", str(tmp_path / "answers.jsonl"), *size)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "qwen3vl_bridge", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["score"] == 3 / 5
    written = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [one["answer"] for one in written] == answers
