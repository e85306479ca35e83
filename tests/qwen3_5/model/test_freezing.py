"""Parts that rest get no gradient, and the others the one they would have anyway: transformers'."""

from __future__ import annotations

import itertools

import pytest

from tests.noise import check, relative
from tests.parity.batches import make_batch, make_samples
from tests.parity.conftest import make_pair
from tests.parity.one_process.test_parity import run_megatron

PARTS = ("language_model", "vision_model", "vision_projection")
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
    expected = pair.reference_results(samples)
    found = run_megatron(pair, make_batch(samples, pair.config, packed=True)).gradients
    assert {name: p.grad is not None for name, p in pair.megatron.named_parameters()} == trained
    # MTP is kept, and trained where asked for.
    rest = {name for name in found if name.startswith("mtp.") or flags[f"freeze_{part_of(name)}"]}
    assert not any(found.pop(name).any() for name in rest)
    error = max(relative(found, expected.gradients).values())
    check({"gradients": error}, pair.limits(samples, expected))
