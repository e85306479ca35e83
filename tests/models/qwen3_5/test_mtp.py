"""Multi-token prediction against modules of transformers: loss and gradients, with images and packed rows."""

import shutil
from dataclasses import replace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.core.layout import SequenceLayout, next_token_index, token_index
from qwen3vl_bridge.peft.lora import Qwen3VLLoRA

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.helpers.batches import CONTENTS, make_batch, make_samples
from tests.helpers.noise import check, limits
from tests.models.inputs.test_cp_sharded_inputs import Ranks, assert_equal, layout_of
from tests.models.inputs.test_inputs import params_of, pictures
from tests.models.qwen3_5.conftest import pair_with_mtp
from tests.models.qwen3_5.tiny import run_with_mtp
from tests.parity.conftest import build, make_pair

FACTOR = 0.5


@pytest.fixture(scope="module", params=["dense", "dense, losses in chunks", "moe"])
def pair(request, qwen3_5_folders):
    kind, *chunked = request.param.split(",")
    settings = dict(loss_chunk_tokens=17) if chunked else {}
    pair = pair_with_mtp(qwen3_5_folders, kind, mtp_loss_scaling_factor=FACTOR, **settings)
    pair.provider.calculate_per_token_loss = True
    return pair


@pytest.mark.one_case_in(20)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("packed", [False, True])
def test_mtp_loss_and_gradients_match_modules_of_transformers(pair, content, packed):
    samples = make_samples(content, pair.config, seed=5)
    inputs = make_batch(samples, pair.config, packed=packed).local(with_next_tokens=True)

    def reference() -> tuple[float, float, dict[str, torch.Tensor]]:
        pair.reference.zero_grad()
        main, both = run_with_mtp(pair.reference, samples, FACTOR)
        both.backward()
        predicted = (both - main).item() / FACTOR / inputs.next_tokens.loss_mask.sum().item()
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


def test_next_token_index_points_to_next_token_of_same_segment():
    layout = SequenceLayout.packed_row([3, 6], multiple=4)
    places, there = next_token_index(layout)
    assert places.tolist() == [1, 2, 2, 3, 5, 6, 7, 8, 9, 9, 10, 11]
    assert there.tolist() == [True, True, False, False, *[True] * 5, False, False, False]


@pytest.mark.parametrize("packed", [False, True])
def test_mtp_treats_labels_of_minus_100_like_loss_mask_of_0(pair, packed):
    samples = make_samples("mixed", pair.config, seed=8)
    batch = make_batch(samples, pair.config, packed=packed)
    expected = batch.local(with_next_tokens=True).next_tokens
    labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
    ignored = (
        replace(batch, labels=labels, loss_mask=torch.ones_like(batch.loss_mask))
        .local(with_next_tokens=True)
        .next_tokens
    )
    assert torch.equal(ignored.loss_mask, expected.loss_mask)
    assert torch.equal(ignored.labels * ignored.loss_mask, expected.labels * expected.loss_mask)
    assert (ignored.num_trained, ignored.num_predicted) == (expected.num_trained, expected.num_predicted)
    assert ignored.labels.min() >= 0


