"""Losses that are divided by microbatches (`calculate_per_token_loss=False`) give one process's gradients.

miles' GRPO scripts and verl's sequence-mean losses are such; Megatron-Bridge's own steps take the mean of a
microbatch's tokens, as this package's does, there of each context-parallel rank's own.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.forked import run_ranks

from ..batches import run_reference
from ..references import MICROBATCHES, step_samples
from .means_on_ranks import CHOSEN, CONTENT, LOSSES, weighed

pytestmark = pytest.mark.slow

GRADIENT = 2e-5  # relative to the largest entry of each


def expected(folder) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of both means by transformers: of microbatches' means of tokens, and of samples' means."""
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


def test_gradients_are_those_of_one_process(untied_folder, moe_folder, tmp_path):
    folders = {"dense": untied_folder, "MoE": moe_folder}
    folders = {name: str(shutil.copytree(folder, tmp_path / name)) for name, folder in folders.items()}
    for folder in folders.values():
        torch.save(expected(Path(folder)), Path(folder) / "means.pt")
    run_ranks("tests.parity.split_models.means_on_ranks", 2, tmp_path / "found", json.dumps(folders))
    found = torch.load(tmp_path / "found")
    print({case: f"{error:.1e}" for case, error in found.items()})
    assert {loss for _, _, loss, _ in found} == set(LOSSES) and {name for name, *_ in found} == set(CHOSEN)
    assert max(found.values()) <= GRADIENT, found  # measured 3.7e-6
