"""Whole runs in Megatron-Bridge's loop, split and saved in either format, multi-token prediction trained along.

Each saves its checkpoint, and the converter exports it, with nothing else at hand, to the weights that the run had in
memory. Weights of Megatron-FSDP are not looked at there: gloo gathers no parts of several sizes.
"""

from dataclasses import asdict
from pathlib import Path

from qwen3vl_bridge.checkpoint import export_checkpoint

import pytest
import torch
from safetensors.torch import load_file

from tests.training.checkpointing.journeys import Journey, on_ranks

pytestmark = pytest.mark.slow

# Kind of model, split, what a token's MTP loss weighs (0: it is kept), and how the run is sharded and saved.
RUNS = {
    2: (
        ("dense", "TP2+SP", 0.1, dict(distributed=True)),
        ("moe", "TP2+SP+EP2", 0.1, {}),
        ("3.6", "PP2", 0.1, {}),
        ("dense", "DP2", 0.1, dict(fsdp=True)),
        ("moe", "DP2", 0.1, dict(fsdp=True)),
        ("moe", "PP2", 0.0, {}),
        ("dense", "DP2", 0.0, dict(distributed=True)),
        ("dense", "TP2+SP", 0.1, dict(bf16=True, distributed=True)),
        ("moe", "DP2", 0.1, dict(bf16=True)),
        ("dense", "PP2+VPP2", 0.0, dict(bf16=True, distributed=True)),
        ("moe", "DP2", 0.0, dict(fsdp=True)),
    ),
    4: (("dense", "TP4+SP", 0.1, dict(distributed=True)),),  # two ranks to a query group
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("ranks", RUNS)
def test_runs_train_save_and_are_exported(qwen3_5_folders, digits, tmp_path, ranks):
    journeys = [
        Journey(
            str(qwen3_5_folders[kind]),
            str(digits),
            str(tmp_path / f"run_{number}"),
            split,
            settings=dict(train__train_iters=4, model__mtp_loss_scaling_factor=factor),
            **sharding,
        )
        for number, (kind, split, factor, sharding) in enumerate(RUNS[ranks])
    ]
    cases = [("go_on" if one.fsdp else "export", dict(journey=asdict(one), count=2)) for one in journeys]
    for journey, result in zip(journeys, on_ranks(ranks, cases, tmp_path), strict=True):
        log, in_memory = (result, {}) if journey.fsdp else result
        assert len(log) == 2
        export_checkpoint(journey.save, exported := tmp_path / "exported" / Path(journey.save).name, progress=False)
        stored, before = weights(exported), weights(Path(journey.hf))
        assert stored.keys() == before.keys() and (journey.fsdp or stored.keys() == in_memory.keys())
        for name, tensor in in_memory.items():
            assert torch.equal(stored[name], tensor), name
        moved = {name for name, tensor in stored.items() if not torch.equal(tensor.float(), before[name].float())}
        mtp = {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"}
        if journey.settings["model__mtp_loss_scaling_factor"]:
            assert mtp <= moved
        else:
            assert "model.language_model.norm.weight" in moved
            in_16_bits = journey.fsdp or journey.bf16
            rounded = {name for name in before if name.startswith("mtp.") and in_16_bits}  # to bfloat16, and no more
            assert not {name for name in moved - rounded if name.startswith("mtp.")}
            assert all(torch.equal(stored[name].bfloat16(), before[name].bfloat16()) for name in rounded)
