"""Short runs that train adapters, and what they have saved."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.dcp.metadata import read_metadata
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA

import torch
import torch.distributed.checkpoint as dcp

from .conftest import Inputs

FORMATS = ("fsdp_dtensor", "torch_dist")
ALL_PARTS = dict(adapt_vision_model=True, adapt_vision_projection=True)
CASES = {
    "LoRA": lambda: Qwen3VLLoRA(dim=4, alpha=8, **ALL_PARTS),
    "DoRA": lambda: Qwen3VLDoRA(dim=4, alpha=8, **ALL_PARTS),
    "trained mergers": lambda: Qwen3VLLoRA(dim=4, alpha=8, freeze_vision_projection=False),
    "some layers": lambda: Qwen3VLLoRA(dim=4, target_modules=["*.layers.1.*.linear_qkv", "*.layers.2.*.linear_fc1"]),
    "experts": lambda: Qwen3VLLoRA(dim=4, alpha=8, **ALL_PARTS),
    "adapted experts": lambda: Qwen3VLLoRA(dim=4, alpha=8, adapt_experts=True, **ALL_PARTS),
    "experts of some layers": lambda: Qwen3VLLoRA(
        dim=4, adapt_experts=True, target_modules=["*.layers.2.*.linear_fc*", "*.layers.1.*.linear_qkv"]
    ),
}
WITH_EXPERTS = {case for case in CASES if "experts" in case}


def peft_config(inputs: Inputs, save: Path | None, peft: object, **settings):
    """The shortened digits recipe with adapters; settings as of `Inputs.config`."""
    fast = dict(optimizer__lr=2e-2, optimizer__min_lr=2e-2, validation__eval_interval=0)
    cfg = inputs.config(save, **(fast | settings))
    cfg.peft = peft
    cfg.guard = None  # tests take steps one by one too, without callbacks
    return cfg


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an iteration's folder, read by torch."""
    tensors = {
        key: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for key, (spec, _) in read_metadata(folder).tensors.items()
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def trained_and_saved(inputs: Inputs, case: str, folder: Path, steps: int = 3):
    """A run after some steps, saved in both formats; the run."""
    from qwen3vl_bridge.training.small_loop.loop import set_up, train_step

    run = set_up(peft_config(inputs, folder / "fsdp_dtensor", CASES[case]()))
    for _ in range(steps):
        train_step(run)
    save_both(run, folder)
    return run


def save_both(run, folder: Path) -> None:
    """Save a run in both formats, to folders of these names."""
    from qwen3vl_bridge.training.small_loop import checkpoint

    for ckpt_format in FORMATS:
        run.cfg.checkpoint.ckpt_format = ckpt_format
        checkpoint.save(folder / ckpt_format, run)
