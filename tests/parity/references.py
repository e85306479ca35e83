"""What transformers and torch make of the matrix's batches in one process: losses, gradients, weights after two steps.

Run once for each model and content, however many ways there are to split it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.qwen3_5.mtp_reference import run_with_mtp
from tests.qwen3_5.tiny import with_mtp

from .batches import Sample, make_samples, run_reference
from .exact_reference import torch_linear_attention

_SETTINGS = "provider.json"

# Contents of the microbatches of a step, one after the other and from the start again.
MATRIX_CONTENTS = {
    "image": ["many images", "one image"],
    "video": ["video"],
    "text": ["text only"],
    "mixed": ["mixed", "text only", "image and video", "one image"],
}
STEPS, MICROBATCHES = 2, 4
# With an epsilon above the noise of gradients, or Adam would take steps of full size where a gradient is zero.
ADAM = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-4)
DECAY, CLIP = 0.1, 1.0


def step_samples(content: str, config: Any, step: int) -> list[list[Sample]]:
    """The samples of each microbatch of a step."""
    kinds = MATRIX_CONTENTS[content]
    first = 1000 * list(MATRIX_CONTENTS).index(content) + 100 * step
    return [make_samples(kinds[i % len(kinds)], config, seed=first + i) for i in range(MICROBATCHES)]


def provider_settings(folder: Path) -> dict[str, Any]:
    """Fields of the provider that a model's references were written for."""
    file = folder / _SETTINGS
    return json.loads(file.read_text()) if file.is_file() else {}


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Say which they are; of these the references know `mtp_loss_scaling_factor`."""
    (folder / _SETTINGS).write_text(json.dumps(settings))


def train_reference(folder: Path, content: str) -> dict[str, Any]:
    """Two steps of AdamW.

    Returns:
        `losses`: the mean loss of each step; `norms`: of the gradient, before it is clipped; `gradients` of the first
        step and `weights` after the last, by name.
    """
    from transformers import AutoModelForImageTextToText

    with torch_linear_attention():
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    factor = provider_settings(folder).get("mtp_loss_scaling_factor", 0.0)
    if factor:
        with_mtp(model, folder)
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = list(model.parameters())
    groups = [
        dict(params=[p for p in parameters if p.ndim > 1], weight_decay=DECAY),
        dict(params=[p for p in parameters if p.ndim <= 1], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, **ADAM)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        microbatches = step_samples(content, model.config, step)
        tokens = sum(sample.loss_mask.sum() for samples in microbatches for sample in samples)
        total = 0.0
        for samples in microbatches:
            loss, whole = run_with_mtp(model, samples, factor) if factor else 2 * run_reference(model, samples)[1:]
            (whole / tokens).backward()
            total += loss.item()
        losses.append(total / tokens.item())
        for p in parameters:  # one that was not used decays all the same
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in named.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).item())
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in named.items()}
    return dict(losses=losses, norms=norms, gradients=gradients, weights=weights)


def save_as_model(folder: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    """Put tensors beside a model as another one of the same kind, for what reads nothing but models."""
    (folder / name).mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", folder / name)
    own = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}  # tied ones share memory
    save_file(own, folder / name / "model.safetensors", metadata={"format": "pt"})
