"""Reference results of transformers and torch in one process: losses, gradients, and weights after two steps.

They are computed once for each model and content. With flash-linear-attention and causal-conv1d, transformers' Qwen3.5
would use kernels that may round products to TF32 on a GPU and do not run on a CPU, so references are built without.
"""

import functools
import importlib
import inspect
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from tests.helpers.batches import Sample, make_samples, run_reference
from tests.helpers.noise import SEEDS, allowed, relative, rounded
from tests.models.qwen3_5.tiny import run_with_mtp, with_mtp
from tests.models.qwen4_exp.tiny import as_stored, freeze_indexers

MODULES = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_5", "qwen3_5_moe"))
KERNELS = (
    "causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule",
    "FusedRMSNormGated",
)  # fmt: skip
# Newer releases choose a kernel when the module is imported, and layers call these functions, which wrap it.
CHOSEN_AT_IMPORT = (
    "causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
)  # fmt: skip


@contextmanager
def torch_linear_attention() -> Iterator[None]:
    """Make transformers' models that are built in the body compute linear attention with torch functions."""
    with ExitStack() as stack:
        for module in map(importlib.import_module, MODULES):
            if hasattr(module, "chunk_gated_delta_rule"):
                for name in KERNELS:
                    stack.enter_context(mock.patch.object(module, name, None))
            else:  # for the whole process: the functions are called after the body
                for name in CHOSEN_AT_IMPORT:
                    setattr(module, name, _torch_path(getattr(module, name)))
        yield


def _torch_path(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the torch function under transformers' wrapper, which ignores arguments of kernels as the wrapper does."""
    plain = inspect.unwrap(function)
    parameters = inspect.signature(plain).parameters

    @functools.wraps(plain)
    def call(*args: Any, **given: Any) -> Any:
        return plain(*args, **{name: value for name, value in given.items() if name in parameters})

    return call


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
    """Return fields of the provider for which the references of a model were written."""
    file = folder / _SETTINGS
    return json.loads(file.read_text()) if file.is_file() else {}


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Store these fields; the references depend on `mtp_loss_scaling_factor`."""
    (folder / _SETTINGS).write_text(json.dumps(settings))


def train_reference(folder: Path, content: str, seed: int | None = None) -> dict[str, Any]:
    """Train two steps with AdamW."""
    from transformers import AutoModelForImageTextToText

    with torch_linear_attention():
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    freeze_indexers(model)
    factor = provider_settings(folder).get("mtp_loss_scaling_factor", 0.0)
    if factor:
        with_mtp(model, folder)
    with rounded(model, seed):
        return take_two_steps(model, content, factor)


def take_two_steps(model: torch.nn.Module, content: str, factor: float) -> dict[str, Any]:
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = [p for p in model.parameters() if p.requires_grad]
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
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).item())
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in named.items()}
    return dict(losses=losses, norms=norms, gradients=as_stored(gradients), weights=as_stored(weights))


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], scale: float | None = None) -> float:
    """Return the largest error of any tensor, in units of `scale` or of its own largest entry."""
    tied = {"lm_head.weight"} - found.keys()
    assert found.keys() == expected.keys() - tied, found.keys() ^ expected.keys()
    if scale is None:
        return max(relative(found, expected).values())
    return max((found[name] - expected[name]).abs().max().item() for name in found) / scale


def errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return relative errors of losses and gradient norms, errors of gradients, and errors of weights in units of the
    learning rate. Gradients or weights that were not compared are left out.
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
    """Write the references of a model into its folder."""
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
