"""Run on ranks: runs with vision and language on ranks of their own, or of a whole model, in Megatron-Bridge's loop.

torchrun --nproc_per_node N -m tests.training.dist_train.modules_on_ranks OUTPUT HF DATA JOBS

HF is a JSON object with the tiny checkpoint of each family, JOBS a JSON list of `Job`s. The first rank writes what each
rank has seen of each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen3vl_bridge.dist_train.joint_step import OneWayBridge
from qwen3vl_bridge.training.process_groups import leave_groups

import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.model_load_save import load_megatron_model

from tests.parity.topologies import MODULES, split_by
from tests.ranks import begin, leave

from ..conftest import Inputs
from ..running import Entries, replicate, run_bridges_loop

STEPS = 4
HALF = STEPS // 2
SETTINGS = dict(
    dataset__pad_to_multiple_of=8, train__global_batch_size=4, train__train_iters=STEPS, validation__eval_interval=2,
    validation__eval_iters=1, optimizer__lr=1e-3, scheduler__lr_warmup_iters=2, checkpoint__save_interval=HALF,
    checkpoint__dist_ckpt_optim_fully_reshardable=True, logger__log_interval=1,
)  # fmt: skip
FROZEN = dict(model__freeze_vision_model=True, model__freeze_vision_projection=True)
LANGUAGE_FROZEN = dict(model__freeze_language_model=True)


@dataclass
class Job:
    name: str
    split: str | None = None
    opens: bool = False
    family: str = "dense"
    save: str | None = None
    load: str | None = None
    sharded: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, hf: str, data: str) -> Any:
        cfg = Inputs(Path(hf), Path(data), Path("unused")).config(
            None if self.save is None else Path(self.save), **SETTINGS | self.settings
        )
        cfg.checkpoint.pretrained_checkpoint, cfg.checkpoint.load = hf, self.load
        cfg.checkpoint.ckpt_step = None if self.load is None else HALF
        replicate(cfg, distributed=self.sharded)
        cfg.logger.tensorboard_dir = None
        split_by(cfg, MODULES[self.split].fields if self.split else {})
        return cfg


class Follower(Callback):
    """What Megatron-Bridge's loop tells of its steps and evaluations, on a rank that has losses."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float, float]] = []
        self.come_back: list[bool] = []

    def on_train_start(self, context: Any) -> None:
        """Of this rank's bridges between modules, whether gradients come back on each."""
        communicator = getattr(context.state.cfg.model, "_p2p_communicator", None)
        self.come_back = [
            not isinstance(bridge, OneWayBridge)
            for info in getattr(communicator, "rank_module_map", {}).values()
            for bridge in (*info.bridge_comms_as_src_module, *info.bridge_comms_as_dest_module)
        ]

    def on_train_step_end(self, context: Any) -> None:
        if "lm loss" in context.loss_dict:
            self.log.append(("step", float(context.loss_dict["lm loss"]), float(context.grad_norm)))

    def on_eval_end(self, context: Any) -> None:
        self._add("valid", context)

    def on_test_end(self, context: Any) -> None:
        self._add("test", context)

    def _add(self, kind: str, context: Any) -> None:
        if "lm loss" in context.total_loss_dict:
            self.log.append((kind, float(context.total_loss_dict["lm loss"]), 0.0))


def run(job: Job, hf: str, data: str) -> dict[str, Any]:
    follower, entries = Follower(), Entries()
    run_bridges_loop(job.config(hf, data), follower, entries)
    return dict(told=follower.log, log=entries.entries, come_back=follower.come_back)


def opened(job: Job, *_: str) -> dict[str, float]:
    """A checkpoint in Megatron-Bridge's own tools, by its configuration alone; the norms of its parameters."""
    leave_groups()
    model = load_megatron_model(f"{job.load}/iter_{STEPS:07d}", use_cpu_init=True)
    return {name: p.float().norm().item() for chunk in model for name, p in chunk.named_parameters()}


def main(output: str, hf: dict[str, str], data: str, jobs: list[Job]) -> None:
    dist.init_process_group("gloo")  # or Megatron-Bridge's loop would, and take it down at its end
    found = {job.name: (opened if job.opens else run)(job, hf[job.family], data) for job in jobs}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    leave(every, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], [Job(**job) for job in json.loads(sys.argv[4])])
