"""Test the demo in fewer steps: the exported model reads held-out digits, and a given checkpoint is trained.

Also its data set, whose splits share no image, and its report of the model's answers.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from qwen3vl_bridge.testing.digits import conversation, make_dataset

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig

from examples.digits import report
from examples.digits.demo import GOAL, main, parse
from tests.helpers.forked import ROOT

STEPS = 240  # of 400


def demo(work: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    assert "$(PY) examples/digits/demo.py $(DEMO_ARGS)" in (ROOT / "Makefile").read_text()
    command = [sys.executable, "examples/digits/demo.py", "--work-dir", str(work), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "160"})


def accuracies(output: str) -> tuple[float, float]:
    before, after = (float(one) / 100 for one in re.findall(r"accuracy (?:before|after) .*?([\d.]+)%", output))
    return before, after


@pytest.mark.slow
@pytest.mark.parametrize("family", [[], ["--family", "qwen3_5"]], ids=["as make demo starts it", "qwen3_5"])
def test_demo_tiny_model_learns_digits(family, tmp_path):
    done = demo(tmp_path / "demo", *family, f"train.train_iters={STEPS}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    before, after = accuracies(done.stdout)
    print(f"{before:.1%} before, {after:.1%} after")
    assert before <= 0.2 and after >= GOAL
    difference, scale = re.search(
        r"largest logits difference.*?([\d.e-]+) \(largest logit ([\d.]+)\)", done.stdout
    ).groups()
    assert float(difference) <= 1e-4 * float(scale)


def test_demo_with_model_only_option_keeps_earlier_results(tmp_path):
    """What `make tiny-model` starts: the checkpoint can be read, and a demo may follow in the same folder."""
    work = tmp_path / "demo"
    work.mkdir()
    for name in (".made_by_the_digits_demo", "loss.png"):
        (work / name).touch()
    main(["--model-only", "--work-dir", str(work)])
    assert {path.name for path in work.iterdir()} == {".made_by_the_digits_demo", "loss.png", "hf"}
    assert AutoConfig.from_pretrained(work / "hf").model_type == "qwen3_vl"
    assert parse(["--work-dir", str(work)])


@pytest.mark.slow
def test_demo_with_hf_model_option_trains_that_checkpoint(untied_folder, tmp_path):
    """Two steps: too few for the goal, which the exit status says; all files are there, and the model is unchanged."""
    before = {path.name: path.read_bytes() for path in untied_folder.iterdir() if path.is_file()}
    steps = ("train.train_iters=2", "scheduler.lr_warmup_iters=1")
    done = demo(tmp_path / "demo", "--hf-model", untied_folder, *steps)
    assert done.returncode == 1 and "the goal 95%" in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]
    assert accuracies(done.stdout)[1] < GOAL
    made = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"megatron", "run", "hf_finetuned", "answers.png", "loss.png"} <= made and "hf" not in made
    assert before == {path.name: path.read_bytes() for path in untied_folder.iterdir() if path.is_file()}


@pytest.mark.slow
def test_demo_does_not_export_stopped_training(untied_folder, tmp_path):
    """Stop by `train.exit_interval`; a run that gets SIGTERM ends in the same way."""
    stops = ("train.train_iters=4", "train.exit_interval=2")
    done = demo(tmp_path / "demo", "--hf-model", untied_folder, *stops)
    assert done.returncode == 1 and "stopped after step 2 of 4: nothing is exported" in done.stderr, done.stderr
    assert (tmp_path / "demo" / "run").is_dir() and not (tmp_path / "demo" / "hf_finetuned").exists()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("digits"))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def image_of(row):
    return row["messages"][0]["content"][0]["image"]


def digit_of(row):
    return row["messages"][1]["content"][0]["text"]


# The dataset


def test_dataset_split_is_stratified_and_disjoint(dataset):
    train, test = read(dataset.train), read(dataset.test)
    assert (len(train), len(test)) == (1437, 360)
    assert len({image_of(row) for row in train + test}) == 1797
    counts, held_out = Counter(map(digit_of, train + test)), Counter(map(digit_of, test))
    for digit in map(str, range(10)):
        assert abs(held_out[digit] - 0.2 * counts[digit]) <= 1, digit


def test_dataset_held_out_images_are_not_in_training(dataset):
    folder = dataset.train.parent
    train, test = ({(folder / image_of(row)).read_bytes() for row in read(path)} for path in dataset)
    assert not train & test


def test_dataset_same_seed_gives_same_files(dataset, tmp_path):
    again, other = make_dataset(tmp_path / "again"), make_dataset(tmp_path / "other", seed=1, held_out=0.5)
    assert [path.read_text() for path in again] == [path.read_text() for path in dataset]
    assert len(read(other.test)) == 899
    name = image_of(read(dataset.test)[0])
    assert (again.test.parent / name).read_bytes() == (dataset.test.parent / name).read_bytes()


# The report


def few(dataset, folder, sizes):
    """Write a test file of images in several sizes, so that a batch needs padding."""
    rows = read(dataset.test)[: len(sizes)]
    for number, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        with Image.open(dataset.test.parent / image_of(row)) as picture:
            picture.resize(size).save(folder / f"{number}.png")
        row["messages"][0]["content"][0]["image"] = f"{number}.png"
    path = folder / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_report_answers_are_independent_of_batch_size(untied_folder, dataset, tmp_path):
    path = few(dataset, tmp_path, [(64, 64), (128, 64), (32, 32), (96, 160)])
    alone, together = (report.answer(untied_folder, path, batch_size=size) for size in (1, 4))
    assert alone == together
    assert [one.truth for one in alone] == [digit_of(row) for row in read(path)]
    assert all(one.image.is_file() for one in alone)
    assert report.accuracy(report.answer(untied_folder, dataset.test)) <= 0.15


def test_report_answer_raises_if_question_has_no_image(untied_folder, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": conversation("x.png", "7")["messages"][:1]}) + "\n")
    with pytest.raises(ValueError, match="expected a picture in the question"):
        report.answer(untied_folder, path)


def answers_about(dataset, texts):
    rows = read(dataset.test)[: len(texts)]
    return [
        report.Answer(dataset.test.parent / image_of(row), digit_of(row), digit_of(row) if text is None else text)
        for row, text in zip(rows, texts, strict=True)
    ]


def test_accuracy_counts_exact_answers(dataset):
    assert report.accuracy(answers_about(dataset, [None, None, "", "It is a digit"])) == 0.5
    with pytest.raises(ValueError, match="0 answers"):
        report.accuracy([])


@pytest.mark.parametrize("texts", [[None] * 3, ["$x^", "数字", "\n"], [None, "much too long to draw"] * 10])
def test_answer_sheet_png_shows_wrong_answers_in_red(dataset, tmp_path, texts):
    report.answer_sheet(answers_about(dataset, texts), tmp_path / "sheet.png", most=15)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG"
        red = (np.asarray(sheet.convert("RGB")) == (200, 16, 46)).all(-1).any()
    assert red == any(text is not None for text in texts)


def test_loss_curve_of_log_writes_png_file(tmp_path):
    log = [{"step": step, "loss": 3.0 / step, "grad_norm": 1.0} for step in range(1, 20)]
    report.loss_curve([*log, {"step": 10, "valid_loss": 0.4}], tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as curve:
        assert curve.format == "PNG"
    with pytest.raises(ValueError, match="none with a loss"):
        report.loss_curve([{"step": 1}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
