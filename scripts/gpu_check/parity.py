"""Logits, loss and every gradient of our model beside transformers' on the same device, in float32 and bfloat16.

What lives here: moving both to the device. What may not: references, batches, what errors are relative to and their
limits, which are those of `tests/parity`.

In float32, without TF32, errors are held against the reference's noise on the device, as in the tests on the CPU: with
megatron-core's local layers, and with Transformer Engine's where a release is installed that attends in float32. In
bfloat16 neither side is right: our distance from the float32 result is held against transformers' own in bfloat16.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.models import rope
from qwen3vl_bridge.models.refusals import PACKED_UNFUSED
from qwen3vl_bridge.models.settings import has_transformer_engine
from qwen3vl_bridge.training.step import to_device

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.utils import get_te_version, is_te_min_version

from examples.digits.checkpoint import make_checkpoint
from tests.parity.batches import CONTENTS, Sample, make_batch, make_samples
from tests.parity.conftest import Pair, Results, make_pair
from tests.parity.one_process import test_bf16, test_parity
from tests.qwen3_5 import tiny
from tests.ranks import forget_models

from .results import Finding, Place, at_most

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
    if kind == "qwen3_5":
        tiny.with_mtp(pair.reference, folder)
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
        expected = pair.reference_results(moved)
        limits = pair.limits(moved, expected)
        for packed in (False, True):
            errors = pair.errors(_run(pair, samples, packed), expected)
            for what, error in errors.items():
                # Of all contents the one that comes nearest to its limit.
                found = error, limits[what]
                before = worst.get(what, (0.0, 1.0))
                worst[what] = max(before, found, key=lambda one: one[0] / one[1])
    return [at_most(f"{name}, {what}", *found) for what, found in worst.items()]


def _run(pair: Pair, samples: list[Sample], packed: bool) -> Results:
    """Ours, gradients by Hugging Face names and on the host."""
    pair.megatron.zero_grad()
    batch = make_batch(samples, pair.config, packed=packed)
    inputs = to_device(batch.local(), pair.megatron)
    loss = (pair.megatron(inputs=inputs) * inputs.loss_mask).sum()
    loss.backward()
    with torch.no_grad():
        logits = test_parity.per_sample(pair.megatron(inputs=inputs.without_labels()), batch)
    return Results(logits, loss.item(), pair.megatron_gradients())


def _bfloat16(place: Place, folder: Path, kind: str) -> list[Finding]:
    pair = _pair(place, folder, kind, params_dtype=torch.bfloat16, bf16=True)
    samples = [one for seed in (4, 5, 6) for one in make_samples("mixed", pair.config, seed)]
    truth = pair.reference_results(_moved(samples, place.device))
    pair.reference.to(torch.bfloat16)
    theirs = pair.reference_results(_moved(samples, place.device, torch.bfloat16))
    found = []
    for packed in (False, True):
        of_logits, of_gradients = test_bf16.distances(_run(pair, samples, packed), theirs, truth)
        how = "packed" if packed else "padded"
        found += [
            at_most(f"bfloat16, {how}, logits: distance in transformers' own", of_logits, test_bf16.LOGITS),
            at_most(f"bfloat16, {how}, gradients: distance in transformers' own", of_gradients, test_bf16.GRADIENT),
        ]
    return found
