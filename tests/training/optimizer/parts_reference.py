"""What transformers and torch make of parts of a model that have rates of their own, or rest for the first steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen3vl_bridge.training.optimizer.tower_settings import Qwen3VLTowers

import torch

from tests.parity.batches import run_reference
from tests.parity.references import ADAM, CLIP, DECAY, step_samples

STEPS, CONTENT = 4, "mixed"
TOWERS = dict(
    vision_model_lr=5e-4, vision_projection_lr=2e-3, freeze_language_model_steps=1, freeze_vision_model_steps=2
)
PARTS = ("language_model", "vision_model", "vision_projection")


def part_of(name: str) -> str:
    """By the name of transformers' parameter."""
    if ".visual." not in name:
        return "language_model"
    return "vision_projection" if "merger" in name else "vision_model"


def train_parts(folder: Path) -> dict[str, Any]:
    """Some steps of AdamW on one model.

    Returns:
        `norms`: for each step those of the parts, before clipping, 0 for one that rests; `moved`: for each step the
        parts that did; `weights` after the last step, by name.
    """
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    named = dict(model.named_parameters())
    towers = Qwen3VLTowers(**TOWERS)
    rests = {part: getattr(towers, f"freeze_{part}_steps") for part in PARTS}
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
    norms, moved = [], []
    for step in range(STEPS):
        before = {name: p.detach().clone() for name, p in named.items()}
        optimizer.zero_grad()
        microbatches = step_samples(CONTENT, model.config, step)
        tokens = sum(sample.loss_mask.sum() for samples in microbatches for sample in samples)
        for samples in microbatches:
            (run_reference(model, samples)[1] / tokens).backward()
        for name, p in named.items():
            p.grad = None if step < rests[part_of(name)] else p.grad
        gradients = {
            part: [p.grad for n, p in named.items() if part_of(n) == part and p.grad is not None] for part in PARTS
        }
        norms.append({part: torch.nn.utils.get_total_norm(some).item() for part, some in gradients.items()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        moved.append({part_of(name) for name, p in named.items() if not torch.equal(p, before[name])})
    return dict(norms=norms, moved=moved, weights={name: p.detach().clone() for name, p in named.items()})
