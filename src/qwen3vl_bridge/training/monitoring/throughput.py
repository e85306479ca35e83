"""FLOPs of a run's training step, and the peak FLOP/s of its GPU.

What lives here: which parts a run trains, including adapters; finding a GPU by its driver's name. What may not: the
formula (`models/common/flops.py`), the vendor's numbers (`planning/hardware.py`).
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace

from qwen3vl_bridge.models.common.flops import TowerCosts, provider_costs, trained_parts
from qwen3vl_bridge.peft.lora import Qwen3VLParts
from qwen3vl_bridge.planning.hardware import GPUS

import torch
from megatron.bridge.training.config import ConfigContainer

# Variants of a name that are slower than the table's entry: other boards, and parts of a GPU.
_SLOWER = {"PCIE", "NVL", "MIG"}


def step_costs(cfg: ConfigContainer) -> TowerCosts | None:
    """Cost of tokens and patches in a training step of a run.

    Args:
        cfg: its configuration.

    Returns:
        None with adapters that are not this package's: what they train is unknown.
    """
    trained, peft = trained_parts(cfg.model), getattr(cfg, "peft", None)
    if peft is None:
        return provider_costs(cfg.model, trained)
    if not isinstance(peft, Qwen3VLParts):
        return None
    peft = copy.deepcopy(peft)  # it stores which modules it was asked about
    linear = torch.nn.Linear(1, 1, device="meta")

    def rank(layer: str) -> int:
        prefix, _, name = layer.rpartition(".")
        return peft.dim if peft.match(linear, name, prefix) else 0

    return provider_costs(
        cfg.model,
        replace(
            trained,
            language_model=trained.language_model and not peft.freeze_language_model,
            vision_model=trained.vision_model and not peft.freeze_vision_model,
            vision_projection=trained.vision_projection and not peft.freeze_vision_projection,
            rank=rank,
        ),
    )


def peak_operations(device: str) -> float | None:
    """Peak FLOP/s of a GPU in bfloat16, None if it is not in the table.

    Args:
        device: its name, such as "NVIDIA A100-SXM4-40GB".
    """
    words = set(re.split(r"[\s-]+", device.upper()))
    found = [name for name in GPUS if set(name.upper().split("-")) <= words]
    if not found or words & _SLOWER:
        return None
    return GPUS[max(found, key=len)].bf16_flops
