"""What transformers and torch make of the matrix's batches in one process: losses, gradients, weights after two steps.

Run once for each model and content, however many ways there are to split it. Where flash-linear-attention and
causal-conv1d are installed, transformers' Qwen3.5 would take their kernels, which may round products to TF32 on a GPU
and do not run on a CPU: a reference is built without them.
"""

import importlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from tests.noise import SEEDS, allowed, relative, rounded
from tests.qwen3_5.tiny import run_with_mtp, with_mtp

from .batches import Sample, make_samples, run_reference

MODULES = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_5", "qwen3_5_moe"))
KERNELS = (
    "causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule",
    "FusedRMSNormGated",
)  # fmt: skip


@contextmanager
def torch_linear_attention() -> Iterator[None]:
    """Have transformers' models that are built in the body compute linear attention by torch alone."""
    with ExitStack() as stack:
        for module in map(importlib.import_module, MODULES):
            for name in KERNELS:
                stack.enter_context(mock.patch.object(module, name, None))
        yield


_SETTINGS = "provider.json"

# Contents of the microbatches of a step, one after the other and from the start again.
MATRIX_CONTENTS = {
    "image": ["many images", "one image"], "video": ["video"], "text": ["text only"],
    "mixed": ["mixed", "text only", "image and video", "one image"],
}  # fmt: skip
STEPS, MICROBATCHES = 2, 4
# With an epsilon above the noise of gradients, or Adam would take steps of full size where a gradient is zero.
ADAM = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-4)
DECAY, CLIP = 0.1, 1.0


def step_samples(content: str, config: Any, step: int) -> list[list[Sample]]:
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


def train_reference(folder: Path, content: str, seed: int | None = None) -> dict[str, Any]:
    """Two steps of AdamW."""
    from transformers import AutoModelForImageTextToText

    with torch_linear_attention():
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    factor = provider_settings(folder).get("mtp_loss_scaling_factor", 0.0)
    if factor:
        with_mtp(model, folder)
    with rounded(model, seed):
        return take_two_steps(model, content, factor)


def take_two_steps(model: torch.nn.Module, content: str, factor: float) -> dict[str, Any]:
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


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], scale: float | None = None) -> float:
    """The largest error of any tensor, in units of `scale` or of its own largest entry."""
    tied = {"lm_head.weight"} - found.keys()
    assert found.keys() == expected.keys() - tied, found.keys() ^ expected.keys()
    if scale is None:
        return max(relative(found, expected).values())
    return max((found[name] - expected[name]).abs().max().item() for name in found) / scale


def errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Of losses and of gradients' norms, relative; of gradients; and of weights, in units of the learning rate.

    What was not looked at, gradients or weights, is left out.
    """
    of_scalars = {
        name: max(abs(a / b - 1) for a, b in zip(found[kind], expected[kind], strict=True))
        for name, kind in (("loss", "losses"), ("grad_norm", "norms"))
    }
    return of_scalars | {
        name: worst(found[kind], expected[kind], scale)
        for name, kind, scale in (("gradient", "gradients", None), ("weight", "weights", ADAM["lr"]))
        if kind in found
    }


def write_references(folder: Path, contents: Iterable[str] = MATRIX_CONTENTS) -> dict[str, float]:
    """Put what runs of a model are compared with beside it."""
    noises, contents = [], list(contents)
    for number, content in enumerate(contents):
        reference = train_reference(folder, content)
        torch.save(reference, folder / f"reference_{content}.pt")
        for kind in ("gradients", "weights"):
            to = folder / f"{kind}_{content}"
            to.mkdir(exist_ok=True)
            shutil.copy(folder / "config.json", to)
            own = {key: t.contiguous().clone() for key, t in reference[kind].items()}  # tied ones share memory
            save_file(own, to / "model.safetensors", metadata={"format": "pt"})
        seeds = SEEDS[number :: len(contents)]
        noises += [errors(train_reference(folder, content, seed), reference) for seed in seeds]
    return allowed(noises)
