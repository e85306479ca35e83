"""Multi-token prediction equals its parts in transformers, pictures and packed rows included: loss and gradients."""

from __future__ import annotations

import shutil
from dataclasses import replace

from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.batch.token_layout import next_index
from qwen3vl_bridge.peft.lora import Qwen3VLLoRA

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from safetensors.torch import load_file, save_file

from tests.noise import check, limits
from tests.parity.batches import CONTENTS, make_batch, make_samples
from tests.parity.conftest import build, make_pair

from ..conftest import pair_with_mtp
from ..tiny import run_with_mtp

FACTOR = 0.5


@pytest.fixture(scope="module", params=["dense", "dense, losses in chunks", "moe"])
def pair(request, qwen3_5_folders):
    kind, *chunked = request.param.split(",")
    settings = dict(loss_chunk_tokens=17) if chunked else {}
    pair = pair_with_mtp(qwen3_5_folders, kind, mtp_loss_scaling_factor=FACTOR, **settings)
    pair.provider.calculate_per_token_loss = True
    return pair


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_both_losses(pair, content, packed):
    samples = make_samples(content, pair.config, seed=5)
    inputs = make_batch(samples, pair.config, packed=packed).local(predicts=True)

    def reference() -> tuple[float, float, dict[str, torch.Tensor]]:
        """The loss, the mean of multi-token prediction's, and gradients of both."""
        pair.reference.zero_grad()
        main, both = run_with_mtp(pair.reference, samples, FACTOR)
        both.backward()
        predicted = (both - main).item() / FACTOR / inputs.following.loss_mask.sum().item()
        return main.item(), predicted, pair.reference_gradients()

    def errors(found: tuple, expected: tuple) -> dict[str, float]:
        gradients = pair.gradient_errors(found[2], expected[2])
        loss, predicted = (abs(a / b - 1) for a, b in zip(found[:2], expected[:2], strict=True))
        return {"loss": loss, "predicted": predicted, "gradients": max(gradients.values())}

    expected = reference()
    pair.megatron.zero_grad()
    MTPLossLoggingHelper.clean_metrics_in_tracker()
    loss = (pair.megatron(inputs=inputs) * inputs.loss_mask).sum()
    loss.backward()  # the MTP loss is in the backward pass alone
    found = loss.item(), MTPLossLoggingHelper.tracker["loss_values"].item(), pair.megatron_gradients()
    check(errors(found, expected), limits(reference, errors, pair.reference, expected=expected))
    assert all(one.any() for name, one in expected[2].items() if name.startswith("mtp.") and ".experts." not in name)


def test_next_tokens_by_hand():
    layout = SequenceLayout.packed_row([3, 6], multiple=4)
    places, there = next_index(layout)
    assert places.tolist() == [1, 2, 2, 3, 5, 6, 7, 8, 9, 9, 10, 11]
    assert there.tolist() == [True, True, False, False, *[True] * 5, False, False, False]


@pytest.mark.parametrize("packed", [False, True])
def test_labels_of_minus_100_are_not_predicted(pair, packed):
    samples = make_samples("mixed", pair.config, seed=8)
    batch = make_batch(samples, pair.config, packed=packed)
    expected = batch.local(predicts=True).following
    labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
    ignored = replace(batch, labels=labels, loss_mask=torch.ones_like(batch.loss_mask)).local(predicts=True).following
    assert torch.equal(ignored.loss_mask, expected.loss_mask)
    assert torch.equal(ignored.labels * ignored.loss_mask, expected.labels * expected.loss_mask)
    assert (ignored.trained, ignored.predicted) == (expected.trained, expected.predicted)
    assert ignored.labels.min() >= 0


def test_weights_without_it_are_refused(qwen3_5_folders, tmp_path):
    shutil.copytree(qwen3_5_folders["dense"], without := tmp_path / "without")
    tensors = load_file(without / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(left, without / "model.safetensors", metadata={"format": "pt"})
    provider = AutoBridge.from_hf_pretrained(str(qwen3_5_folders["dense"])).to_megatron_provider(load_weights=False)
    model = [build(provider)]
    with pytest.raises(ValueError, match=r"lacks 15 tensors: mtp\..*; set mtp_num_layers=None"):
        AutoBridge.from_hf_pretrained(str(without)).load_hf_weights(model)


def test_nothing_is_predicted_in_evaluation_or_without_labels(pair):
    samples = make_samples("one image", pair.config, seed=6)
    inputs = make_batch(samples, pair.config).local(predicts=True)
    pair.megatron.eval()
    pair.zero_grad()
    pair.megatron(inputs=inputs).sum().backward()
    assert all(p.grad is None for name, p in pair.megatron.named_parameters() if ".mtp." in name)
    pair.megatron.train()
    with pytest.raises(ValueError, match="the batch has no labels"):
        pair.megatron(inputs=inputs.without_labels())
    with torch.no_grad():
        pair.megatron(inputs=inputs.without_labels())


def test_kept_weights_are_frozen(qwen3_5_folders):
    pair = make_pair(qwen3_5_folders["dense"])
    mtp = [p for name, p in pair.megatron.named_parameters() if ".mtp." in name]
    assert mtp and not any(p.requires_grad for p in mtp)


@pytest.mark.parametrize("kind", [Qwen3VLLoRA, LoRA])
def test_it_gets_no_adapters(qwen3_5_folders, kind):
    pair = make_pair(qwen3_5_folders["dense"])
    kind(target_modules=["linear_qkv", "linear_fc1"], dim=4)(pair.megatron, training=True)
    adapted = {name for name, _ in pair.megatron.named_modules() if name.endswith(".adapter")}
    assert adapted and not any(".mtp." in name for name in adapted)
