"""The Megatron model equals transformers: logits, loss and every gradient, float32 on the CPU.

Parts that rest get no gradient, and the others the one they would have anyway.
"""

from __future__ import annotations

import itertools

import pytest

from tests.noise import check, relative
from tests.parity.batches import CONTENTS, make_batch, make_samples
from tests.parity.conftest import make_pair
from tests.parity.one_process.test_parity import check_parity, run_megatron
from tests.parity.one_process.test_recompute import FULL, of_vision

from ..conftest import pair_with_mtp


@pytest.fixture(scope="module", params=["dense", "tied", "moe"])
def pair(request, qwen3_5_folders):
    return pair_with_mtp(qwen3_5_folders, request.param)


@pytest.mark.parametrize("content", CONTENTS)
def test_equals_transformers(pair, content):
    """Each sample alone in the reference, which does not start linear attention anew in a packed row."""
    samples = make_samples(content, pair.config, seed=3)
    check_parity(pair, samples, *(make_batch(samples, pair.config, packed=packed) for packed in (False, True)))


def test_kinds_of_layers(pair):
    layers = [type(layer.self_attention).__name__ for layer in pair.megatron.language_model.decoder.layers]
    assert layers == ["LinearAttention"] * 3 + ["RotarySelfAttention"]
    assert not pair.megatron.vision_model.deepstack_layers


PARTS = ("language_model", "vision_model", "vision_projection")
RECOMPUTE = FULL | of_vision(FULL)


def part_of(name: str) -> str:
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
