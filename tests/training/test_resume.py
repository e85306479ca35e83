"""A run that was interrupted goes on as if it had not been: the same losses to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .conftest import losses, read_log


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    """Six steps at once: the log, and the folder of the run."""
    from qwen3vl_bridge.training.small_loop.loop import train

    save = tmp_path_factory.mktemp("unbroken")
    return train(inputs.config(save)), save


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, read by torch."""
    from qwen3vl_bridge.training.small_loop.checkpoint import latest

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(latest(folder)).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=latest(folder), no_dist=True)
    return tensors


def test_two_halves_are_the_whole(inputs, unbroken, tmp_path):
    from qwen3vl_bridge.training.small_loop.loop import train

    log, save = unbroken
    first = train(inputs.config(tmp_path), stop_after=3)
    second = train(inputs.config(tmp_path))
    assert losses([e for e in first + second if "loss" in e]) == losses([e for e in log if "loss" in e])
    halves, whole = stored(tmp_path), stored(save)
    assert halves.keys() == whole.keys() and len(whole) > 300
    assert all(torch.equal(halves[key], whole[key]) for key in whole)


def test_a_model_with_experts_goes_on_as_well(inputs, moe_folder, tmp_path, monkeypatch):
    """From its initial weights; its experts are stepped by an optimizer of their own."""
    from qwen3vl_bridge.training.small_loop.loop import train

    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    # As a backward pass of somebody's in this process would leave it.
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    moe = replace(inputs, hf=moe_folder)
    fresh = dict(checkpoint__pretrained_checkpoint=None)
    whole = train(moe.config(tmp_path / "whole", **fresh))
    first = train(moe.config(tmp_path / "halves", **fresh), stop_after=3)
    second = train(moe.config(tmp_path / "halves", **fresh))
    steps = [e for e in whole if "loss" in e]
    assert losses([e for e in first + second if "loss" in e]) == losses(steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    halves, expected = stored(tmp_path / "halves"), stored(tmp_path / "whole")
    assert halves.keys() == expected.keys() and any("experts.linear_fc1.weight5_w" in key for key in expected)
    assert all(torch.equal(halves[key], expected[key]) for key in expected)


def test_the_log_on_disk_is_the_log(unbroken):
    log, save = unbroken
    assert losses(read_log(save)) == losses(log)
    assert [e["step"] for e in log if "valid_loss" in e] == [4, 6]


def test_bfloat16_resumes_from_its_float32_weights(inputs, tmp_path):
    from qwen3vl_bridge.training.small_loop.loop import train

    half = dict(
        model__bf16=True,
        model__params_dtype=torch.bfloat16,
        model__pipeline_dtype=torch.bfloat16,
        model__autocast_dtype=torch.bfloat16,
        optimizer__bf16=True,
        optimizer__params_dtype=torch.bfloat16,
        train__train_iters=4,
        checkpoint__save_interval=2,
        validation__eval_interval=0,
    )
    whole = train(inputs.config(tmp_path / "whole", **half))
    first = train(inputs.config(tmp_path / "halves", **half), stop_after=2)
    second = train(inputs.config(tmp_path / "halves", **half))
    assert losses(first + second) == losses(whole)
    weights = {key: t for key, t in stored(tmp_path / "whole").items() if key.startswith("model.")}
    assert {t.dtype for t in weights.values()} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in weights.values())
