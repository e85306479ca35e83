"""`checkpoint.keep_best` keeps the checkpoint with the best evaluation."""

import json
from pathlib import Path

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.training.best_checkpoint import BEST, find_best, record_best
from qwen3vl_bridge.training.checkpoint_manager import saved_steps
from qwen3vl_bridge.training.run_log import METRICS

import pytest

from tests.training.running import replicated, train


def make_run(folder: Path, entries: list[dict], saved: list[int]) -> Path:
    (folder / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for step in saved:
        (folder / f"iter_{step:07d}").mkdir()
    return folder


ENTRIES = [
    {"step": 1, "loss": 1.0}, {"step": 2, "valid_loss": 3.0, "accuracy": 0.5}, {"step": 4, "valid_loss": 1.0},
    {"step": 6, "valid_loss": 2.0, "accuracy": 0.5}, {"step": 8, "valid_loss": None, "accuracy": 0.25},
]  # fmt: skip


@pytest.mark.parametrize(("metric", "saved", "best"), [
    ("valid_loss", [2, 4, 6, 8], (4, 1.0)), ("valid_loss", [2, 6, 7], (6, 2.0)), ("valid_loss", [8], None),
    ("accuracy", [2, 4, 6, 8], (2, 0.5)), ("accuracy", [8], (8, 0.25)), ("accuracy", [], None),
])  # fmt: skip
def test_find_best_returns_saved_checkpoint_with_best_metric(tmp_path, metric, saved, best):
    folder = make_run(tmp_path, ENTRIES, saved)
    assert find_best(folder, metric, saved) == best
    path = record_best(folder, metric, saved_steps(folder))
    assert (path is None) == (best is None) == (not (folder / BEST).exists())
    if best is not None:
        written = {"checkpoint": f"iter_{best[0]:07d}", "step": best[0], "metric": metric, "value": best[1]}
        assert json.loads((folder / BEST).read_text()) == written and path == folder / written["checkpoint"]


@pytest.mark.slow
def test_resumed_run_keeps_newest_and_best_checkpoint(inputs, tmp_path):
    every_step = dict(train__train_iters=4, checkpoint__save_interval=1, validation__eval_interval=1)
    # The learning rate is so high that the loss rises.
    settings = dict(checkpoint__keep_best="valid_loss", checkpoint__most_recent_k=1, optimizer__lr=0.3)
    for stop_after in (2, None):
        train(replicated(inputs, tmp_path, **every_step, **settings), stop_after=stop_after)
    losses = {}
    for line in (tmp_path / METRICS).read_text().splitlines():
        losses |= {entry["step"]: entry["valid_loss"] for entry in [json.loads(line)] if "valid_loss" in entry}
    best = min(losses, key=losses.__getitem__)
    assert sorted(losses) == [1, 2, 3, 4] and best < 4
    assert json.loads((tmp_path / BEST).read_text())["step"] == best
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_{step:07d}" for step in (best, 4)]


@pytest.mark.parametrize(("settings", "message"), [
    (dict(checkpoint__keep_best="accuracy"), "accuracy.path is None with .*, expected a path"),
    (dict(checkpoint__keep_best="valid_loss", checkpoint__save_interval=3, validation__eval_interval=2),
     "checkpoint.save_interval is 3 .*, expected a multiple of validation.eval_interval, 2"),
    (dict(checkpoint__keep_best="valid_loss", validation__eval_iters=0), "validation.eval_iters is 0 .*, expected 1"),
    (dict(checkpoint__keep_best="loss", validation__eval_interval=3), "keep_best is 'loss', expected one of"),
])  # fmt: skip
def test_validate_raises_if_settings_contradict_keep_best(inputs, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        replicated(inputs, tmp_path, **settings).validate()
