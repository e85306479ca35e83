"""What transformers and torch make of parts of a model that have rates of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen3vl_bridge.training.run_settings import Qwen3VLTowers

import torch

from tests.parity.batches import run_reference
from tests.parity.references import ADAM, CLIP, DECAY, step_samples

STEPS, CONTENT = 4, "mixed"
TOWERS = dict(vision_model_lr=5e-4, vision_projection_lr=2e-3)
PARTS = ("language_model", "vision_model", "vision_projection")


def part_of(name: str) -> str:
    if ".visual." not in name:
        return "language_model"
    return "vision_projection" if "merger" in name else "vision_model"


def train_parts(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    named = dict(model.named_parameters())
    towers = Qwen3VLTowers(**TOWERS)
    groups = [
        dict(
            params=[p for name, p in named.items() if part_of(name) == part and (p.ndim > 1) == decays],
            lr=getattr(towers, f"{part}_lr") or ADAM["lr"],
            weight_decay=DECAY if decays else 0.0,
        )
        for part in PARTS
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, **ADAM)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        microbatches = step_samples(CONTENT, model.config, step)
        tokens = sum(sample.loss_mask.sum() for samples in microbatches for sample in samples)
        for samples in microbatches:
            (run_reference(model, samples)[1] / tokens).backward()
        gradients = {part: [p.grad for name, p in named.items() if part_of(name) == part] for part in PARTS}
        norms.append({part: torch.nn.utils.get_total_norm(some).item() for part, some in gradients.items()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return dict(norms=norms, weights={name: p.detach().clone() for name, p in named.items()})
