"""Run on three ranks: runs with vision and language on ranks of their own, in both loops.

torchrun --nproc_per_node 3 -m tests.training.modules_on_ranks OUTPUT HF DATA SCRATCH
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import qwen3vl_bridge
from qwen3vl_bridge.training.loop import train
from qwen3vl_bridge.training.modules import OneWayBridge

import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback

from tests.parity.topologies import MODULES, split_by
from tests.ranks import begin, leave

from .bridges_loop import _finetune, on_cpu
from .conftest import Inputs

STEPS = 4
SETTINGS = dict(
    dataset__pad_to_multiple_of=8,
    train__global_batch_size=4,
    train__train_iters=STEPS,
    validation__eval_interval=2,
    validation__eval_iters=1,
    optimizer__lr=1e-3,
    scheduler__lr_warmup_iters=2,
    checkpoint__save_interval=STEPS,
    logger__log_interval=1,
)
FROZEN = dict(model__freeze_vision_model=True, model__freeze_vision_projection=True)


def config(hf: str, data: str, save: str | None, split: str | None = None, **settings: Any) -> Any:
    """A run, of the whole model or of modules."""
    cfg = Inputs(Path(hf), Path(data), Path("unused")).config(
        None if save is None else Path(save), **SETTINGS | settings
    )
    cfg.checkpoint.pretrained_checkpoint = hf
    cfg.checkpoint.ckpt_format, cfg.ddp.data_parallel_sharding_strategy = "torch_dist", "no_shard"
    cfg.ddp.use_megatron_fsdp = cfg.ddp.use_distributed_optimizer = False
    cfg.optimizer.use_distributed_optimizer = False
    cfg.ddp.overlap_param_gather = cfg.ddp.overlap_grad_reduce = False
    cfg.logger.tensorboard_dir = None
    split_by(cfg, MODULES[split].fields if split else {})
    return cfg


class Follower(Callback):
    """What Megatron-Bridge's loop tells of its steps, on a rank that has losses."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def on_train_step_end(self, context: Any) -> None:
        """Loss and gradients' norm."""
        if "lm loss" in context.loss_dict:
            self.steps.append((float(context.loss_dict["lm loss"]), float(context.grad_norm)))


def bridges_loop(hf: str, data: str, split: str) -> list[tuple[float, float]]:
    """Megatron-Bridge's own `finetune()`, as a user's script calls it; its steps."""
    finetune, cfg, follower = _finetune(), config(hf, data, None, split, validation__eval_iters=0), Follower()
    cfg.dist.distributed_backend = "gloo"
    with on_cpu():
        finetune(cfg, qwen3vl_bridge.forward_step, callbacks=[*qwen3vl_bridge.training_callbacks(cfg), follower])
    return follower.steps


def small_loop(hf: str, data: str, save: str | None, split: str, **settings: Any) -> tuple[list, list[bool]]:
    """The small loop's log; and of this rank's bridges between modules, whether gradients come back on each."""
    cfg = config(hf, data, save, split, **settings)
    log = train(cfg)
    return log, [
        not isinstance(bridge, OneWayBridge)
        for info in cfg.model._p2p_communicator.rank_module_map.values()
        for bridge in (*info.bridge_comms_as_src_module, *info.bridge_comms_as_dest_module)
    ]


def main(output: str, hf: str, data: str, scratch: str) -> None:
    """The first rank writes what each has seen."""
    dist.init_process_group("gloo")  # or Megatron-Bridge's loop would, and take it down at its end
    found = {
        "bridge, 2 + 1": bridges_loop(hf, data, "2 + 1"),
        "bridge, 1 + DP2": bridges_loop(hf, data, "1 + DP2"),
        "small, 2 + 1": small_loop(hf, data, f"{scratch}/small", "2 + 1"),
        "small, 1 + DP2": small_loop(hf, data, None, "1 + DP2"),
        "frozen, 1 + PP2": small_loop(hf, data, None, "1 + PP2", **FROZEN),
    }
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    leave(every, output)


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:])
