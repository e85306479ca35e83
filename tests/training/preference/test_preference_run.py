"""Complete runs on pairs of answers: log, evaluation, resuming, scores computed before training, and their checks."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

from qwen3vl_bridge import Qwen3VLLoRA
from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.cli.data import main as data
from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.training import process_groups
from qwen3vl_bridge.training.objective_settings import ObjectiveConfig
from qwen3vl_bridge.training.reference_scores import weights_digest

import pytest
from qwen3vl_recipes.registry import recipes

from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import rounded_folder
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.recipes.test_twins import twin
from tests.training.objective_steps import few_records
from tests.training.running import losses, read_log, replicated, train

DPO = dict(objective__kind="dpo", objective__beta=0.5)
FAST = dict(optimizer__lr=5e-3, optimizer__min_lr=5e-3, scheduler__lr_warmup_iters=0, train__train_iters=4)


@pytest.fixture(scope="module")
def pairs(inputs, tmp_path_factory):
    """Return the folder of a few pairs about digits."""
    return few_records(tmp_path_factory.mktemp("pairs"), "pairs")


def config(inputs, pairs: Path, save: Path | None, **settings: Any) -> Any:
    """Return a LoRA run on pairs in float32."""
    common = dict(validation__eval_interval=2, checkpoint__save_interval=2, dataset__media_root=str(pairs.parent))
    cfg = replicated(inputs, save, **common | DPO | FAST | settings)
    cfg.dataset.path = str(pairs)
    cfg.peft = Qwen3VLLoRA(dim=4, alpha=8)
    return cfg


@pytest.fixture(scope="module")
def unbroken(inputs, pairs, tmp_path_factory):
    save = tmp_path_factory.mktemp("unbroken")
    return train(config(inputs, pairs, save)), save


@pytest.mark.slow
def test_dpo_run_logs_metrics_of_trl(unbroken):
    log, save = unbroken
    steps, valid = [e for e in log if "loss" in e], [e for e in log if "valid_loss" in e]
    assert [e["step"] for e in steps] == [1, 2, 3, 4] and [e["step"] for e in valid] == [2, 4]
    assert all(
        e.keys() >= {*ObjectiveConfig(kind="dpo").metrics, "trained_pairs"} and "trained_tokens" not in e for e in steps
    )
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and steps[0]["rewards/margins"] == 0
    for e in steps:
        assert e["rewards/margins"] == pytest.approx(e["rewards/chosen"] - e["rewards/rejected"], abs=1e-4)
    for e in valid:
        margin = e["valid_rewards/chosen"] - e["valid_rewards/rejected"]
        assert e["valid_rewards/margins"] == pytest.approx(margin, abs=1e-4) and abs(margin) > 1e-3
    assert losses(read_log(save)) == losses(log)


@pytest.mark.slow
def test_dpo_run_resumed_equals_uninterrupted_run_bit_exactly(unbroken, inputs, pairs, tmp_path):
    first = train(config(inputs, pairs, tmp_path), stop_after=2)
    second = train(config(inputs, pairs, tmp_path))
    assert losses(first + second) == losses(unbroken[0])


def score(inputs, pairs: Path, output: Path, *more: str, hf: Path | None = None) -> int:
    options = ["--hf-model", str(hf or inputs.hf), "--data", str(pairs), "--media-root", str(pairs.parent)]
    return data(["score", *options, "--seq-length", "128", "--output", str(output), "--no-progress", *more])


@pytest.fixture(scope="module")
def scores(inputs, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores") / "reference"
    for split in ("train", "valid"):
        assert score(inputs, pairs, folder, "--split", split) == 0
    return folder


@pytest.mark.slow
def test_dpo_losses_with_stored_and_computed_reference_logps_are_equal(unbroken, inputs, pairs, scores):
    log = train(config(inputs, pairs, None, objective__reference_logps=str(scores)))
    assert losses(log) == losses(unbroken[0])


@pytest.mark.slow
def test_dpo_full_fine_tuning_with_stored_reference_logps_trains(inputs, pairs, scores):
    cfg = config(inputs, pairs, None, objective__reference_logps=str(scores), optimizer__lr=1e-3, optimizer__min_lr=0.0)
    cfg.peft = None
    log = [e for e in train(cfg) if "loss" in e]
    assert log[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and log[0]["grad_norm_vision_model"] > 0
    assert abs(log[1]["rewards/chosen"]) > 1e-3


def score_on_ranks(inputs, pairs: Path, output: Path, options: list[str]) -> int:
    with mock.patch.object(process_groups, "shutdown", lambda: None):  # the ranks leave their group later
        return score(inputs, pairs, output, *options)


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("layout", [["--tp", "2"], ["--cp", "2"], ["--pp", "2"], []], ids=["TP2", "CP2", "PP2", "DP2"])
def test_data_score_on_two_ranks_matches_logps_of_one_process(inputs, pairs, scores, tmp_path, layout):
    from safetensors.torch import load_file

    assert results_of_ranks(score_on_ranks, 2, inputs, pairs, tmp_path / "reference", layout) == 0
    found, expected = (load_file(folder / "train.safetensors")["logps"] for folder in (tmp_path / "reference", scores))
    assert expected.shape == (24, 2) and (found / expected - 1).abs().max() <= 1e-6  # measured 1.4e-7


def test_score_raises_if_file_exists_or_pair_is_too_long(inputs, pairs, scores, tmp_path, capsys):
    assert score(inputs, pairs, scores) == 2 and "--overwrite replaces it" in capsys.readouterr().err
    assert score(inputs, pairs, tmp_path, "--seq-length", "16") == 2
    assert "found a sample of" in capsys.readouterr().err
    assert score(inputs, pairs, tmp_path, "--on-long", "truncate") == 2
    assert "dataset.on_long is 'truncate'" in capsys.readouterr().err


@pytest.mark.slow
def test_dpo_run_raises_if_stored_logps_are_of_other_model_or_data(inputs, pairs, scores, tmp_path):
    other = rounded_folder(inputs.hf, tmp_path / "other", seed=0)
    cfg = config(inputs, pairs, None, objective__reference_logps=str(scores))
    cfg.checkpoint.pretrained_checkpoint = str(other)
    with pytest.raises(ValueError, match=r"for train in objective\.reference_logps, .* with another model"):
        train(cfg)
    cfg.objective.reference_model = str(inputs.hf)
    assert train(cfg)[0]["loss"] > 0
    shutil.copytree(pairs, tmp_path / "pairs")
    path = tmp_path / "pairs" / "train.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[1:], lines[0]]))
    cfg = config(inputs, tmp_path / "pairs", None, objective__reference_logps=str(scores))
    cfg.dataset.media_root = str(pairs.parent)
    with pytest.raises(DataError, match="computed for other data"):
        train(cfg)


def test_run_raises_if_data_are_of_another_objective(inputs, pairs):
    supervised = dict(objective__kind="sft", objective__beta=0.1)
    for path, settings, message in (
        (pairs, supervised, r"objective.kind=dpo \(recipes such as qwen3_vl_8b_dpo_config\)"),
        (inputs.data, {}, "objective.kind must fit the records: sft for conversations"),
    ):
        cfg = config(inputs, path, None, dataset__on_bad="error", dataset__media_root=None, **settings)
        with pytest.raises(DataError, match=message):
            train(cfg)
        cfg.dataset.on_bad = "drop"
        with pytest.raises(DataError, match=message):
            cfg.dataset.check_samples()


@pytest.mark.parametrize(("changes", "message"), [
    ({"objective__kind": "sft"}, "objective.beta is set, but objective.kind is 'sft'"),
    ({"objective__kind": "ppo"}, "objective.kind is 'ppo', expected one of"),
    ({"objective__kind": "reranker"}, "objective.beta is set, but objective.kind is 'reranker', which ignores it"),
    ({"objective__loss_type": "kto"}, "objective.loss_type is 'kto', expected 'sigmoid' or 'robust' or 'ipo'"),
    ({"objective__temperature": 0.5}, "objective.temperature is set, but objective.kind is 'dpo'"),
    ({"dataset__objective": "kto"}, "dataset.objective is 'kto', but objective.kind is 'dpo'"),
    ({"objective__beta": 0.0}, "expected a number above 0"),
    ({"objective__label_smoothing": 0.5}, "below 0.5"),
    ({"objective__loss_type": "ipo", "objective__label_smoothing": 0.1}, "label_smoothing is 0.1, expected 0"),
    ({"objective__reference_model": "x"}, "objective.reference_model is set without objective.reference_logps"),
    ({"peft": None}, "there are no adapters, so the model without adapters is not the reference"),
    ({"peft": Qwen3VLLoRA(dim=4, freeze_vision_model=False)}, "weights of vision_model are trained too"),
    ({"model__calculate_per_token_loss": False}, "model.calculate_per_token_loss is False with objective.kind 'dpo'"),
    ({"ddp__use_megatron_fsdp": True}, "ddp.use_megatron_fsdp is True with objective.kind 'dpo'"),
    ({"dataset__pack": False}, "dataset.pack is False for objective.kind=dpo"),
])  # fmt: skip
def test_validation_raises_if_objective_settings_are_invalid(inputs, pairs, changes, message):
    cfg = config(inputs, pairs, None)
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        setattr(getattr(cfg, section) if section else cfg, field, value)
    with pytest.raises(ValueError, match=message):
        cfg.validate()


def fsdp_log(inputs, pairs: Path, settings: dict[str, Any]) -> list[dict[str, float]]:
    cfg = inputs.config(None, **settings)  # float32
    cfg.dataset.path, cfg.checkpoint.pretrained_checkpoint = str(pairs), str(inputs.hf)
    return train(cfg)


@pytest.mark.slow
def test_dpo_run_under_megatron_fsdp_on_two_ranks_matches_one_process(inputs, pairs, scores):
    settings = DPO | FAST | dict(
        objective__reference_logps=str(scores), dataset__media_root=str(pairs.parent), train__train_iters=2,
        optimizer__lr=1e-4, optimizer__min_lr=1e-4, optimizer__adam_eps=1e-4, validation__eval_interval=0,
    )  # fmt: skip
    cfg = config(inputs, pairs, None, **settings)
    cfg.peft = None
    expected, found = train(cfg), results_of_ranks(fsdp_log, 2, inputs, pairs, settings)
    for one, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "trained_pairs", *ObjectiveConfig(kind="dpo").metrics):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), name


@pytest.fixture(scope="module")
def labeled(pairs, tmp_path_factory):
    """Return a folder with every chosen and rejected answer as a labeled answer."""
    folder = tmp_path_factory.mktemp("labeled")
    for split in ("train", "valid"):
        records = [json.loads(line) for line in (pairs / f"{split}.jsonl").read_text().splitlines()]
        answers = [(one["prompt"], one[kind], kind == "chosen") for one in records for kind in ("chosen", "rejected")]
        lines = [json.dumps({"prompt": p, "completion": a, "label": label}) + "\n" for p, a, label in answers]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.slow
def test_kto_run_logs_metrics_and_resumes_bit_exactly(inputs, pairs, labeled, tmp_path):
    settings = dict(objective__kind="kto", dataset__path=str(labeled), dataset__media_root=str(pairs.parent))

    def cfg(save):
        found = config(inputs, pairs, save, **settings)
        found.dataset.path, found.dataset.media_root = str(labeled), str(pairs.parent)
        return found

    log = train(cfg(tmp_path / "a"))
    steps, valid = [e for e in log if "loss" in e], [e for e in log if "valid_loss" in e]
    assert all(e.keys() >= {"rewards/chosen", "rewards/rejected", "kl", "trained_answers"} for e in steps)
    assert steps[0]["loss"] == pytest.approx(0.5) and steps[0]["kl"] == 0 and steps[-1]["loss"] != steps[0]["loss"]
    assert valid[-1]["valid_rewards/chosen"] != valid[-1]["valid_rewards/rejected"]
    halves = train(cfg(tmp_path / "b"), stop_after=2) + train(cfg(tmp_path / "b"))
    assert losses(halves) == losses(log)


@pytest.mark.slow
def test_kto_losses_with_stored_and_computed_reference_logps_are_equal(inputs, pairs, labeled, tmp_path):
    for split in ("train", "valid"):
        options = ["--objective", "kto", "--split", split, "--media-root", str(pairs.parent)]
        assert score(inputs, labeled, tmp_path / "scores", *options) == 0
    logs = []
    for scores in (None, str(tmp_path / "scores")):
        cfg = config(inputs, pairs, None, objective__kind="kto", objective__reference_logps=scores)
        cfg.dataset.path = str(labeled)
        logs.append(losses(train(cfg)))
    assert logs[0] == logs[1]


@pytest.mark.one_case_in(9)
@pytest.mark.parametrize("name", [name for name, one in recipes().items() if "_dpo_" in name and one.gpus])
def test_dpo_recipe_trains_tiny_model(name, inputs, moe_folder, pairs, tmp_path):
    folder = moe_folder if "_a3b_" in name else inputs.hf
    if name.startswith("qwen35_"):
        folder = make_checkpoint(tmp_path / "hf", moe="_a3b_" in name)
    cfg = twin(name, str(folder), str(pairs), whole=True)
    assert cfg.model.moe_router_load_balancing_type == ("none" if "_a3b_" in name else "aux_loss")
    cfg.dataset.media_root = str(pairs.parent)
    (entry,) = train(cfg)
    assert entry["loss"] == pytest.approx(0.693147, abs=1e-3) and entry["trained_pairs"] >= 4
    assert entry["grad_norm_language_model"] > 0


def test_weights_digest_changes_with_one_weight_of_large_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(80 << 20))
    first = weights_digest(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(5 << 22)
        file.write(b"x")
    assert weights_digest(tmp_path) != first
    with pytest.raises(CheckpointError, match="contains no weights"):
        weights_digest(tmp_path / "missing")


def test_inspect_shows_both_answers_of_pairs(inputs, pairs, capsys):
    options = ["--hf-model", str(inputs.hf), "--data", str(pairs), "--media-root", str(pairs.parent)]
    assert data(["inspect", *options, "--objective", "dpo", "--samples", "1", "--json", "--no-progress"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [one["sample_id"] for one in found["samples"]]
    assert found["records_shown"] == 1 and names == ["train.jsonl:1", "train.jsonl:1 (rejected)"]
    trained = ["".join(p["text"] for p in one["pieces"] if p["trained"]) for one in found["samples"]]
    record = json.loads((pairs / "train.jsonl").read_text().splitlines()[0])
    expected = [record[name][0]["content"][0]["text"] for name in ("chosen", "rejected")]
    assert [text.removesuffix("\n").removesuffix("<|im_end|>") for text in trained] == expected
    assert data(["inspect", *options, "--no-progress"]) == 1 and "objective.kind=dpo" in capsys.readouterr().out
