"""The Megatron model equals transformers: logits, loss and every gradient, float32 on the CPU."""

from __future__ import annotations

from qwen3vl_bridge.batch import PackedBatch

import pytest
import torch

from ..batches import CONTENTS, make_batch, make_samples, run_reference
from ..conftest import Pair

# Worst absolute errors measured over all cases of this file (torch 2.13, one thread): see each line's comment.
LOGITS = 1e-5  # measured 2.4e-6, of logits up to about 2
LOSS = 1e-6  # measured 1.7e-7 relative, of summed losses of a few hundred
GRADIENT = 2e-5  # measured 4.4e-6 relative to the largest entry of each parameter's gradient


def per_sample(whole: torch.Tensor, batch: PackedBatch) -> list[torch.Tensor]:
    """The real tokens of each document or row, [tokens, ...] each."""
    flat, layout = whole.flatten(0, 1), batch.layout
    starts = layout.cu_seqlens_padded[:-1].tolist()
    return [flat[a : a + n] for a, n in zip(starts, layout.lengths, strict=True) if n]


def assert_gradients_equal(pair: Pair, tolerance: float) -> float:
    """Every parameter's gradient, relative to its largest entry; returns the worst."""
    errors = pair.gradient_errors()
    for name, error in errors.items():
        assert error <= tolerance, f"{name}: gradient differs by {error:.2e} of its largest entry"
    return max(errors.values())


def run_megatron(pair: Pair, batch: PackedBatch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits of each document or row, and the summed loss, whose gradients are in the parameters."""
    inputs = batch.local()
    losses = pair.megatron(inputs=inputs)
    loss = (losses * inputs.loss_mask).sum()
    loss.backward()
    with torch.no_grad():
        logits = per_sample(pair.megatron(inputs=inputs.without_labels()), batch)
    return logits, loss.detach()


def compare(pair: Pair, content: str, packed: bool, seed: int) -> dict[str, float]:
    """One batch through both; asserts equality and returns the worst errors."""
    pair.zero_grad()
    samples = make_samples(content, pair.config, seed)
    expected_logits, expected_loss = run_reference(pair.reference, samples)
    expected_loss.backward()

    logits, loss = run_megatron(pair, make_batch(samples, pair.config, packed=packed))
    errors = {
        "logits": max((got - want).abs().max().item() for got, want in zip(logits, expected_logits, strict=True)),
        "loss": abs(loss.item() / expected_loss.item() - 1),
    }
    assert errors["logits"] <= LOGITS
    assert errors["loss"] <= LOSS
    errors["gradient"] = assert_gradients_equal(pair, GRADIENT)
    return errors


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("content", CONTENTS)
def test_equals_transformers(pair, content, packed, record_property):
    for name, error in compare(pair, content, packed, seed=3).items():
        record_property(f"worst {name} error", error)


def test_norms_have_the_references_epsilon(pair):
    """Values alone would not tell: activations are far larger than any epsilon."""

    def epsilons(tower: torch.nn.Module) -> set[float]:
        found = (getattr(m, "eps", getattr(m, "variance_epsilon", None)) for m in tower.modules())
        return {eps for eps in found if eps is not None}

    assert epsilons(pair.megatron.vision_model) == epsilons(pair.reference.model.visual) == {1e-6}
    assert epsilons(pair.megatron.language_model) == epsilons(pair.reference.model.language_model)


def test_a_batch_without_pictures_gives_every_parameter_a_gradient(pair):
    """Zero for the vision tower's, but there: reductions over ranks wait for each of them."""
    pair.megatron.zero_grad()
    inputs = make_batch(make_samples("text only", pair.config, seed=0), pair.config, packed=True).local()
    pair.megatron(inputs=inputs).sum().backward()
    assert all(p.grad is not None for p in pair.megatron.parameters())
    assert all(not p.grad.any() for p in pair.megatron.vision_model.parameters())
