"""Logits, loss and every gradient of our model beside transformers' on the same device, in float32 and bfloat16.

What lives here: moving both to the device, and the limits. What may not: references, batches and what errors are
relative to, which are those of `tests/parity` and `tests/qwen3_5`.

In float32 errors are held against the limits of the tests on the CPU, without TF32: with megatron-core's local layers,
and with Transformer Engine's where a release is installed that attends in float32. In bfloat16 neither side is right:
our distance from the float32 result is held against transformers' own distance in bfloat16.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.models.common import rope
from qwen3vl_bridge.models.common.settings.fields import has_transformer_engine
from qwen3vl_bridge.models.common.settings.kernels import PACKED_UNFUSED
from qwen3vl_bridge.training.step import to_device

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.utils import get_te_version, is_te_min_version

from examples.digits.checkpoint import make_checkpoint
from tests.parity.batches import CONTENTS, Sample, make_batch, make_samples, run_reference
from tests.parity.conftest import Pair, make_pair
from tests.parity.one_process import test_bf16, test_parity
from tests.qwen3_5 import tiny
from tests.qwen3_5.model import test_parity as qwen3_5
from tests.ranks import forget_models

from .results import Finding, Place, at_most

Errors = dict[str, float]
_LOCAL = dict(transformer_impl="local", moe_grouped_gemm=False, moe_permute_fusion=False)


def check(place: Place, kind: str) -> list[Finding]:
    """All contents, padded and packed.

    Args:
        place: where.
        kind: "dense", "moe" or "qwen3_5".
    """
    forget_models()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folder = place.work / f"tiny_{kind}"
    if kind == "qwen3_5":
        tiny.make_checkpoint(folder)
    else:
        make_checkpoint(folder, seed=3, moe=kind == "moe")
    findings = _float32(place, folder, kind, "float32", _LOCAL)
    if HAVE_TE and place.device == "cuda":
        name = "float32, Transformer Engine"
        if is_te_min_version(PACKED_UNFUSED):
            findings += _float32(place, folder, kind, name, {})
        else:
            findings.append(Finding(name, f"not run: {get_te_version()} has no attention for it"))
    return [*_rotation(place.device), *findings, *_bfloat16(place, folder, kind)]


def _rotation(device: str) -> list[Finding]:
    """Heads of the 8B's size rotated in every way of this machine: errors relative to those of transformers' rounding.

    The formula is compiled by torch on CUDA. A model uses the kernel with Transformer Engine's layers.
    """
    random = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 4096, (512, 1, 1), generator=random)
    angles = positions * rope.inverse_frequencies(128, 5e6, torch.device("cpu"))
    heads = [torch.randn(512, 1, count, 128, generator=random).bfloat16() for count in (32, 8)]
    truth = rope.rotate(*(one.double() for one in heads), rope.rotation(angles, torch.float64, fused=False))
    theirs = test_bf16.distance(rope.rotate(*heads, rope.rotation(angles, torch.bfloat16, fused=False)), truth)
    ways, found = {"by formula": False}, []
    if has_transformer_engine() and device == "cuda":
        ways["by Transformer Engine's kernel"] = True
    moved = [one.to(device) for one in heads]
    for way, fused in ways.items():
        turned = rope.rotate(*moved, rope.rotation(angles.to(device), torch.float32, fused=fused))
        error = test_bf16.distance([one.cpu() for one in turned], truth) / theirs
        found.append(at_most(f"bfloat16, rotation {way}: distance in transformers' own", error, 1.0))
    return found


def _pair(place: Place, folder: Path, kind: str, **settings: Any) -> Pair:
    balance = {"moe_aux_loss_coeff": 0.0} if kind == "moe" else {}  # the reference's loss has no such term
    pair = make_pair(folder, **balance, **settings)
    pair.megatron.to(place.device)
    pair.reference.to(place.device)
    return pair


def _moved(samples: list[Sample], device: str, dtype: torch.dtype = torch.float32) -> list[Sample]:
    """Samples for the reference."""
    return [
        dataclasses.replace(
            one,
            ids=one.ids.to(device),
            loss_mask=one.loss_mask.to(device),
            pixels={name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in one.pixels.items()},
        )
        for one in samples
    ]


def _float32(place: Place, folder: Path, kind: str, name: str, layers: dict[str, Any]) -> list[Finding]:
    pair, worst = _pair(place, folder, kind, **layers), dict[str, tuple[float, float]]()
    contents = ("mixed", "image and video") if place.size == "tiny" else CONTENTS
    for content in contents:
        samples = make_samples(content, pair.config, seed=3)
        moved = _moved(samples, place.device)
        limits = _limits(pair, moved, kind)
        pair.zero_grad()
        logits, loss = run_reference(pair.reference, moved)
        loss.backward()
        for packed in (False, True):
            errors = _errors(pair, samples, packed, logits, loss.item())
            for what, error in errors.items():
                # Of all contents the one that comes nearest to its limit.
                found = error, limits[what]
                before = worst.get(what, (0.0, 1.0))
                worst[what] = max(before, found, key=lambda one: one[0] / one[1])
    return [at_most(f"{name}, {what}", *found) for what, found in worst.items()]


def _limits(pair: Pair, samples: list[Sample], kind: str) -> Errors:
    """As the tests on the CPU have them."""
    if kind != "qwen3_5":
        return {"logits": test_parity.LOGITS, "loss": test_parity.LOSS, "gradients": test_parity.GRADIENT}
    noise = qwen3_5.noise(pair, samples, qwen3_5.reference(pair, samples))
    (logits, least_of_logits), (gradient, least) = qwen3_5.LOGITS, qwen3_5.GRADIENT
    return {
        "logits": max(logits * noise[0], least_of_logits),
        "loss": qwen3_5.LOSS,
        "gradients": max(gradient * noise[1], least),
    }


def _run(pair: Pair, samples: list[Sample], packed: bool) -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
    """Our logits of each sample, the summed loss, and gradients by Hugging Face names, on the host."""
    pair.megatron.zero_grad()
    batch = make_batch(samples, pair.config, packed=packed)
    inputs = to_device(batch.local(), pair.megatron)
    loss = (pair.megatron(inputs=inputs) * inputs.loss_mask).sum()
    loss.backward()
    with torch.no_grad():
        logits = test_parity.per_sample(pair.megatron(inputs=inputs.without_labels()), batch)
    return logits, loss.item(), {name: one.cpu() for name, one in pair.megatron_gradients().items()}


def _errors(pair: Pair, samples: list[Sample], packed: bool, logits: list[torch.Tensor], loss: float) -> Errors:
    found, own_loss, gradients = _run(pair, samples, packed)
    expected = {name: one.cpu() for name, one in pair.reference_gradients().items()}
    return {
        "logits": qwen3_5.largest(found, logits),
        "loss": abs(own_loss / loss - 1),
        "gradients": max(
            ((one - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6)).item()
            for name, one in gradients.items()
            if name in expected  # a tied output layer has its gradient in the embedding's
        ),
    }


def _bfloat16(place: Place, folder: Path, kind: str) -> list[Finding]:
    pair = _pair(place, folder, kind, params_dtype=torch.bfloat16, bf16=True)
    samples = [one for seed in (4, 5, 6) for one in make_samples("mixed", pair.config, seed)]
    true_logits, true_gradients = test_bf16.reference_results(pair, _moved(samples, place.device))
    pair.reference.to(torch.bfloat16)
    moved = _moved(samples, place.device, torch.bfloat16)
    their_logits, their_gradients = test_bf16.reference_results(pair, moved)
    truth = {name: one.cpu() for name, one in true_gradients.items()}
    found = []
    for packed in (False, True):
        logits, _, gradients = _run(pair, samples, packed)
        names = [name for name in truth if name in gradients]
        of_logits = test_bf16.distance(logits, true_logits) / test_bf16.distance(their_logits, true_logits)
        of_gradients = test_bf16.distance(
            [gradients[name] for name in names], [truth[name] for name in names]
        ) / test_bf16.distance([their_gradients[name].cpu() for name in names], [truth[name] for name in names])
        how = "packed" if packed else "padded"
        found += [
            at_most(f"bfloat16, {how}, logits: distance in transformers' own", of_logits, test_bf16.LOGITS),
            at_most(f"bfloat16, {how}, gradients: distance in transformers' own", of_gradients, test_bf16.GRADIENT),
        ]
    return found
