"""Microbatches of pairs, and their loss and gradients by transformers, one answer after the other."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import DocumentGroups, TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.training.objective_settings import ObjectiveConfig

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.batches import Sample, make_batch, make_samples
from tests.helpers.noise import rounded
from tests.parity.references import MICROBATCHES, torch_linear_attention

DESIRABLE = (True, False, False, True)  # labels of the records of a microbatch, for KTO
CONTENTS = ("mixed", "text only", "image and video", "one image")


def microbatches_of_pairs(config: Any) -> list[list[Sample]]:
    """Return the answers of each microbatch: chosen and rejected in turn, of different lengths and images.

    The last pair of the second microbatch has no answer, like an unreadable record.
    """
    found = []
    for number in range(MICROBATCHES):
        sides = [make_samples(CONTENTS[number], config, seed=50 * number + side) for side in (1, 2)]
        found.append([sample for pair in zip(*sides, strict=True) for sample in pair])
    found[1][-1] = dataclasses.replace(found[1][-1], loss_mask=torch.zeros_like(found[1][-1].loss_mask))
    return found


def reference_logps(microbatch: int, pairs: int) -> Tensor:
    """Return log-probabilities [pairs, 2] of a reference model that is no model."""
    rng = torch.Generator().manual_seed(microbatch)
    return -40 - 20 * torch.rand(pairs, 2, dtype=torch.float64, generator=rng)


def batches(
    config: Any, multiple: int, *, with_reference: bool, tokens: int | None = None, kind: str = "dpo"
) -> Iterator[TokenBatch]:
    """Yield the microbatches as packed rows, for DPO, or for KTO with labels `DESIRABLE`."""
    desirable = DESIRABLE if kind == "kto" else None
    for number, samples in enumerate(microbatches_of_pairs(config)):
        lengths = [-(-len(sample.ids) // multiple) * multiple for sample in samples]
        layout = SequenceLayout.packed_row(
            [len(sample.ids) for sample in samples], multiple=multiple, total=tokens or sum(lengths) + multiple
        )
        batch, pairs = make_batch(samples, config, layout=layout), len(samples) // 2
        known = reference_logps(number, pairs) if with_reference else None
        groups = DocumentGroups(
            "dpo" if desirable is None else "kto", (2,) * pairs, reference_logps=known,
            is_desirable=None if desirable is None else torch.tensor(desirable[:pairs], dtype=torch.float64),
        )  # fmt: skip
        yield dataclasses.replace(batch, groups=groups)


def logp(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Return the log-probability of an answer."""
    ids = sample.ids[None]
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **sample.pixels).logits[0]
    return -(F.cross_entropy(logits, sample.labels, reduction="none").double() * sample.loss_mask).sum()


def loss_of_pair(
    settings: ObjectiveConfig, chosen: Tensor, rejected: Tensor, reference: Tensor, counts: list
) -> Tensor:
    """Return the loss of a pair, written again from the papers."""
    ratio, smoothing = (chosen - reference[0]) - (rejected - reference[1]), settings.label_smoothing
    if settings.loss_type == "ipo":
        ratio = (chosen - reference[0]) / counts[0] - (rejected - reference[1]) / counts[1]
        loss = (ratio - 0.5 / settings.beta).square()
    else:
        right, wrong = ((1 + (-sign * settings.beta * ratio).exp()).log() for sign in (1, -1))
        loss = (1 - smoothing) * right + smoothing * wrong
        if settings.loss_type == "robust":
            loss = ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return loss - (settings.rpo_alpha or 0.0) * chosen / counts[0]


def loss_of_batch(
    model: torch.nn.Module, settings: ObjectiveConfig, reference: Callable[[list[Sample]], Tensor] | None = None
) -> dict[str, Any]:
    """Return the loss of a global batch with its graph, the number of pairs, and the metrics.

    Args:
        model: of transformers.
        settings: the objective.
        reference: returns the log-probabilities of answers; None for those of `reference_logps`.
    """
    if settings.kind == "kto":
        return _kto_loss_of_batch(model, settings)
    losses, metrics = [], []
    for number, samples in enumerate(microbatches_of_pairs(model.config)):
        known = reference_logps(number, len(samples) // 2)
        for pair, given in zip(zip(samples[::2], samples[1::2], strict=True), known, strict=True):
            counts = [sample.loss_mask.sum().item() for sample in pair]
            if not all(counts):
                continue
            policy = torch.stack([logp(model, sample) for sample in pair])
            before = given if reference is None else reference(list(pair))
            losses.append(loss_of_pair(settings, *policy, before, counts))
            chosen, rejected = (settings.beta * (policy.detach() - before)).tolist()
            values = (chosen, rejected, float(chosen > rejected), chosen - rejected, *policy.tolist())
            metrics.append(dict(zip(settings.metrics, values, strict=True)))
    means = {name: math.fsum(one[name] for one in metrics) / len(metrics) for name in settings.metrics}
    return dict(loss=torch.stack(losses).mean(), number=len(losses), metrics=means)


def _kto_loss_of_batch(model: torch.nn.Module, settings: ObjectiveConfig) -> dict[str, Any]:
    """Return the same as `loss_of_batch` for KTO, written again from the papers."""
    losses, found = [], {name: list[float]() for name in settings.metrics}
    for number, samples in enumerate(microbatches_of_pairs(model.config)):
        known = reference_logps(number, len(samples) // 2)
        records = []
        for pair, given, good in zip(zip(samples[::2], samples[1::2], strict=True), known, DESIRABLE, strict=False):
            if all(sample.loss_mask.sum() for sample in pair):
                records.append((*(logp(model, sample) for sample in pair), given, good))
        divergence = max(0.0, math.fsum((other - given[1]).item() for _, other, given, _ in records) / len(records))
        found["kl"] += [0.0 if settings.loss_type == "apo_zero_unpaired" else divergence] * len(records)
        for own, _, given, good in records:
            reward, sign = own - given[0], 1 if good else -1
            shift = 0.0 if settings.loss_type == "apo_zero_unpaired" else divergence
            value = 1 / (1 + (-sign * settings.beta * (reward - shift)).exp())
            losses.append((settings.desirable_weight if good else settings.undesirable_weight) * (1 - value))
            name = "chosen" if good else "rejected"
            found[f"rewards/{name}"].append(settings.beta * reward.item())
            found[f"logps/{name}"].append(own.item())
    means = {name: math.fsum(values) / len(values) for name, values in found.items()}
    return dict(loss=torch.stack(losses).mean(), number=len(losses), metrics=means)


def expected_step(folder: Path, settings: ObjectiveConfig, seed: int | None = None) -> dict[str, Any]:
    """Return loss, metrics and gradients of a global batch; `seed` moves each weight by one unit in the last place."""
    from transformers import AutoModelForImageTextToText

    with torch_linear_attention():
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    with rounded(model, seed):
        found = loss_of_batch(model, settings)
        found["loss"].backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}
    return found | dict(loss=found["loss"].item(), gradients=gradients)
