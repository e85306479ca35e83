"""A run in Megatron-Bridge's loop on one process: its log, its checkpoints, and that it goes on as if never left."""

from __future__ import annotations

import shutil

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint
from qwen3vl_bridge.training.checkpointing import side_files
from qwen3vl_bridge.training.checkpointing.model_loading import load_model

import pytest
import torch
from megatron.bridge import AutoBridge
from safetensors.torch import load_file

from .conftest import losses, read_log
from .running import replicate, train

# Relative, of losses and gradients' norms beside the small loop; measured 2e-7.
LIMIT = 1e-6


def config(inputs, save, *, distributed=True, **settings):
    """In float32, from Hugging Face weights."""
    cfg = inputs.config(save, **settings)
    cfg.checkpoint.pretrained_checkpoint = str(inputs.hf)
    return replicate(cfg, distributed=distributed)


def sharded(inputs, save, **settings):
    """As the digits recipe is: under Megatron-FSDP in bfloat16."""
    cfg = inputs.config(save, **settings)
    cfg.mixed_precision, cfg.checkpoint.pretrained_checkpoint = "bf16_mixed", str(inputs.hf)
    return cfg


def stored(run):
    """All tensors of a run's newest checkpoint, as torch reads them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    folder = run / f"iter_{int((run / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


@pytest.fixture(scope="module", params=[config, sharded], ids=["distributed optimizer", "Megatron-FSDP"])
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


def test_steps_are_those_of_the_small_loop(inputs):
    from qwen3vl_bridge.training.small_loop.loop import train as train_by_the_small_loop

    found = train(config(inputs, None))
    expected = train_by_the_small_loop(config(inputs, None))
    assert [(e["step"], e.keys() - {"mfu"}) for e in found] == [(e["step"], e.keys()) for e in expected]
    worst = max(
        abs(one[name] - other[name]) / max(abs(other[name]), 1e-9)
        for one, other in zip(found, expected, strict=True)
        for name in one.keys() & {"loss", "grad_norm", "valid_loss", "lr", "trained_tokens", "grad_norm_vision_model"}
    )
    print("losses and norms", worst)
    assert worst <= LIMIT


def test_every_validation_reads_the_same_rows(inputs):
    """More of them than there are: each counts once."""
    still = dict(optimizer__lr=0.0, optimizer__min_lr=0.0, validation__eval_interval=1, train__train_iters=3)
    valid = [e["valid_loss"] for e in train(config(inputs, None, **still)) if "valid_loss" in e]
    assert len(valid) == 3 and valid[0] == valid[1] == valid[2]


def test_other_data_are_refused(unbroken, inputs, tmp_path):
    make, _, save = unbroken
    shutil.copytree(save, tmp_path, dirs_exist_ok=True)
    again = make(inputs, tmp_path, train__train_iters=8, dataset__seed=7)
    again.scheduler.override_opt_param_scheduler = True
    with pytest.raises(ValueError, match="the position is of other data than this: found seed 7, expected 1234"):
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
    train(config(inputs, tmp_path), stop_after=3)

    def full(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(side_files.Pretrained, "travel_along", full)
        with pytest.raises(CheckpointError, match="no space"):
            train(config(inputs, tmp_path))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert [path.name for path in tmp_path.iterdir() if "iter_" in path.name] == ["iter_0000003"]
    assert [e["step"] for e in train(config(inputs, tmp_path)) if "loss" in e] == [4, 5, 6]
    assert [e["step"] for e in read_log(tmp_path) if "loss" in e] == [1, 2, 3, 4, 5, 6]


def test_older_checkpoints_go(inputs, tmp_path):
    train(config(inputs, tmp_path, checkpoint__save_interval=2, checkpoint__most_recent_k=2))
    assert sorted(path.name for path in tmp_path.glob("*iter_*")) == ["iter_0000004", "iter_0000006"]
    with pytest.raises(ValueError, match="most_recent_k is 0, expected at least 1"):
        train(config(inputs, tmp_path, checkpoint__most_recent_k=0))