def test_load_weights_raises_if_checkpoint_lacks_mtp_weights(qwen3_5_folders, tmp_path):
    shutil.copytree(qwen3_5_folders["dense"], without := tmp_path / "without")
    tensors = load_file(without / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(left, without / "model.safetensors", metadata={"format": "pt"})
    provider = AutoBridge.from_hf_pretrained(str(qwen3_5_folders["dense"])).to_megatron_provider(load_weights=False)
    model = [build(provider)]
    with pytest.raises(ValueError, match=r"lacks 15 tensors: mtp\..*; set mtp_num_layers=None"):
        AutoBridge.from_hf_pretrained(str(without)).load_hf_weights(model)


def test_mtp_is_not_computed_in_evaluation_mode(pair):
    samples = make_samples("one image", pair.config, seed=6)
    inputs = make_batch(samples, pair.config).local(with_next_tokens=True)
    pair.megatron.eval()
    pair.zero_grad()
    pair.megatron(inputs=inputs).sum().backward()
    assert all(p.grad is None for name, p in pair.megatron.named_parameters() if ".mtp." in name)
    pair.megatron.train()
    with pytest.raises(ValueError, match="the batch has no labels"):
        pair.megatron(inputs=inputs.without_labels())
    with torch.no_grad():
        pair.megatron(inputs=inputs.without_labels())


def test_mtp_weights_are_frozen_without_mtp_loss(qwen3_5_folders):
    pair = make_pair(qwen3_5_folders["dense"])
    mtp = [p for name, p in pair.megatron.named_parameters() if ".mtp." in name]
    assert mtp and not any(p.requires_grad for p in mtp)


@pytest.mark.parametrize("kind", [Qwen3VLLoRA, LoRA])
def test_lora_adds_no_adapters_to_mtp_layers(qwen3_5_folders, kind):
    pair = make_pair(qwen3_5_folders["dense"])
    kind(target_modules=["linear_qkv", "linear_fc1"], dim=4)(pair.megatron, training=True)
    adapted = {name for name, _ in pair.megatron.named_modules() if name.endswith(".adapter")}
    assert adapted and not any(".mtp." in name for name in adapted)


IDS = torch.arange(1, 17).view(2, 8)


@pytest.fixture(scope="module")
def provider(qwen3_5_folders):
    provider = AutoBridge.from_hf_pretrained(str(qwen3_5_folders["dense"])).to_megatron_provider(load_weights=False)
    provider.mtp_loss_scaling_factor = 0.1
    return provider


@pytest.mark.parametrize("masked", ["loss mask", "labels of -100"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("cp", [2, 4])
def test_mtp_labels_sliced_over_ranks_give_same_inputs_as_full_labels(
    provider, qwen3_5_folders, monkeypatch, cp, packed, masked
):
    config = AutoConfig.from_pretrained(qwen3_5_folders["dense"])
    samples = make_samples("mixed", config, seed=3)
    longest = max(len(sample.ids) for sample in samples)
    rows = SequenceLayout.padded_rows([len(sample.ids) for sample in samples], -(-longest // (2 * cp)) * 2 * cp)
    batch = make_batch(samples, config, layout=layout_of(samples, cp) if packed else rows)
    layout, ranks = batch.layout, Ranks(cp, monkeypatch)
    padding = layout.padding_mask().view(batch.input_ids.shape)
    call = dict(input_ids=batch.input_ids, **pictures(samples))
    call |= dict(packed_seq_params=params_of(layout)) if packed else dict(attention_mask=~padding)
    ignored = batch.labels.masked_fill(batch.loss_mask == 0, -100)
    whole = dict(labels=batch.labels, loss_mask=batch.loss_mask) if masked == "loss mask" else dict(labels=ignored)

    def cut(rank):
        index = token_index(layout, cp, rank).T
        return {name: values.flatten()[index] for name, values in whole.items()}

    found = ranks.inputs(provider, lambda rank: call | cut(rank))
    expected = ranks.inputs(provider, lambda rank: call | whole)
    for rank, (ours, right) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours.labels, cut(rank)["labels"].clamp(min=0))
        assert right.next_tokens is not None
        assert_equal(ours, right)


@pytest.mark.parametrize("cut", [True, False])
def test_model_inputs_have_no_next_tokens_if_loss_mask_is_given_without_labels(provider, monkeypatch, cut):
    """There are no next labels. Such a call asks for logits; a model that trains raises."""
    mask = torch.ones(2, 4 if cut else 8)
    for inputs in Ranks(2, monkeypatch).inputs(provider, lambda rank: dict(input_ids=IDS, loss_mask=mask)):
        assert inputs.labels is None and inputs.next_tokens is None


def test_labels_are_not_gathered_over_ranks_if_mtp_is_not_trained(provider, monkeypatch):
    ranks = Ranks(2, monkeypatch)
    with pytest.MonkeyPatch.context() as untrained:
        untrained.setattr(provider, "mtp_loss_scaling_factor", 0.0)
        (first, _) = ranks.inputs(provider, lambda rank: dict(input_ids=IDS, labels=IDS[:, :4]))
    assert ranks.gathered == 0 and first.next_tokens is None and first.labels is not None


@pytest.mark.parametrize(("first", "second", "message"), [
    (dict(labels=IDS[:, :4]), dict(labels=IDS), r"labels is \[2, 8\] integers on .* rank 1 and \[2, 4\]"),
    (dict(labels=IDS[:, :4]), {}, r"labels is None on context-parallel rank 1 and \[2, 4\] integers on rank 0"),
    (dict(labels=IDS), {}, r"labels is None on context-parallel rank 1"),
    (dict(labels=IDS[:, :4]), dict(labels=IDS[:, :4], loss_mask=torch.ones(2, 4)),
     r"loss_mask is \[2, 4\] floating point on .* rank 1 and None"),
    (dict(labels=IDS[:, :4]), dict(labels=IDS[:, :4] - 9), r"labels has shape \[2, 8\] .* entries in"),
])  # fmt: skip
def test_mtp_labels_inconsistent_between_ranks_raise_on_every_rank(provider, monkeypatch, first, second, message):
    calls = [dict(input_ids=IDS, **first), dict(input_ids=IDS, **second)]
    for error in Ranks(2, monkeypatch).inputs(provider, calls.__getitem__):
        with pytest.raises(ValueError, match=message):
            raise error
