"""Complete runs of distillation on conversations about images: they resume, and their checkpoints are the student's."""

from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import export_checkpoint

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.distillation_provider import convert_to_distillation_provider
from safetensors.torch import load_file

from tests.frameworks.modelopt.support import Recipe, make_larger
from tests.training.running import Inputs, losses, replicated, sharded, stored, train


@pytest.fixture(scope="module")
def larger(tmp_path_factory) -> Path:
    return make_larger(tmp_path_factory.mktemp("larger"))


def distilling(make, inputs: Inputs, teacher: Path, save: Path, **settings: Any) -> Any:
    cfg = make(inputs, save, **settings)
    provider = AutoBridge.from_hf_pretrained(str(teacher)).to_megatron_provider(load_weights=True)
    provider.seq_length = cfg.model.seq_length
    kd = Recipe(hidden="mse").settings("language_model.")
    cfg.model = convert_to_distillation_provider(cfg.model, provider, kd)
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("make", [replicated, sharded], ids=["distributed optimizer", "Megatron-FSDP"])
def test_resumed_distillation_run_equals_uninterrupted_run(make, inputs, larger, tmp_path):
    """With a part of the loss on hidden states, whose fit to the teacher's width is trained, saved and not exported."""
    whole = train(distilling(make, inputs, larger, tmp_path / "whole"))
    first = train(distilling(make, inputs, larger, tmp_path / "halves"), stop_after=3)
    second = train(distilling(make, inputs, larger, tmp_path / "halves"))
    assert losses(first + second) == losses(whole)
    trained = [entry["loss"] for entry in whole if "loss" in entry]
    assert len(trained) == 6 and trained[-1] < 0.9 * trained[0]
    halves, tensors = stored(tmp_path / "halves"), stored(tmp_path / "whole")
    assert halves.keys() == tensors.keys()
    assert all(torch.equal(halves[key], tensors[key]) for key in tensors)
    assert any("_loss_modules" in key for key in tensors) and not any("teacher" in key for key in tensors)
    export_checkpoint(tmp_path / "whole", tmp_path / "hf", progress=False)
    exported, student = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", inputs.hf))
    assert {name: x.shape for name, x in exported.items()} == {name: x.shape for name, x in student.items()}
    assert any(not torch.equal(exported[name], student[name]) for name in student)
