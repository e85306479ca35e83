"""The Megatron model equals transformers: logits, loss and every gradient, float32 on the CPU."""

from __future__ import annotations

from qwen3vl_bridge.weights.names import ExpertLayout

import pytest

from tests.parity.batches import CONTENTS, make_batch, make_samples, run_reference
from tests.parity.conftest import make_pair
from tests.parity.test_parity import run_megatron

# The reference is each sample alone: transformers does not start linear attention anew in a packed row.
LOGITS = 5e-5  # absolute
LOSS = 1e-6  # relative, of summed losses
GRADIENT = 1e-4  # relative to the largest entry of each parameter's gradient


@pytest.fixture(scope="module", params=["dense", "tied", "moe"])
def pair(request, qwen3_5_folders):
    settings = {"moe_aux_loss_coeff": 0.0} if request.param == "moe" else {}  # the reference's loss has no such term
    pair = make_pair(qwen3_5_folders[request.param], **settings)
    pair.layout = ExpertLayout.PER_EXPERT  # as transformers saves them
    return pair


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("content", CONTENTS)
def test_equals_transformers(pair, content, packed, record_property):
    pair.zero_grad()
    samples = make_samples(content, pair.config, seed=3)
    expected_logits, expected_loss = run_reference(pair.reference, samples)
    expected_loss.backward()
    logits, loss = run_megatron(pair, make_batch(samples, pair.config, packed=packed))
    errors = {
        "logits": max((got - want).abs().max().item() for got, want in zip(logits, expected_logits, strict=True)),
        "loss": abs(loss.item() / expected_loss.item() - 1),
    }
    gradients = pair.gradient_errors()
    errors["gradient"] = max(gradients.values())
    for name, error in errors.items():
        record_property(f"worst {name} error", error)
    print(errors, max(gradients, key=gradients.get), max(one.abs().max().item() for one in expected_logits))
    assert errors["logits"] <= LOGITS and errors["loss"] <= LOSS
    assert errors["gradient"] <= GRADIENT, max(gradients, key=gradients.get)
