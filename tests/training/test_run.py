"""A run in Megatron-Bridge's loop on one process: its log, its checkpoints, and that it goes on as if never left."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint
from qwen3vl_bridge.training.checkpoint_manager import Qwen3VLCheckpointManager
from qwen3vl_bridge.training.weight_loading import load_model

import pytest
import torch
from megatron.bridge import AutoBridge
from safetensors.torch import load_file

from tests.noise import SEEDS, allowed, check, rounded_folder
from tests.receipts import write_receipts

from .adamw import documents, matrices_decay, reference_steps, sum_of_losses
from .conftest import losses, read_log
from .running import replicated, sharded, stored, train

COMPARED = ("loss", "grad_norm", "valid_loss")
DTYPES = {replicated: torch.float32, sharded: torch.bfloat16}


def mean_loss(model, rows):
    with torch.no_grad():
        found = [sum_of_losses(model, *document) for row in rows for document in documents(row)]
    return sum(loss.item() for loss, _ in found) / sum(count for _, count in found)


@pytest.fixture(scope="module", params=[replicated, sharded], ids=["distributed optimizer", "Megatron-FSDP"])
def unbroken(request, inputs, tmp_path_factory):
    """Six steps at once: what makes such runs, the log, and the folder of the run."""
    save = tmp_path_factory.mktemp("unbroken")
    return request.param, train(request.param(inputs, save)), save


def test_two_halves_are_the_whole(unbroken, inputs, tmp_path):
    make, log, save = unbroken
    first = train(make(inputs, tmp_path), stop_after=3)
    second = train(make(inputs, tmp_path))
    assert [e["step"] for e in first + second if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert losses(first + second) == losses(log)
    assert losses(read_log(tmp_path)) == losses(read_log(save)) == losses(log)
    halves, whole = stored(tmp_path), stored(save)
    assert halves.keys() == whole.keys() and len(whole) > 100
    assert all(torch.equal(halves[key], whole[key]) for key in whole)


def test_the_log_has_what_there_is_to_know(unbroken):
    _, log, _ = unbroken
    assert [e["step"] for e in log if "valid_loss" in e] == [4, 6]
    for entry in (e for e in log if "loss" in e):
        assert entry.keys() >= {
            "step",
            "loss",
            "lr",
            "grad_norm",
            "trained_tokens",
            "seconds",
            "grad_norm_vision_model",
        }
        assert ("tokens_per_second" in entry) == (entry["step"] % 2 == 0) and "skipped" not in entry


def test_its_files_are_those_of_an_export(unbroken, inputs, tmp_path):
    """Hugging Face files lie beside the tensors, so nothing else is needed."""
    _, _, save = unbroken
    files = {path.name for path in (save / "iter_0000006" / "hf").iterdir()}
    assert {"config.json", "tokenizer.json"} <= files and not any(name.endswith(".safetensors") for name in files)
    export_checkpoint(save, tmp_path / "hf", progress=False)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == load_file(inputs.hf / "model.safetensors").keys()
    model = load_model(inputs.hf, save)  # under the names of either layer spec
    loaded = AutoBridge.from_hf_pretrained(str(inputs.hf)).export_hf_weights(model, cpu=True, show_progress=False)
    assert all(torch.equal(tensor.float(), exported[name].float()) for name, tensor in loaded)


def test_the_saved_configuration_is_the_runs(unbroken):
    _, _, save = unbroken
    text = (save / "iter_0000006" / "run_config.yaml").read_text()
    assert f"save: {save}\n" in text and ".journal" not in text
    assert sorted(path.name for path in save.iterdir() if path.name.startswith((".", "iter"))) == [
        "iter_0000003",
        "iter_0000006",
    ]


def by_step(log: list[dict[str, float]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for entry in log:
        found.setdefault(entry["step"], {}).update(entry)
    return found


def errors(found: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]) -> dict[str, float]:
    return {
        name: max(abs(entry[name] / expected[step][name] - 1) for step, entry in found.items() if name in entry)
        for name in COMPARED
    }


def test_steps_and_validations_are_those_of_transformers_with_adamw(unbroken, inputs, tmp_path):
    from transformers import Qwen3VLForConditionalGeneration

    make, log, _ = unbroken
    cfg = make(inputs, None)
    steps, rows = [e for e in log if "loss" in e], cfg.train.global_batch_size
    stream = cfg.dataset.stream("train")
    batches = [next(stream) for _ in range(len(steps) * rows)]
    model = Qwen3VLForConditionalGeneration.from_pretrained(inputs.hf, attn_implementation="eager").train()
    groups = matrices_decay(model, cfg.optimizer.weight_decay)
    reference = reference_steps(model, groups, batches, rows, lambda step: steps[step]["lr"], cfg.optimizer.clip_grad)
    expected = {}
    for step, (loss, norm) in enumerate(reference, 1):
        expected[step] = {"loss": loss, "grad_norm": norm}
        if step in (4, 6):
            expected[step]["valid_loss"] = mean_loss(model, cfg.dataset.evaluation("valid"))
    folders = [rounded_folder(inputs.hf, tmp_path / str(seed), seed, DTYPES[make]) for seed in SEEDS[:2]]
    near = [by_step(train(make(replace(inputs, hf=folder), None))) for folder in folders]
    check(errors(by_step(log), expected), allowed([errors(one, by_step(log)) for one in near], DTYPES[make]))
    tokens = [sum(int(row.loss_mask.sum()) for row in batches[i * rows : (i + 1) * rows]) for i in range(len(steps))]
    assert [e["trained_tokens"] for e in steps] == tokens


def test_every_validation_reads_the_same_rows(inputs):
    still = dict(optimizer__lr=0.0, optimizer__min_lr=0.0, validation__eval_interval=1, train__train_iters=3)
    valid = [e["valid_loss"] for e in train(replicated(inputs, None, **still)) if "valid_loss" in e]
    assert len(valid) == 3 and valid[0] == valid[1] == valid[2]


def test_other_data_are_refused(unbroken, inputs, tmp_path):
    make, _, save = unbroken
    shutil.copytree(save, tmp_path, dirs_exist_ok=True)
    again = make(inputs, tmp_path, train__train_iters=8, dataset__seed=7)
    again.scheduler.override_opt_param_scheduler = True
    with pytest.raises(ValueError, match="position belongs to other data: found seed 7, expected 1234"):
        train(again)


def test_another_schedule_is_refused_or_chosen(unbroken, inputs, tmp_path):
    make, log, save = unbroken
    shutil.copytree(save, tmp_path, dirs_exist_ok=True)
    changed = dict(train__train_iters=7, optimizer__lr=1e-4, optimizer__min_lr=1e-4, checkpoint__ckpt_step=3)
    with pytest.raises(CheckpointError, match=r"scheduler\.override_opt_param_scheduler=true"):
        train(make(inputs, tmp_path, **changed))
    (ours, *_) = train(make(inputs, tmp_path, **changed, scheduler__override_opt_param_scheduler=True), stop_after=1)
    assert ours["step"] == 4 and ours["lr"] == pytest.approx(1e-4)
    changed["checkpoint__save"] = None
    theirs = train(make(inputs, tmp_path, **changed, scheduler__use_checkpoint_opt_param_scheduler=True), stop_after=1)
    assert theirs[0]["lr"] == next(e["lr"] for e in log if e["step"] == 4)


def test_a_save_that_fails_leaves_the_older_checkpoint(inputs, tmp_path, monkeypatch):
    train(replicated(inputs, tmp_path), stop_after=3)

    def full(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3VLCheckpointManager, "_write_side_files", full)
        with pytest.raises(CheckpointError, match="no space"):
            train(replicated(inputs, tmp_path))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert [path.name for path in tmp_path.iterdir() if "iter_" in path.name] == ["iter_0000003"]
    assert [e["step"] for e in train(replicated(inputs, tmp_path)) if "loss" in e] == [4, 5, 6]
    assert [e["step"] for e in read_log(tmp_path) if "loss" in e] == [1, 2, 3, 4, 5, 6]


def test_older_checkpoints_go(inputs, tmp_path):
    (tmp_path / "iter_notes").mkdir()
    train(replicated(inputs, tmp_path, checkpoint__save_interval=2, checkpoint__most_recent_k=2))
    assert sorted(path.name for path in tmp_path.glob("*iter_*")) == ["iter_0000004", "iter_0000006", "iter_notes"]
    for name, value, expected in (("most_recent_k", 0, "at least 1"), ("save_retain_interval", 4, "None")):
        with pytest.raises(ValueError, match=rf"checkpoint\.{name} is {value}, expected {expected}"):
            train(replicated(inputs, tmp_path, **{f"checkpoint__{name}": value}))


THINKING = Path(__file__).parents[1] / "data" / "processing" / "thinking_template.jinja"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_run_trains_on_records_of_cord_v2(inputs, folders, family, tmp_path):
    """Each step's loss is a number, and the last is below the first; Qwen3.5's with a template that thinks."""
    data = write_receipts(tmp_path / "cord", train=8, valid=2)
    if family == "qwen3_5":
        inputs = replace(inputs, hf=shutil.copytree(folders[family, "dense"], tmp_path / "hf"))
        shutil.copyfile(THINKING, inputs.hf / "chat_template.jinja")
    cfg = replicated(
        inputs, None, train__train_iters=3, dataset__path=str(data), dataset__schema_adapter="cord_v2",
        dataset__seq_length=512, model__seq_length=512,
    )  # fmt: skip
    steps = [entry for entry in train(cfg) if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert all(math.isfinite(entry["loss"]) and entry["trained_tokens"] > 0 for entry in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
