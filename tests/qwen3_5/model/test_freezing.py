"""Parts that rest get no gradient, and the others the one they would have anyway: transformers'."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.batches import make_batch, make_samples, run_reference
from tests.parity.conftest import make_pair

from .test_parity import run_megatron

PARTS = ("language_model", "vision_model", "vision_projection")
GRADIENT = 5e-4  # relative to the largest entry of each parameter's gradient; measured 8.1e-5
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
RECOMPUTE = FULL | {f"vision_{name}": value for name, value in FULL.items()}


def part_of(name: str) -> str:
    """By a Hugging Face name."""
    if not name.startswith("model.visual."):
        return "language_model"
    return "vision_projection" if name.startswith("model.visual.merger.") else "vision_model"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rests", itertools.product((False, True), repeat=3))
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_what_is_trained(qwen3_5_folders, kind, rests, recompute):
    flags = {f"freeze_{part}": rest for part, rest in zip(PARTS, rests, strict=True)}
    settings = (RECOMPUTE if recompute else {}) | ({"moe_aux_loss_coeff": 0.0} if kind == "moe" else {})
    pair = make_pair(qwen3_5_folders[kind], **flags, **settings)
    trained = {name: p.requires_grad for name, p in pair.megatron.named_parameters()}
    if all(rests):
        assert not any(trained.values())
        return
    samples = make_samples("mixed", pair.config, seed=4)
    run_reference(pair.reference, samples)[1].backward()
    run_megatron(pair, make_batch(samples, pair.config, packed=True))
    assert {name: p.grad is not None for name, p in pair.megatron.named_parameters()} == trained
    expected, worst = pair.reference_gradients(), 0.0
    for name, gradient in pair.megatron_gradients().items():
        if name.startswith("mtp.") or flags[f"freeze_{part_of(name)}"]:  # MTP is kept, and trained where asked for
            assert not gradient.any(), name
        else:
            largest = expected[name].abs().max().clamp(min=1e-6)
            worst = max(worst, ((gradient - expected[name]).abs().max() / largest).item())
    print(f"gradients: {worst:.1e}, tolerance {GRADIENT:.0e}")
    assert worst <= GRADIENT
