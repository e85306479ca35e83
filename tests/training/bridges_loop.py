"""Run Megatron-Bridge's `finetune()` from given weights, in this process or on ranks.

As a program for torchrun: -m tests.training.bridges_loop OUTPUT STARTS, where STARTS is a JSON list of `Start`s.
"""

import json
import logging
import sys
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import qwen3vl_bridge
from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.training import callbacks

import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.training.callbacks import Callback

from tests.helpers.ranks import begin, leave
from tests.training.running import configured, messages, run_bridges_loop

# The same rows with any parallel layout, and a learning rate that does not depend on the last step.
COMMON = dict(
    dataset__pad_to_multiple_of=8, train__global_batch_size=4, validation__eval_iters=0, optimizer__lr=1e-3,
    optimizer__min_lr=1e-3, scheduler__lr_decay_style="constant", scheduler__lr_warmup_iters=0,
    scheduler__override_opt_param_scheduler=True,
)  # fmt: skip


@dataclass
class Start:
    name: str
    hf: str
    data: str
    weights: str | None
    save: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    fsdp: bool = False
    peft: dict[str, Any] | None = None
    bf16: bool = False
    distributed: bool = False

    def config(self) -> Any:
        cfg = configured(
            *(self.hf, self.data, self.weights, self.save, COMMON | self.settings),
            fsdp=self.fsdp, bf16=self.bf16, distributed=self.distributed,
        )  # fmt: skip
        if self.peft is not None:
            cfg.peft = qwen3vl_bridge.Qwen3VLLoRA(**self.peft)
        return cfg


class Follower(Callback):
    def __init__(self, start: Start) -> None:
        self.start, self.first_step, self.weights = start, None, None
        self.log: list[tuple[float, float]] = []

    def on_train_start(self, context: Any) -> None:
        self.first_step = context.state.train_state.step
        if not self.start.fsdp:
            bridge = AutoBridge.from_hf_pretrained(self.start.hf)
            exported = bridge.export_hf_weights(context.model, cpu=True, show_progress=False)
            self.weights = {name: t.clone() for name, t in exported}

    def on_train_step_end(self, context: Any) -> None:
        self.log.append((float(context.loss_dict["lm loss"]), float(context.grad_norm)))


def run(start: Start) -> dict[str, Any]:
    cfg, follower = start.config(), Follower(start)
    try:
        said = messages("qwen3vl_bridge", logging.WARNING)
        with (
            said as warnings,
            mock.patch.object(callbacks, "publish_metrics", wraps=callbacks.publish_metrics) as published,
        ):
            run_bridges_loop(cfg, follower)
    except (CheckpointError, ValueError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    accuracies = [metrics["accuracy"] for (_, metrics), _ in published.call_args_list]
    return {
        "first_step": follower.first_step, "weights": follower.weights, "log": follower.log, "accuracy": accuracies,
        "warnings": warnings,
    }  # fmt: skip


def run_all(starts: list[Start]) -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    return {start.name: run(start) for start in starts}


if __name__ == "__main__":
    begin()
    leave(run_all([Start(**start) for start in json.loads(sys.argv[2])]), sys.argv[1])
