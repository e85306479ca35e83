"""The model's door: each calling convention gives the same inputs as our batch, anything else a clear error."""

import types

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.model.inputs import as_model_inputs

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import AutoConfig

from tests.parity.batches import make_batch, make_samples

ALONE = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = types.SimpleNamespace(tp=ALONE, cp=ALONE)


@pytest.fixture(scope="module")
def provider(untied_folder):
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)


@pytest.fixture(scope="module")
def config(untied_folder):
    return AutoConfig.from_pretrained(untied_folder)


def pictures(samples):
    names = {name for s in samples for name in s.pixels}
    return {name: torch.cat([s.pixels[name] for s in samples if name in s.pixels]) for name in names}


def assert_same(ours, expected):
    real = ~expected.padding_mask
    assert torch.equal(ours.padding_mask, expected.padding_mask)
    assert torch.equal(ours.position_ids[:, real], expected.position_ids[:, real])
    for name in ("rows", "positions"):
        assert torch.equal(getattr(ours.fuse, name), getattr(expected.fuse, name))
        assert torch.equal(getattr(ours.deepstack, name), getattr(expected.deepstack, name))
    assert ours.layout == expected.layout
    assert ours.vision.lengths == expected.vision.lengths


def test_rows_with_attention_mask(provider, config):
    samples = make_samples("mixed", config, seed=0)
    batch = make_batch(samples, config, packed=False)
    ours = as_model_inputs(
        provider,
        GROUPS,
        batch.input_ids,
        attention_mask=(~batch.layout.padding_mask()).view(batch.input_ids.shape).long(),
        **pictures(samples),
    )
    assert_same(ours, batch.local())
    assert ours.labels is None


def test_flat_row_with_packed_seq_params(provider, config):
    samples = make_samples("mixed", config, seed=0)
    batch = make_batch(samples, config, packed=True)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=batch.layout.cu_seqlens, cu_seqlens_q_padded=batch.layout.cu_seqlens_padded
    )
    ours = as_model_inputs(provider, GROUPS, batch.input_ids, packed_seq_params=packed, **pictures(samples))
    assert_same(ours, batch.local())


def test_flat_row_positions_restart_in_each_document(provider):
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 6, 12, 18], dtype=torch.int32))
    ours = as_model_inputs(provider, GROUPS, torch.ones(1, 18, dtype=torch.long), packed_seq_params=packed)
    assert ours.position_ids.tolist() == [[list(range(6)) * 3]] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(input_ids=None), r"input_ids has shape None, expected \[rows, tokens\]"),
        (dict(input_ids=torch.ones(4, dtype=torch.long)), r"input_ids has shape \[4\]"),
        (dict(position_ids=torch.zeros(2, 6)), r"position_ids has shape \[2, 6\], expected \[3, 2, 6\]"),
        (dict(attention_mask=torch.ones(2, 5)), r"attention_mask has shape \[2, 5\], expected \[2, 6\]"),
        (dict(attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)), "padded on the right"),
        (dict(packed_seq_params=PackedSeqParams(qkv_format="thd")), "one flat row"),
        (dict(pixel_values=torch.zeros(4, 1536), image_grid_thw=torch.tensor([[1, 2, 2]])), "image"),
    ],
)
def test_wrong_calls_say_what_is_wrong(provider, arguments, message):
    with pytest.raises(ValueError, match=message):
        as_model_inputs(provider, GROUPS, **{"input_ids": torch.ones(2, 6, dtype=torch.long), **arguments})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.full((2, 6), -100), r"smallest entry -100, expected \[2, 6\] token ids"),
        (torch.ones(2, 5, dtype=torch.long), r"labels has shape \[2, 5\]"),
    ],
)
def test_labels_that_no_loss_can_be_of_are_refused(provider, labels, message):
    with pytest.raises(ValueError, match=message):
        as_model_inputs(provider, GROUPS, torch.ones(2, 6, dtype=torch.long), labels=labels)


def test_video_tokens_without_a_video_are_refused_whatever_the_positions(provider, config):
    ids = torch.tensor([[5, config.vision_start_token_id, config.video_token_id, config.vision_end_token_id]])
    with pytest.raises(ValueError, match="video"):
        as_model_inputs(provider, GROUPS, ids, position_ids=torch.zeros(3, 1, 4, dtype=torch.long))
