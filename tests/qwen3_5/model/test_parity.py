"""The Megatron model equals transformers: logits, loss and every gradient, float32 on the CPU."""

from __future__ import annotations

from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from tests.parity.batches import CONTENTS, make_batch, make_samples
from tests.parity.conftest import make_pair
from tests.parity.exact_reference import KERNELS
from tests.parity.one_process.test_parity import check_parity

from ..tiny import with_mtp


@pytest.fixture(scope="module", params=["dense", "tied", "moe"])
def pair(request, qwen3_5_folders):
    settings = {"moe_aux_loss_coeff": 0.0} if request.param == "moe" else {}  # the reference's loss has no such term
    folder = qwen3_5_folders[request.param]
    pair = make_pair(folder, **settings)
    with_mtp(pair.reference, folder)
    if request.param == "moe":
        pair.layout = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT
    return pair


@pytest.mark.parametrize("content", CONTENTS)
def test_equals_transformers(pair, content):
    """Each sample alone in the reference, which does not start linear attention anew in a packed row."""
    samples = make_samples(content, pair.config, seed=3)
    check_parity(pair, samples, *(make_batch(samples, pair.config, packed=packed) for packed in (False, True)))


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
