"""Losses that are divided by microbatches (`calculate_per_token_loss=False`) give one process's gradients.

miles' GRPO scripts and verl's sequence-mean losses are such; Megatron-Bridge's own steps take the mean of a
microbatch's tokens, as this package's does, there of each context-parallel rank's own.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from tests.helpers.batches import Sample, run_reference
from tests.helpers.forked import results_of_ranks
from tests.helpers.steps import forward_backward
from tests.parity.on_ranks import Shared, Split
from tests.parity.references import MICROBATCHES, step_samples, worst
from tests.parity.topologies import TOPOLOGIES

CONTENT = "mixed"
# Of each loss, the kinds of rows it is tried with.
LOSSES = {"ours": ("padded", "packed"), "verl": ("packed", "presharded"), "miles": ("packed", "presharded")}
CHOSEN = ("TP2+SP", "CP2", "DP2", "PP2", "PP2+VPP2", "EP2", "TP2+SP+EP2", "CP2+EP2")


def weighed(sample: Sample) -> Sample:
    """Return a sample with a mask that sums to 1, so that the summed loss is a mean."""
    return dataclasses.replace(sample, loss_mask=sample.loss_mask / sample.loss_mask.sum().clamp(min=1))


def forward_step(loss: str, samples: int, state: Any, data: Iterator[Any], model: torch.nn.Module) -> tuple:
    """Run a microbatch; the loss is the mean over all samples of the step."""
    batch, groups = next(data), get_attr_wrapped_model(model, "pg_collection")
    microbatches = MICROBATCHES // groups.dp.size()
    if isinstance(batch, Shared):
        arguments = batch.arguments(groups.cp.size(), groups.cp.rank())
        losses, weights = model(**arguments), arguments["loss_mask"]
    else:
        inputs = get_attr_wrapped_model(model, "select_local")(batch)
        losses, weights = model(inputs=inputs), inputs.loss_mask

    def verl(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # workers/utils/losses.py: agg_loss; postprocess_micro_batch_func
        mean = (losses * weights).sum() / samples * groups.dp.size()
        return mean * microbatches, {"lm loss": torch.ones(2)}

    def miles(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # backends/training_utils/loss.py: loss_function with apply_megatron_loss_scaling
        mean = (losses * weights).sum() * microbatches / samples * groups.dp_cp.size()
        return mean, torch.tensor(1), {"lm loss": torch.ones(2)}

    return losses, {"verl": verl, "miles": miles}[loss]


def gradients(split: Split, batches: Iterator[Any], rows: str, step: Callable | None) -> dict[str, Tensor]:
    split.begin(batches, rows)
    split.run.forward_step = step or split.run.forward_step
    forward_backward(split.run, split.run.stream, MICROBATCHES // split.run.groups.dp.size())
    return split.gradients()


def errors_of_ranks(folders: dict[str, Path], expected: dict[str, dict]) -> dict:
    found = {}
    for name in CHOSEN:
        topology = TOPOLOGIES[name]
        for family in topology.families:
            folder = folders[family]
            split = Split(folder, topology, model__calculate_per_token_loss=False)
            samples = sum(map(len, step_samples(CONTENT, split.hf_config, 0)))
            for loss, kinds in LOSSES.items():
                for rows in kinds:
                    if rows == "presharded" and rows not in topology.rows:
                        continue
                    ours = loss == "ours"
                    split.prepare = (lambda sample: sample) if ours else weighed
                    batches = split.batches(CONTENT, rows, steps=1)
                    step = None if ours else functools.partial(forward_step, loss, samples)
                    given = gradients(split, batches, rows, step)
                    found[name, family, loss, rows] = worst(given, expected[family]["ours" if ours else "samples"])
    return found


pytestmark = pytest.mark.slow

GRADIENT = 2e-5  # relative to the largest entry of each


def gradients_of_transformers(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return transformers' gradients for both means: over tokens of microbatches, and over samples."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    microbatches = step_samples(CONTENT, model.config, 0)
    samples, found = sum(map(len, microbatches)), {}
    for name in ("ours", "samples"):
        model.zero_grad()
        for microbatch in microbatches:
            _, loss = run_reference(model, microbatch if name == "ours" else [weighed(one) for one in microbatch])
            tokens = sum(sample.loss_mask.sum() for sample in microbatch)
            (loss / (tokens * MICROBATCHES if name == "ours" else samples)).backward()
        found[name] = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters(remove_duplicate=False)
        }
    return found


def test_gradients_of_mean_losses_on_two_ranks_match_transformers(untied_folder, moe_folder):
    folders = {"dense": untied_folder, "MoE": moe_folder}
    expected = {family: gradients_of_transformers(folder) for family, folder in folders.items()}
    found = results_of_ranks(errors_of_ranks, 2, folders, expected)
    print({case: f"{error:.1e}" for case, error in found.items()})
    assert {loss for _, _, loss, _ in found} == set(LOSSES) and {name for name, *_ in found} == set(CHOSEN)
    assert max(found.values()) <= GRADIENT, found  # measured 3.7e-6
