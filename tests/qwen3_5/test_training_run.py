"""Whole runs in Megatron-Bridge's loop, split and saved in either format, multi-token prediction trained along.

Each saves its checkpoint; the converter exports it, with nothing else at hand, to the weights that the run had in memory.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from qwen3vl_bridge.checkpoint import export_checkpoint

import pytest
import torch
from safetensors.torch import load_file

from tests.training.chains import on_ranks
from tests.training.journeys import Journey

pytestmark = pytest.mark.slow

# Kind of model, split, and how it is sharded and saved.
RUNS = (
    ("dense", "TP2+SP", dict(distributed=True)),
    ("moe", "TP2+SP+EP2", {}),
    ("3.6", "PP2", {}),
    ("dense", "DP2", dict(fsdp=True)),
    ("moe", "DP2", dict(fsdp=True)),
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_runs_train_save_and_are_exported(qwen3_5_folders, tmp_path):
    from examples.digits.dataset import make_dataset

    make_dataset(data := tmp_path / "data")
    journeys = [
        Journey(
            str(qwen3_5_folders[kind]),
            str(data),
            str(tmp_path / f"run_{number}"),
            split,
            settings=dict(train__train_iters=4, model__mtp_loss_scaling_factor=0.1),
            **sharding,
        )
        for number, (kind, split, sharding) in enumerate(RUNS)
    ]
    found = on_ranks(2, [("export", dict(journey=asdict(one), count=2)) for one in journeys], tmp_path)
    for journey, (log, in_memory) in zip(journeys, found, strict=True):
        assert len(log) == 2
        export_checkpoint(journey.save, exported := tmp_path / "exported" / Path(journey.save).name, progress=False)
        stored, before = weights(exported), weights(Path(journey.hf))
        assert stored.keys() == in_memory.keys() == before.keys()
        for name, tensor in stored.items():
            assert torch.equal(tensor.to(in_memory[name].dtype), in_memory[name]), name
        moved = {name for name, tensor in stored.items() if not torch.equal(tensor.float(), before[name].float())}
        assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= moved
