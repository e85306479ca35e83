"""Short runs that train adapters, in either format of checkpoints, and what they have trained."""

import re
from dataclasses import replace
from pathlib import Path

from qwen3vl_bridge.peft.adapter_rows import LINEAR_LAYERS, OF_LINEAR_ATTENTION
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from torch.distributed.tensor import DTensor

from ..conftest import Inputs
from ..running import replicate

FSDP, DIST = FORMATS = ("fsdp_dtensor", "torch_dist")
ALL_PARTS = dict(adapt_vision_model=True, adapt_vision_projection=True)
ALL_LAYERS = dict(target_modules=[*LINEAR_LAYERS, *OF_LINEAR_ATTENTION], **ALL_PARTS)
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
    "linear attention": lambda: Qwen3VLLoRA(dim=4, alpha=8, **ALL_LAYERS),
    "linear attention, DoRA": lambda: Qwen3VLDoRA(dim=4, alpha=8, **ALL_LAYERS),
    "linear attention, adapted experts": lambda: Qwen3VLLoRA(dim=4, alpha=8, adapt_experts=True, **ALL_LAYERS),
}


def model_of(case: str) -> tuple[str, str]:
    return "qwen3_5" if "linear attention" in case else "qwen3_vl", "moe" if "experts" in case else "dense"


def inputs_of(case: str, inputs: Inputs, folders: dict[tuple[str, str], Path]) -> Inputs:
    folder = folders.get(model_of(case))
    return inputs if folder is None else replace(inputs, hf=folder, megatron=folder)


def peft_config(inputs: Inputs, save: Path | None, peft: object, ckpt_format: str = DIST, **settings):
    fast = dict(optimizer__lr=2e-2, optimizer__min_lr=2e-2, validation__eval_interval=0, scheduler__lr_warmup_iters=0)
    cfg = inputs.config(save, **(fast | settings))
    cfg.peft = peft
    if ckpt_format == DIST:
        return replicate(cfg)
    cfg.mixed_precision = "bf16_mixed"
    return cfg


class Trained(Callback):
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_start(self, context: CallbackContext) -> None:
        (chunk,) = context.model
        named = ((re.sub(r"^(module\.)+", "", name), p) for name, p in chunk.named_parameters())
        self._stepped = {name: p for name, p in named if p.requires_grad}

    def on_train_end(self, context: CallbackContext) -> None:
        for name, p in self._stepped.items():
            self.weights[name] = (p.to_local() if isinstance(p, DTensor) else p).detach().float().clone()
