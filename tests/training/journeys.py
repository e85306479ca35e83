"""Run on ranks: a run goes from one way to split the model to the next, by its checkpoints.

    torchrun --nproc_per_node N -m tests.training.journeys OUTPUT CASES

CASES is a JSON list of [what, settings]; `what` is a function of this module that begins with `do_`. Rank 0 writes what
each returns to OUTPUT.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen3vl_bridge.training.checkpointing.optimizer_state import MOMENTS, adam_states
from qwen3vl_bridge.training.small_loop import checkpoint
from qwen3vl_bridge.training.small_loop.loop import set_up, train_step
from qwen3vl_bridge.training.small_loop.setup import Run

import torch
from megatron.bridge import AutoBridge
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from tests.model.torch_dist_chain import PADDED
from tests.parity.topologies import MODULES, TOPOLOGIES, split_by
from tests.ranks import begin, leave

from .conftest import Inputs

SPLITS = {name: topology.fields for name, topology in (TOPOLOGIES | MODULES).items()}
SPLITS |= {"TP2+SP, padded vocabulary": PADDED}
LOGGED = ("step", "loss", "grad_norm")
# Rows of the same documents at every split; four microbatches, for data-parallel ranks and interleaved stages.
COMMON = dict(
    dataset__pad_to_multiple_of=8,
    train__global_batch_size=4,
    validation__eval_interval=0,
    optimizer__lr=1e-3,
    scheduler__lr_warmup_iters=2,
)


@dataclass
class Journey:
    """Where a run is, and where it goes.

    Attributes:
        hf: Hugging Face folder of its model.
        data: its data.
        save: its folder.
        split: one of SPLITS; None for the whole model.
        ckpt_format: that it saves in.
        pretrained: first weights.
        settings: others, written `train__train_iters`.
    """

    hf: str
    data: str
    save: str | None
    split: str | None = None
    ckpt_format: str = "fsdp_dtensor"
    pretrained: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        """Its configuration."""
        cfg = Inputs(Path(self.hf), Path(self.data), Path("unused")).config(
            None if self.save is None else Path(self.save), **COMMON | self.settings
        )
        cfg.checkpoint.pretrained_checkpoint = self.pretrained
        cfg.checkpoint.ckpt_format = self.ckpt_format
        if self.ckpt_format == "torch_dist":
            cfg.ddp.use_megatron_fsdp = False
            cfg.ddp.data_parallel_sharding_strategy = "no_shard"
        split_by(cfg, SPLITS[self.split] if self.split else {})
        cfg.guard = None  # steps are taken one by one here, without callbacks
        return cfg


def steps(run: Run, count: int) -> list[list[float]]:
    """What is logged of so many steps."""
    return [[entry[name] for name in LOGGED] for entry in (train_step(run) for _ in range(count))]


def do_go_on(journey: dict[str, Any], count: int) -> list[list[float]]:
    """Load what is there, make so many steps, save."""
    run = set_up(Journey(**journey).config())
    log = steps(run, count)
    checkpoint.save(run.cfg.checkpoint.save, run)
    return log


def do_export(journey: dict[str, Any], count: int) -> dict[str, torch.Tensor]:
    """As `do_go_on`; weights under Hugging Face names, of the model in memory."""
    run = set_up(Journey(**journey).config())
    steps(run, count)
    checkpoint.save(run.cfg.checkpoint.save, run)
    bridge = AutoBridge.from_hf_pretrained(journey["hf"])
    return {name: t.clone() for name, t in bridge.export_hf_weights(run.model, cpu=True, show_progress=False)}


def do_first_step(journey: dict[str, Any]) -> list[list[float]]:
    """From first weights, without saving."""
    return steps(set_up(Journey(**journey).config()), 1)


def draws(run: Run) -> list[torch.Tensor]:
    """Numbers of both generators, which differ from one tensor-parallel rank to the next in the second."""
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(3)
    return [torch.rand(3), tracked]


def everything(run: Run) -> list[torch.Tensor]:
    """Copies of this rank's weights and moments."""
    states = adam_states(run.optimizer)
    found = [p for chunk in run.model for p in chunk.parameters()]
    return [t.detach().clone() for t in found + [s[moment] for s in states.values() for moment in MOMENTS]]


def do_interrupt(journey: dict[str, Any], count: int) -> bool:
    """Whether a run that is interrupted goes on as one that is not, to the last bit on every rank."""
    run = set_up(Journey(**journey).config())
    steps(run, count)
    draws(run)
    checkpoint.save(run.cfg.checkpoint.save, run)
    expected = [steps(run, count), draws(run), everything(run)]
    torch.rand(5)
    again = set_up(Journey(**journey).config())
    assert again.progress.step == count
    found = [steps(again, count), draws(again), everything(again)]
    same = found[0] == expected[0] and all(
        torch.equal(one, other)
        for ours, theirs in zip(found[1:], expected[1:], strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
    answers = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, same)
    return all(answers)


def main(output: str, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """One case after the other."""
    found = []
    for what, settings in cases:
        found.append(globals()[f"do_{what}"](**settings))
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]))
