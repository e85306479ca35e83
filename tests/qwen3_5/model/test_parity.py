"""The Megatron model equals transformers: logits, loss and every gradient, float32 on the CPU."""

from __future__ import annotations

from typing import NamedTuple

from qwen3vl_bridge.weights.expert_layout import ExpertLayout

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from tests.parity.batches import CONTENTS, make_batch, make_samples, run_reference
from tests.parity.conftest import Pair, make_pair
from tests.parity.exact_reference import KERNELS
from tests.parity.one_process.test_parity import run_megatron

from ..tiny import with_mtp

# In units of the noise: how far transformers is from itself when it computes the delta rule token by token and not by
# chunks, and attention by another function. Not below the second number, as a short row may have little noise.
LOGITS = 10, 5e-5  # absolute, of up to 4.8; measured up to 5 times the noise, 1.2e-4
GRADIENT = 10, 5e-5  # relative to the largest entry of each parameter's gradient; measured up to 7 times, 1.4e-4
LOSS = 1e-6  # relative, of summed losses; measured 2.1e-7


@pytest.fixture(scope="module", params=["dense", "tied", "moe"])
def pair(request, qwen3_5_folders):
    settings = {"moe_aux_loss_coeff": 0.0} if request.param == "moe" else {}  # the reference's loss has no such term
    folder = qwen3_5_folders[request.param]
    pair = make_pair(folder, **settings)
    with_mtp(pair.reference, folder)
    if request.param == "moe":
        pair.layout = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT
    return pair


class Reference(NamedTuple):
    """What transformers makes of samples, each alone: it does not start linear attention anew in a packed row."""

    logits: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def reference(pair: Pair, samples: list) -> Reference:
    pair.reference.zero_grad()
    logits, loss = run_reference(pair.reference, samples)
    loss.backward()
    return Reference([one.detach() for one in logits], loss.item(), pair.reference_gradients())


def token_by_token(*args, cu_seqlens=None, **kwargs):
    return torch_recurrent_gated_delta_rule(*args, **kwargs)


def largest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def noise(pair: Pair, samples: list, expected: Reference) -> tuple[float, float]:
    """Of logits, and of gradients."""
    layers = [one.linear_attn for one in pair.reference.model.language_model.layers if hasattr(one, "linear_attn")]
    by_chunks = layers[0].chunk_gated_delta_rule
    for layer in layers:
        layer.chunk_gated_delta_rule = token_by_token
    pair.reference.set_attn_implementation("sdpa")
    other = reference(pair, samples)
    pair.reference.set_attn_implementation("eager")
    for layer in layers:
        layer.chunk_gated_delta_rule = by_chunks
    gradients = {
        name: (one - expected.gradients[name]).abs().max() / expected.gradients[name].abs().max().clamp(min=1e-6)
        for name, one in other.gradients.items()
    }
    return largest(other.logits, expected.logits), max(one.item() for one in gradients.values())


@pytest.mark.parametrize("content", CONTENTS)
def test_equals_transformers(pair, content, record_property):
    samples = make_samples(content, pair.config, seed=3)
    expected = reference(pair, samples)
    of_logits, of_gradients = noise(pair, samples, expected)
    reference(pair, samples)  # whose gradients are compared
    for packed in (False, True):
        pair.megatron.zero_grad()
        logits, loss = run_megatron(pair, make_batch(samples, pair.config, packed=packed))
        gradients = pair.gradient_errors()
        name = max(gradients, key=gradients.get)
        errors = {
            "logits": largest(logits, expected.logits),
            "loss": abs(loss.item() / expected.loss - 1),
            "gradient": gradients[name],
        }
        print(packed, errors, name, f"noise: logits {of_logits:.1e}, gradients {of_gradients:.1e}")
        for kind, error in errors.items():
            record_property(f"worst {kind} error", error)
        assert errors["logits"] <= max(LOGITS[0] * of_logits, LOGITS[1])
        assert errors["gradient"] <= max(GRADIENT[0] * of_gradients, GRADIENT[1]), name
        assert errors["loss"] <= LOSS


def test_the_reference_has_no_kernels_where_they_are_installed(qwen3_5_folders, monkeypatch):
    """They may round to TF32 on a GPU; the module has them, as it does where flash-linear-attention is installed."""
    for name in KERNELS:
        monkeypatch.setattr(modeling_qwen3_5, name, object())
    layer = make_pair(qwen3_5_folders["dense"]).reference.model.language_model.layers[0].linear_attn
    assert layer.chunk_gated_delta_rule is modeling_qwen3_5.torch_chunk_gated_delta_rule
    assert layer.recurrent_gated_delta_rule is torch_recurrent_gated_delta_rule
    assert layer.causal_conv1d_fn is None
    assert isinstance(layer.norm, modeling_qwen3_5.Qwen3_5RMSNormGated)
    assert all(getattr(modeling_qwen3_5, name) is not None for name in KERNELS)


def test_kinds_of_layers(pair):
    layers = [type(layer.self_attention).__name__ for layer in pair.megatron.language_model.decoder.layers]
    assert layers == ["LinearAttention"] * 3 + ["RotarySelfAttention"]
    assert not pair.megatron.vision_model.deepstack_layers
