"""Runs in Megatron-Bridge's own loop with recipes, on one rank: stopped and gone on with, and the 2B's size.

What lives here: the runs and what is asked of them. What may not: running them in one process, which is
`tests/training/running.py`.
"""

from __future__ import annotations

import math
import shutil
import statistics
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.planning.from_config import plan_of
from qwen3vl_bridge.training.metrics import peak_operations

import torch
from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
from qwen3vl_recipes.paths import set_paths
from qwen3vl_recipes.qwen3_vl import qwen3_vl_2b_sft_config

from examples.digits.checkpoint import make_checkpoint
from tests.ranks import forget_models
from tests.training.running import train

from .random_data import write_conversations, write_model_folder
from .results import Finding, Place, at_least, at_most

RECIPES = {"2B": qwen3_vl_2b_sft_config, "digits": qwen3_vl_digits_sft_config}  # the latter under Megatron-FSDP
_STEPS = 10
# A step's loss after going on, relative to the run that was not stopped. Equal on a CPU. In bfloat16 on a GPU the order
# of sums differs from run to run; a state that is not restored shows: the loss falls by a tenth meanwhile.
_RESUMED = {"cpu": 1e-6, "cuda": 5e-3}
_MFU = 0.45  # goal of the 2B


def ten_steps(place: Place, recipe: str) -> list[Finding]:
    """Ten steps; and five, saved, then five more from the checkpoint: the same losses.

    Args:
        place: where.
        recipe: a key of `RECIPES`.
    """
    forget_models()
    hf = make_checkpoint(place.work / "tiny_to_train", seed=1)
    data = write_conversations(place, place.work / "conversations_tiny", 60)
    runs = {name: place.work / f"{recipe}_{name}" for name in ("whole", "stopped")}
    for folder in runs.values():
        shutil.rmtree(folder, ignore_errors=True)

    def configured(name: str) -> Any:
        cfg = set_paths(RECIPES[recipe](), hf_path=hf, data_path=data, pretrained_checkpoint=hf, save=runs[name])
        cfg.model.seq_length = cfg.dataset.seq_length = 2048
        cfg.optimizer.lr, cfg.optimizer.min_lr, cfg.scheduler.lr_warmup_iters = 3e-3, 3e-3, 1
        return _short(cfg, _STEPS)

    whole = train(configured("whole"))
    stopped = train(configured("stopped"), stop_after=_STEPS // 2) + train(configured("stopped"))
    losses, again = ([entry["loss"] for entry in entries] for entries in (whole, stopped))
    if len(losses) != _STEPS or len(again) != _STEPS:
        raise ValueError(f"the runs logged {len(losses)} and {len(again)} steps, expected {_STEPS}")
    worst = max(abs(a / b - 1) for a, b in zip(again, losses, strict=True))
    backend, needed = torch.distributed.get_backend(), {"cpu": "gloo", "cuda": "nccl"}[place.device]
    return [
        Finding("backend", backend, needed, needed in backend),
        at_most("loss after going on, relative", worst, _RESUMED[place.device]),
        at_least("loss that was lost in ten steps, relative", 1 - losses[-1] / losses[0], 0.05),
    ]


def fine_tune(place: Place) -> list[Finding]:
    """The 2B from random weights on random pictures, in packed rows of 8K: pace and memory of whole steps."""
    hf = write_model_folder(place, place.work / "model")
    full = place.size == "full"
    data = write_conversations(place, place.work / "conversations", 400 if full else 60)
    cfg = set_paths(qwen3_vl_2b_sft_config(), hf_path=hf, data_path=data)
    cfg.checkpoint.save = cfg.checkpoint.load = cfg.checkpoint.save_interval = None
    cfg.scheduler.lr_warmup_iters = 1
    if not full:
        cfg.model.seq_length = cfg.dataset.seq_length = 2048
    _short(cfg, 12 if full else 3)
    cfg.train.global_batch_size = 4 if full else 2
    cfg.dataset.num_workers = 4 if full else 0
    held = plan_of(cfg, 1).peak.total
    entries = train(cfg)[2:]  # without those that find kernels
    losses = [entry["loss"] for entry in entries]

    def median(name: str) -> float:
        return statistics.median(entry[name] for entry in entries)

    found = [
        Finding("last loss", f"{losses[-1]:.3f}", "a number", math.isfinite(losses[-1])),
        Finding("tokens a second", f"{median('tokens_per_second'):.0f}"),
        Finding("share of rows that is no padding", f"{median('filled'):.2f}"),
    ]
    if place.device == "cpu":
        return found
    peak = torch.cuda.max_memory_allocated()
    found.append(at_most("peak memory in GiB, the planner's estimate as limit", peak / 2**30, held / 2**30))
    if peak_operations(torch.cuda.get_device_name()) is None:
        return [*found, Finding("TFLOP/s", f"{median('tflops_per_gpu'):.0f}")]
    return [*found, at_least("MFU of whole steps, goal", median("mfu"), _MFU)]


def _short(cfg: Any, steps: int) -> Any:
    """A run of few steps, each in the log, without validation."""
    cfg.train.train_iters, cfg.train.global_batch_size = steps, 2
    cfg.logger.log_interval, cfg.validation.eval_iters, cfg.validation.eval_interval = 1, 0, steps + 1
    cfg.logger.tensorboard_dir, cfg.dataset.num_workers = None, 0
    return cfg
