"""Each format of callers gives the same model inputs as a collated batch, or a clear error."""

import logging

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.common.attention import layout_packed_seq_params
from qwen3vl_bridge.models.common.rope import InterleavedMRoPE
from qwen3vl_bridge.models.common.vision_tower import packed_seq_params
from qwen3vl_bridge.models.inputs import caller_batches
from qwen3vl_bridge.models.inputs.caller_batches import UNSUPPORTED, as_model_inputs, read_arguments
from qwen3vl_bridge.models.inputs.caller_layout import OutputConversion, detect_layout

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import Qwen3VLTextConfig
from transformers.masking_utils import create_causal_mask

from tests.helpers.batches import make_batch, make_samples, pictures
from tests.models.inputs.support import GROUPS, SECOND_OF_TWO, no_grad, offsets, packed_params, rows_of


def mask_of(batch):
    return (~batch.layout.padding_mask()).view(batch.input_ids.shape).long()


def params_of(layout):
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=layout.cu_seqlens, cu_seqlens_q_padded=layout.cu_seqlens_padded
    )


def assert_same(ours, expected):
    real = ~expected.padding_mask
    assert torch.equal(ours.padding_mask, expected.padding_mask)
    assert torch.equal(ours.input_ids[real], expected.input_ids[real])
    assert torch.equal(ours.position_ids[:, real], expected.position_ids[:, real])
    for name in ("sources", "targets"):
        assert torch.equal(getattr(ours.fuse, name), getattr(expected.fuse, name))
        assert torch.equal(getattr(ours.deepstack, name), getattr(expected.deepstack, name))
    assert ours.layout == expected.layout
    assert ours.vision.lengths == expected.vision.lengths


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
@pytest.mark.parametrize("shift", [0, 3], ids=["right", "left"])
def test_as_model_inputs_of_padded_rows_matches_collated_batch(provider, config, dtype, shift):
    """`make_batch` adds 3 tokens of padding to the longest row, so all rows can be rolled by 3."""
    samples = make_samples("mixed", config, seed=0)
    batch = make_batch(samples, config, packed=False)
    ids, mask = (x.roll(shift, 1) for x in (batch.input_ids, mask_of(batch).to(dtype)))
    ours, order = as_model_inputs(provider, GROUPS, ids, attention_mask=mask, **pictures(samples))
    assert_same(ours, batch.local())
    assert ours.labels is None
    assert (order is None) == (shift == 0)


def test_as_model_inputs_of_packed_row_matches_collated_batch(provider, config):
    samples = make_samples("mixed", config, seed=0)
    batch = make_batch(samples, config, packed=True)
    for mask in (None, mask_of(batch)):
        ours, order = as_model_inputs(
            provider, GROUPS, batch.input_ids, attention_mask=mask, packed_seq_params=params_of(batch.layout),
            **pictures(samples),
        )  # fmt: skip
        assert_same(ours, batch.local())
        assert order is None


def test_attention_mask_marks_padding_inside_segments_of_packed_row(provider, config):
    samples = make_samples("mixed", config, seed=0)
    batch = make_batch(samples, config, packed=True)
    stretched = packed_params(batch.layout.cu_seqlens_padded.tolist())
    call = dict(packed_seq_params=stretched, attention_mask=mask_of(batch))
    assert_same(as_model_inputs(provider, GROUPS, batch.input_ids, **call, **pictures(samples))[0], batch.local())


def test_attention_mask_marks_padding_after_last_segment_of_packed_row(provider):
    call = dict(packed_seq_params=packed_params([0, 4, 6]), attention_mask=torch.tensor([[1] * 6 + [0] * 2]))
    ours, _ = as_model_inputs(provider, GROUPS, torch.ones(1, 8, dtype=torch.long), **call)
    assert ours.layout == SequenceLayout.packed_row([4, 2], total=8)
    assert ours.padding_mask.tolist() == [[False] * 6 + [True] * 2]


def test_repeated_offsets_of_packed_row_are_ignored(provider):
    call = dict(packed_seq_params=packed_params([0, 4, 4, 6, 6, 6]))
    ours, _ = as_model_inputs(provider, GROUPS, torch.ones(1, 6, dtype=torch.long), **call)
    assert ours.layout == SequenceLayout.packed_row([4, 2])


def test_as_model_inputs_packs_padded_rows_if_packed_seq_params_are_given(provider, config):
    """Row i has segment i. The result does not depend on the side of the padding."""
    samples = make_samples("mixed", config, seed=0)
    packed, rows = (make_batch(samples, config, packed=packed) for packed in (True, False))
    for shift in (0, 3):
        second = dict(cp_size=2, cp_rank=1, vision_work=provider.vision_work)
        for groups, ranks in ((GROUPS, {}), (SECOND_OF_TWO, second)):
            ours, order = as_model_inputs(
                provider, groups, rows.input_ids.roll(shift, 1), attention_mask=mask_of(rows).roll(shift, 1),
                packed_seq_params=params_of(packed.layout), **pictures(samples),
            )  # fmt: skip
            assert_same(ours, packed.local(**ranks))
            assert order is None


def test_packed_row_positions_restart_in_each_document(provider):
    packed = packed_params([0, 6, 12, 18])
    ours, _ = as_model_inputs(provider, GROUPS, torch.ones(1, 18, dtype=torch.long), packed_seq_params=packed)
    assert ours.position_ids.tolist() == [[list(range(6)) * 3]] * 3


def test_position_ids_of_caller_become_zero_for_padding(provider):
    positions = torch.arange(1, 25).view(3, 2, 4)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    ours, _ = as_model_inputs(
        provider, GROUPS, torch.ones(2, 4, dtype=torch.long), position_ids=positions, attention_mask=mask
    )
    assert ours.position_ids[0].tolist() == [[3, 4, 0, 0], [5, 6, 7, 0]]
    assert ours.position_ids[2].tolist() == [[19, 20, 0, 0], [21, 22, 23, 0]]


@pytest.mark.parametrize(
    ("pad", "mask", "lengths"),
    [(None, None, (5, 5, 5)), (7, None, (3, 5, 0)), (7, [[1, 1, 1, 1, 0], [1] * 5, [1] * 5], (4, 5, 5))],
    ids=["no pad id", "trailing run", "a mask comes first"],
)
def test_trailing_pad_tokens_are_padding_if_no_mask_is_given(provider, pad, mask, lengths, monkeypatch):
    monkeypatch.setattr(provider, "pad_token_id", pad)
    ids = torch.tensor([[1, 7, 2, 7, 7], [7, 7, 7, 7, 3], [7, 7, 7, 7, 7]])
    mask = None if mask is None else torch.tensor(mask)
    ours, _ = as_model_inputs(provider, GROUPS, ids, attention_mask=mask)
    assert ours.layout.lengths == lengths
    packed = packed_params([0, 5, 10, 15])
    ours, _ = as_model_inputs(provider, GROUPS, ids, packed_seq_params=packed)
    assert ours.layout.lengths == (5, 5, 5)  # the offsets come first too


@given(st.data())
def test_output_conversion_restores_token_order_of_caller(data):
    """Token ids are used as outputs, for rows and packed rows."""
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    room = max(1, max(lengths)) + data.draw(st.integers(0, 3))
    first = [data.draw(st.integers(0, room - n)) for n in lengths]
    place = torch.arange(room)
    mask = torch.stack([(place >= a) & (place < a + n) for a, n in zip(first, lengths, strict=True)])
    ids = 1 + torch.arange(mask.numel()).view(mask.shape)

    rows = detect_layout(ids, mask, None, None)
    arranged = rows.arrange(ids)
    assert torch.equal(OutputConversion.to_caller_order(rows, None).convert(arranged), ids)
    assert torch.equal(arranged.flatten()[~rows.layout.padding_mask()], ids[mask])

    multiple = data.draw(st.integers(1, 4))
    padded = [-(-n // multiple) * multiple for n in lengths]
    flat_row = len(lengths) == 1 and padded[0] == room  # where the caller's order is the packed row's
    if not sum(padded) or (flat_row and first[0]):
        return
    offsets = [0, *torch.tensor(padded).cumsum(0).tolist()]
    packed = detect_layout(ids, mask, packed_params(offsets), None)
    arranged = packed.arrange(ids)
    assert torch.equal(arranged.flatten()[~packed.layout.padding_mask()], ids[mask])
    assert not OutputConversion.to_caller_order(packed, None).is_needed
    outputs = OutputConversion.to_caller_order(packed, ids).convert(arranged)
    assert torch.equal(outputs[mask], ids[mask]) and outputs.shape == ids.shape
    assert flat_row or not outputs[~mask].any()


def test_layout_packed_seq_params_sets_pad_between_seqs_to_false():
    """Otherwise Transformer Engine disables FlashAttention, and no backend is left in float32."""
    found = layout_packed_seq_params(SequenceLayout.from_lengths(1, [5, 0, 3, 0], [8, 4, 4, 8]))
    assert found.cu_seqlens_q.tolist() == [0, 8, 12, 16, 24] and found.cu_seqlens_q.dtype == torch.int32
    assert found.pad_between_seqs is False
    # One tensor: releases that compare the offsets compare it with itself, and the latest ask for no more than that.
    assert found.cu_seqlens_q is found.cu_seqlens_kv is found.cu_seqlens_q_padded is found.cu_seqlens_kv_padded
    assert found.max_seqlen_q == found.max_seqlen_kv == 8 and found.lengths == (8, 4, 4, 8)
    assert layout_packed_seq_params(SequenceLayout.padded_rows([5, 3], 8)) is None


def test_vision_packed_seq_params_have_one_segment_per_frame(config):
    frames = make_batch(make_samples("video", config, seed=0), config).vision
    found = packed_seq_params(frames.cu_seqlens, frames.lengths)
    assert found.cu_seqlens_q is found.cu_seqlens_kv_padded is frames.cu_seqlens
    assert found.pad_between_seqs is False and found.max_seqlen_q == max(frames.lengths)


LOGITS = 1e-5  # absolute, measured 1.4e-6, of logits up to about 2


@pytest.mark.parametrize("side", ["right", "left"])
def test_text_position_ids_of_batch_with_images_are_ignored(pair, side):
    """Megatron-Bridge's generate scripts and `vlm_step` pass aranges, transformers counts real tokens."""
    rows = rows_of(pair, side)
    call = dict(attention_mask=rows.attention_mask, **rows.pixels)
    expected = no_grad(pair.megatron, rows.input_ids, **call)
    of_row = torch.arange(rows.input_ids.shape[1]).expand_as(rows.input_ids)
    of_tokens = (rows.attention_mask.cumsum(-1) - 1).masked_fill(rows.attention_mask == 0, 1)
    for positions in (of_row, of_tokens):
        assert torch.equal(no_grad(pair.megatron, rows.input_ids, positions, **call), expected)


def test_text_position_ids_with_image_and_no_mask_are_ignored(provider, config):
    samples = make_samples("one image", config, seed=0)
    ids = samples[0].ids[None]
    ours, _ = as_model_inputs(provider, GROUPS, ids, position_ids=torch.arange(ids.shape[1])[None], **pictures(samples))
    assert torch.equal(ours.position_ids, make_batch(samples, config, packed=True).position_ids[:, :, : ids.shape[1]])


@pytest.mark.parametrize("restart", [True, False], ids=["in each document", "over the row"])
def test_text_position_ids_of_packed_row_with_images_are_ignored(provider, config, restart):
    samples = make_samples("mixed", config, seed=0)
    lengths = [len(s.ids) for s in samples]
    positions = torch.cat([torch.arange(n) for n in lengths]) if restart else torch.arange(sum(lengths))
    call = dict(packed_seq_params=packed_params(offsets(lengths)), **pictures(samples))
    ids = torch.cat([s.ids for s in samples])[None]
    ours, _ = as_model_inputs(provider, GROUPS, ids, position_ids=positions[None], **call)
    expected, _ = as_model_inputs(provider, GROUPS, ids, **call)
    assert torch.equal(ours.position_ids, expected.position_ids)


def test_as_model_inputs_warns_once_about_ignored_text_position_ids(provider, config, caplog):
    caller_batches._warn_once.cache_clear()
    samples = make_samples("one image", config, seed=0)
    ids = samples[0].ids[None]
    given = dict(position_ids=torch.arange(ids.shape[1])[None], **pictures(samples))
    with caplog.at_level(logging.WARNING, logger=caller_batches.__name__):
        for _ in range(2):
            as_model_inputs(provider, GROUPS, ids, **given)
            as_model_inputs(provider, GROUPS, ids % 7, position_ids=given["position_ids"])  # text: nothing to say
    assert [record.message.split(" are ")[0] for record in caplog.records] == ["position_ids [rows, tokens]"]


def test_language_model_with_text_position_ids_matches_full_model(pair):
    """Text positions are used for all three axes, as in Megatron-Bridge's own text model."""
    rows = rows_of(pair, "right", "text only")
    positions = torch.arange(rows.input_ids.shape[1]).expand_as(rows.input_ids)
    found = no_grad(pair.megatron.language_model, rows.input_ids, positions, None)
    expected = no_grad(pair.megatron, rows.input_ids, attention_mask=rows.attention_mask)
    assert (rows.real(found) - rows.real(expected)).abs().max() <= LOGITS
    losses = no_grad(pair.megatron.language_model, rows.input_ids, positions, None, labels=rows.labels)
    wanted = F.cross_entropy(rows.real(found), rows.real(rows.labels), reduction="none")
    assert (rows.real(losses) - wanted).abs().max() <= LOGITS


@pytest.mark.parametrize("shape", [(5,), (2, 4, 5), (1, 4, 5), (3, 1, 4, 5)])
def test_rope_raises_if_position_ids_have_invalid_shape(shape):
    rope = InterleavedMRoPE(8, 1e4, [2, 1, 1], torch.float32)
    assert rope(torch.zeros(4, 5).long()).shape == rope(torch.zeros(3, 4, 5).long()).shape == (2, 5, 4, 1, 8)
    with pytest.raises(ValueError, match=r"expected \[3, rows, tokens\], or \[rows, tokens\] for text"):
        rope(torch.zeros(shape).long())
    with pytest.raises(ValueError, match="position_ids has shape None"):
        rope(None)


IDS = torch.arange(1, 17).view(2, 8)
LABELS = IDS + 1
FLAT = dict(input_ids=IDS.view(1, 16), packed_seq_params=packed_params([0, 8, 16]))
ROWS = dict(input_ids=IDS, packed_seq_params=packed_params([0, 8, 16]))


def test_loss_mask_without_labels_has_no_effect(pair):
    """Miles passes a loss mask to every forward pass."""
    rows = rows_of(pair, "left")
    call = dict(attention_mask=rows.attention_mask, **rows.pixels)
    expected = no_grad(pair.megatron, rows.input_ids, **call)
    assert torch.equal(no_grad(pair.megatron, rows.input_ids, loss_mask=rows.loss_mask, **call), expected)
    by_place = (rows.input_ids, None, rows.attention_mask, None, rows.loss_mask)
    assert torch.equal(no_grad(pair.megatron, *by_place, **rows.pixels), expected)


@pytest.mark.parametrize(
    ("given", "shapes"), [(dict(input_ids=IDS), r"\[2, 8\]"), (ROWS, r"\[2, 8\] or \[1, 16\]"), (FLAT, r"\[1, 16\]")],
    ids=["rows", "rows packed", "flat"],
)  # fmt: skip
def test_as_model_inputs_raises_if_loss_mask_without_labels_has_wrong_shape(provider, given, shapes):
    with pytest.raises(ValueError, match=rf"loss_mask has shape \[2, 7\], expected {shapes}$"):
        as_model_inputs(provider, GROUPS, **given, loss_mask=torch.ones(2, 7))
    for mask in (torch.ones(2, 8), torch.ones(1, 16)):
        if str(list(mask.shape)) in shapes.replace("\\", ""):
            inputs, answer = as_model_inputs(provider, GROUPS, **given, loss_mask=mask)
            assert answer is None and inputs.labels is None


def test_labels_of_minus_100_have_zero_loss(pair):
    """Collators of ms-swift and Hugging Face set -100, with and without packing."""
    rows = rows_of(pair, "left")
    labels = rows.labels.masked_fill(rows.loss_mask == 0, -100)
    for more in (dict(), dict(packed_seq_params=packed_params(offsets(rows.lengths)))):
        call = dict(attention_mask=rows.attention_mask, **rows.pixels, **more)
        found = no_grad(pair.megatron, rows.input_ids, labels=labels, **call)
        expected = no_grad(pair.megatron, rows.input_ids, labels=rows.labels, **call)
        assert torch.equal(found, expected * rows.loss_mask)


@pytest.mark.parametrize("given", [dict(input_ids=IDS), ROWS, FLAT], ids=["rows", "rows packed", "flat"])
def test_as_model_inputs_keeps_sliced_labels_if_tokens_are_full(provider, given):
    """Megatron-Bridge's `qwen3_vl_step` and verl's fused kernels pass such labels."""
    rows = 2 if given.keys() == {"input_ids"} else 1
    own = LABELS.view(2, 4, 2)[:, 1:3].reshape(rows, -1)  # the second of two ranks has the middle
    mask = (own % 3 > 0).float()
    inputs, answer = as_model_inputs(provider, SECOND_OF_TWO, **given, labels=own, loss_mask=mask)
    assert answer is None  # the caller has the mask that belongs to what it is given
    assert torch.equal(inputs.labels, own) and torch.equal(inputs.loss_mask, mask)
    whole, _ = as_model_inputs(provider, SECOND_OF_TWO, **given, labels=LABELS.view(rows, -1))
    assert torch.equal(whole.labels, own)
    assert torch.equal(whole.input_ids, inputs.input_ids)


@pytest.mark.parametrize("given", ["labels", "loss_mask"])
def test_as_model_inputs_raises_if_labels_are_sliced_and_rows_left_padded(provider, given):
    """Tokens are rolled to the front of their rows; labels divided before are not."""
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    own = LABELS.view(2, 4, 2)[:, 1:3].reshape(2, -1)
    with pytest.raises(ValueError, match=r"context parallelism over 2 ranks.* Pad rows on the right"):
        as_model_inputs(provider, SECOND_OF_TWO, IDS, attention_mask=mask, **{given: own})
    right = mask.flip(1)
    inputs, _ = as_model_inputs(provider, SECOND_OF_TWO, IDS, attention_mask=right, **{given: own})
    assert torch.equal(getattr(inputs, given).long(), own)


def test_sliced_labels_of_minus_100_have_zero_loss(provider):
    own = torch.tensor([[3, -100, 5, 6], [11, 12, -100, 14]])
    inputs, answer = as_model_inputs(provider, SECOND_OF_TWO, IDS, labels=own)
    assert torch.equal(inputs.labels, own.clamp(min=0)) and torch.equal(answer.ignored_labels, own < 0)
    losses = torch.ones(2, 4)
    assert torch.equal(answer.convert(losses), (own > 0).float())


@pytest.mark.parametrize("given", [dict(input_ids=IDS), FLAT], ids=["rows", "flat"])
@pytest.mark.parametrize("labels", [True, False])
def test_output_conversion_returns_loss_mask_slice_of_context_parallel_rank(provider, given, labels):
    """Megatron-Bridge's `vlm_step` expects the tuple that its own model returns."""
    shape = given["input_ids"].shape
    mask = (IDS % 3 > 0).view(shape).float()
    more = dict(labels=LABELS.view(shape)) if labels else {}
    inputs, answer = as_model_inputs(provider, SECOND_OF_TWO, **given, loss_mask=mask, **more)
    output = torch.rand(shape[0], shape[1] // 2)
    found, own = answer.convert(output)
    assert found is output and torch.equal(own, mask.view(2, 4, 2)[:, 1:3].reshape(own.shape))
    assert own.shape == inputs.input_ids.shape == output.shape
    assert as_model_inputs(provider, GROUPS, **given, loss_mask=mask, **more)[1] is None


def test_as_model_inputs_raises_if_labels_and_loss_mask_have_different_shapes(provider):
    with pytest.raises(ValueError, match=r"loss_mask has shape \[2, 8\], expected \[2, 4\] as labels"):
        as_model_inputs(provider, SECOND_OF_TWO, IDS, labels=LABELS[:, :4], loss_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"labels has shape \[2, 4\] .* expected \[2, 8\] token ids below 512"):
        as_model_inputs(provider, GROUPS, IDS, labels=LABELS[:, :4])


def test_as_model_inputs_raises_if_label_with_loss_mask_1_is_minus_100(provider):
    labels = LABELS.masked_fill(LABELS == 5, -100)
    with pytest.raises(ValueError, match=r"entries in \[-100, 17\], expected .* only where loss_mask is 0"):
        as_model_inputs(provider, GROUPS, IDS, labels=labels, loss_mask=torch.ones(2, 8))


def test_as_model_inputs_raises_if_labels_and_tokens_differ_in_order(provider):
    """A row that begins with padding may be as long as its segment, by chance also in verl."""
    call = dict(attention_mask=torch.tensor([[0] + [1] * 7]), packed_seq_params=packed_params([0, 8]))
    inputs, answer = as_model_inputs(provider, GROUPS, IDS[:1], **call)
    assert answer is None and inputs.input_ids[0, :7].tolist() == IDS[0, 1:].tolist()
    with pytest.raises(ValueError, match="so their token orders differ"):
        as_model_inputs(provider, GROUPS, IDS[:1], labels=LABELS[:1], **call)


def ids(rows, tokens):
    return torch.ones(rows, tokens, dtype=torch.long)


ONE_PICTURE = dict(pixel_values=torch.zeros(4, 1536), image_grid_thw=torch.tensor([[1, 2, 2]]))


def flat(logical, mask=None):
    """Return arguments for one row with these offsets."""
    mask = None if mask is None else torch.tensor(mask)
    return dict(input_ids=ids(1, 8), packed_seq_params=packed_params(logical), attention_mask=mask)


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(input_ids=None), r"input_ids has shape None, expected \[rows, tokens\]"),
    (dict(input_ids=torch.ones(4, dtype=torch.long)), r"input_ids has shape \[4\]"),
    (dict(input_ids=ids(2, 0)), r"input_ids has shape \[2, 0\]"),
    (dict(input_ids=torch.ones(2, 6)), r"\[2, 6\] torch.float32, expected \[rows, tokens\] of integers"),
    (dict(position_ids=ids(6, 2)), r"position_ids has shape \[6, 2\] torch.int64, expected \[3, 2, 6\]"),
    (dict(position_ids=torch.zeros(3, 2, 6)), r"torch.float32, expected \[3, 2, 6\] integers"),
    (dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)), "several documents, give packed_seq_params"),
    (dict(position_ids=ids(8, 6).view(4, 2, 6)), "several documents, give packed_seq_params"),
    (dict(attention_mask=torch.ones(2, 5)), r"attention_mask has shape \[2, 5\], expected \[2, 6\]"),
    (dict(attention_mask=torch.ones(2, 1, 6, 7)), r"\[2, 1, 6, 7\], expected \[2, 6\].*\[2 or 1, 1, 6, 6\]"),
    (dict(attention_mask=torch.tensor([[1] * 6, [0, 1, 0, 1, 1, 1]])), "padding between real tokens in row 1"),
    (dict(attention_mask=torch.tensor([[0.0, 0, 0, 0, 0, -1e9]] * 2)), "an entry -1000000000.0, expected 1"),
    (dict(packed_seq_params=PackedSeqParams(qkv_format="thd")), "cu_seqlens_q None, expected 'thd'"),
    (dict(packed_seq_params=PackedSeqParams("sbhd", torch.tensor([0, 6, 12]))), "qkv_format 'sbhd'"),
    (dict(packed_seq_params=packed_params([0, 6, 4])), r"cu_seqlens_q is \[0, 6, 4\], expected offsets"),
    (dict(packed_seq_params=packed_params([1, 6, 12])), "expected offsets that ascend from 0"),
    (dict(packed_seq_params=packed_params([0, 6, 12], [0, 12])), "has 3 entries, cu_seqlens_q_padded 2"),
    (dict(packed_seq_params=packed_params([0, 6, 12], [0, 4, 12])), r"tokens in padded lengths of \[4, 8\]"),
    (dict(packed_seq_params=packed_params([0, 8, 12])), "8 tokens for row 0, which is only 6 .* its real tokens"),
    (dict(packed_seq_params=packed_params([0, 4, 8, 12])), "row 1 of 6 tokens begins inside a segment"),
    (dict(packed_seq_params=packed_params([0, 4, 8, 9])), r"9 tokens in all.*expected 12 tokens.*each of 2 rows"),
    (dict(packed_seq_params=packed_params([0, 5, 10]), attention_mask=ids(2, 6)), "segment 0: attention_mask has"),
    (dict(packed_seq_params=packed_params([0, 5, 10], [0, 6, 12]), attention_mask=torch.eye(2, 6).cummax(1)[0]),
     "segment 0: attention_mask has 6 real tokens, but packed_seq_params gives 5 tokens and a padded length of 6"),
    (dict(ONE_PICTURE), "found 0 image tokens in the batch, expected 1 for 1 images"),
    (dict(pixel_values=torch.zeros(4, 1536)), "image pixels: found 4 patches, expected 0"),
    (dict(pixel_values=torch.zeros(1, 4, 1536)), r"pixel_values has shape \[1, 4, 1536\]"),
    (dict(pixel_values_videos=torch.zeros(4, 99)), r"pixel_values_videos has shape \[4, 99\].*\[patches, 1536\]"),
    (dict(pixel_values=torch.zeros(4, 1536).byte()), "torch.uint8, expected .* floating point"),
    (dict(ONE_PICTURE, image_grid_thw=torch.tensor([1, 2, 2])), r"image grids: found \[3\]"),
    (dict(ONE_PICTURE, image_grid_thw=torch.tensor([[1, 2, 3]])), "divisible by 2"),
    (flat([0, 4, 6]), "6 tokens in all.* expected 8 tokens.*an attention_mask that marks the rest as padding"),
    (flat([0, 4, 6], [[1] * 8]), "an attention_mask that marks the rest as padding"),
    (flat([0, 4, 16]), "16 tokens in all.* expected 8 tokens, the full batch. .* also takes one flat row"),
    (flat([0, 16]), "16 tokens for row 0, .*counts the tokens of all ranks"),
    (flat([0, 4, 8], [[0, 1, 1, 1, 1, 1, 1, 1]]), "padding before real tokens in segment 0"),
    (flat([0, 4, 8], [[1, 1, 1, 1, 1, 0, 1, 1]]), "padding before real tokens in segment 1"),
    (flat([0, 8], [[1, 1, 0, 1, 1, 1, 1, 1]]), "padding before real tokens in segment 0"),
    (dict(labels=torch.full((2, 6), 512)), r"entries in \[512, 512\]"),
    (dict(labels=torch.ones(2, 6)), "torch.float32"),
    (dict(labels=torch.full((2, 6), -1)), r"in \[-1, -1\], expected \[2, 6\] token ids below 512. Other values"),
    (dict(labels=torch.ones(2, 5, dtype=torch.long)), r"labels has shape \[2, 5\]"),
    (dict(labels=torch.ones(1, 12, dtype=torch.long)), r"labels has shape \[1, 12\]"),
    *[(dict.fromkeys([name], object()), f"{name} is given, expected None: ") for name in UNSUPPORTED],
])  # fmt: skip
def test_as_model_inputs_raises_if_arguments_are_invalid(provider, arguments, message):
    with pytest.raises(ValueError, match=message):
        as_model_inputs(provider, GROUPS, **{"input_ids": ids(2, 6), **arguments})


def test_as_model_inputs_raises_if_argument_is_unknown(provider):
    as_model_inputs(provider, GROUPS, ids(2, 6), loss_mask=None, extra_block_kwargs=None, inference_params=None)
    with pytest.raises(TypeError, match="unexpected argument 'image_grid_hwt'"):
        as_model_inputs(provider, GROUPS, ids(2, 6), image_grid_hwt=None)


def test_as_model_inputs_raises_if_context_parallel_outputs_need_reordering(provider):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"context parallelism over 2 ranks.*Pad rows on the right"):
        as_model_inputs(provider, SECOND_OF_TWO, ids(1, 8), attention_mask=mask)
    as_model_inputs(provider, SECOND_OF_TWO, ids(1, 8), attention_mask=mask.flip(1))
    packed = dict(packed_seq_params=packed_params([0, 8, 16]))
    with pytest.raises(ValueError, match=r"labels in the packed row's order, \[1, tokens\]"):
        as_model_inputs(provider, SECOND_OF_TWO, ids(2, 8), labels=ids(2, 8), **packed)
    inputs, _ = as_model_inputs(provider, SECOND_OF_TWO, ids(2, 8), labels=torch.arange(16)[None], **packed)
    assert inputs.labels.tolist() == [[2, 3, 4, 5, 10, 11, 12, 13]]


def test_as_model_inputs_raises_if_position_ids_with_images_are_not_ascending(provider, config):
    """Megatron-Bridge ignores them, although they do not express the order of tokens."""
    found = torch.tensor([[5, config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]])
    given = dict(position_ids=torch.tensor([[0, 1, 1, 2]]), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"position_ids has shape \[1, 4\] in a batch with images or videos"):
        as_model_inputs(provider, GROUPS, found, **given, **ONE_PICTURE)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("left_out", ["pixels", "grid", "both"])
def test_as_model_inputs_raises_if_vision_tokens_have_no_pixels_or_grid(provider, config, kind, left_out):
    token = getattr(config, f"{kind}_token_id")
    found = torch.tensor([[5, config.vision_start_token_id, token, config.vision_end_token_id]])
    names = dict(pixels="pixel_values", grid="image_grid_thw")
    if kind == "video":
        names = dict(pixels="pixel_values_videos", grid="video_grid_thw")
    pictures = dict(zip(names.values(), ONE_PICTURE.values(), strict=True))
    for name in names.values() if left_out == "both" else [names[left_out]]:
        del pictures[name]
    with pytest.raises(ValueError, match=kind):
        as_model_inputs(provider, GROUPS, found, position_ids=torch.zeros(3, 1, 4, dtype=torch.long), **pictures)


ROOM = 6
IDS_REFUSALS = torch.arange(1, 1 + 2 * ROOM).view(2, ROOM)
REAL = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6]).bool()
LEFT = REAL.flip(1)


def seen_by(real):
    """Return [B, 1, S, S] bool: causal, and no token attends to padding."""
    return (real[:, None, :] & torch.ones(ROOM, ROOM).bool().tril())[:, None]


def swift_mask(real):
    """Return the mask of ms-swift's collator for Megatron: [B, 1, S, S], True for masked entries."""
    return ~seen_by(real)


def real_of(mask):
    return read_arguments(dict(input_ids=IDS_REFUSALS, attention_mask=mask))["attention_mask"]


def transformers_masks(real, implementation):
    """Return transformers' mask: additive for eager attention, else True where a token is attended to."""
    config = Qwen3VLTextConfig(attn_implementation=implementation)
    rows = torch.zeros(*real.shape, 8)
    return create_causal_mask(config, rows, real, None, position_ids=None)


def additive(real, never):
    return torch.zeros(len(real), 1, ROOM, ROOM).masked_fill(~seen_by(real), never)


MASKS = {
    "ms-swift": swift_mask, "transformers, sdpa": lambda real: transformers_masks(real, "sdpa"),
    "transformers, eager": lambda real: transformers_masks(real, "eager"),
    "Megatron, to be added": lambda real: additive(real, -10000.0),
    "infinite": lambda real: additive(real, float("-inf")), "without heads": lambda real: swift_mask(real)[:, 0],
    "integers": lambda real: swift_mask(real).long(),
    "padding sees nothing": lambda real: ~(seen_by(real) & real[:, None, :, None]),
}  # fmt: skip


@pytest.mark.parametrize("real", [REAL, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("kind", MASKS)
def test_padding_is_read_from_square_attention_mask_of_every_format(provider, kind, real):
    mask = MASKS[kind](real)
    assert mask.dim() > 2
    assert torch.equal(real_of(mask), real)
    ours, answer = as_model_inputs(provider, GROUPS, IDS_REFUSALS, attention_mask=mask)
    expected, _ = as_model_inputs(provider, GROUPS, IDS_REFUSALS, attention_mask=real)
    assert ours.layout == expected.layout and torch.equal(ours.input_ids, expected.input_ids)
    assert (answer is None) == (real is REAL)


@pytest.mark.parametrize("rows", [1, 2])
def test_causal_mask_shared_by_all_rows_is_ignored(provider, monkeypatch, rows):
    """NeMo-RL without sequence packing passes one causal mask [1, 1, S, S] with every batch."""
    monkeypatch.setattr(provider, "pad_token_id", 9)
    ids = torch.tensor([[1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 5, 6]])[:rows]
    mask = torch.ones(1, 1, ROOM, ROOM).tril() < 0.5
    call = dict(position_ids=torch.arange(ROOM).expand_as(ids), attention_mask=mask)
    ours, answer = as_model_inputs(provider, GROUPS, ids, **call)
    assert answer is None and ours.layout.lengths == (4, 6)[:rows]  # as without a mask
    ones = torch.ones(rows, ROOM)
    assert as_model_inputs(provider, GROUPS, ids, attention_mask=ones)[0].layout.lengths == (6, 6)[:rows]


def test_square_attention_mask_without_padding_marks_all_tokens_real(provider):
    mask = swift_mask(torch.ones_like(REAL))
    assert real_of(mask).all()


@given(st.data())
def test_random_padding_is_read_back_from_square_attention_mask(data):
    lengths = [data.draw(st.integers(0, ROOM)) for _ in IDS_REFUSALS]
    first = [data.draw(st.integers(0, ROOM - n)) for n in lengths]
    place = torch.arange(ROOM)
    real = torch.stack([(place >= a) & (place < a + n) for a, n in zip(first, lengths, strict=True)])
    if real.any():
        mask = data.draw(st.sampled_from([swift_mask(real), seen_by(real), additive(real, -1e9)]))
        assert torch.equal(real_of(mask), real)


def changed(row, token, other, value):
    mask = swift_mask(REAL)
    mask[row, 0, token, other] = value
    return mask


@pytest.mark.parametrize(("mask", "message"), [
    (torch.zeros(2, 1, ROOM, ROOM).bool(), "has False for token 0 and token 5 of row 0"),
    (torch.ones(1, 1, ROOM, ROOM), "has 1.0 for token 0 and token 5 of row 0"),
    (torch.stack([torch.zeros(1, ROOM, ROOM).bool(), swift_mask(REAL)[1]]), "token 0 and token 5 of row 1"),
    (changed(1, 2, 1, True), "has True for token 2 and token 1 of row 1"),
    (changed(1, 2, 3, False), "has False for token 2 and token 3 of row 1"),
    (~torch.block_diag(*[torch.ones(3, 3).tril()] * 2).bool()[None, None], "has True for token 3 and token 0"),
    (torch.zeros(1, 1, ROOM, ROOM) - torch.arange(ROOM), "has -1.0 for token 0 and token 1"),  # a bias
    (torch.full((1, 1, ROOM, ROOM), 2), "has 2 for token 0 and token 0 of row 0. Give .* with booleans, 0 and 1"),
    (swift_mask(REAL)[:, :, :5], r"\[2, 1, 5, 6\], expected \[2, 6\], .* or a causal mask, \[2 or 1, 1, 6, 6\]"),
    (swift_mask(REAL).expand(2, 3, ROOM, ROOM), r"has shape \[2, 3, 6, 6\]"),
    (REAL[:, None, None], r"has shape \[2, 1, 1, 6\]"),
])  # fmt: skip
def test_invalid_square_attention_mask_raises(provider, mask, message):
    with pytest.raises(ValueError, match=message):
        as_model_inputs(provider, GROUPS, IDS_REFUSALS, attention_mask=mask)


def test_padding_mask_is_read_as_inverse_of_attention_mask(provider):
    """megatron-core and verl pass a padding mask for experts."""
    expected, _ = as_model_inputs(provider, GROUPS, IDS_REFUSALS, attention_mask=REAL)
    for beside in (None, REAL, swift_mask(REAL)):
        ours, _ = as_model_inputs(provider, GROUPS, IDS_REFUSALS, padding_mask=~REAL, attention_mask=beside)
        assert ours.layout == expected.layout and torch.equal(ours.padding_mask, expected.padding_mask)
    more = ~REAL | ~REAL.roll(1, 1)  # the first token of row 0 too
    ours, _ = as_model_inputs(provider, GROUPS, IDS_REFUSALS, padding_mask=more, attention_mask=REAL)
    assert ours.layout == expected.layout and torch.equal(ours.padding_mask, more)
    with pytest.raises(ValueError, match="padding_mask has 0 for token 4 of row 0, expected 1 to agree with attention"):
        as_model_inputs(provider, GROUPS, IDS_REFUSALS, padding_mask=torch.zeros(2, ROOM), attention_mask=REAL)
    with pytest.raises(ValueError, match=r"padding_mask has shape \[2, 5\], expected \[2, 6\]: 1 for padding"):
        as_model_inputs(provider, GROUPS, IDS_REFUSALS, padding_mask=torch.zeros(2, 5))


def test_padding_mask_of_packed_row_may_exclude_real_tokens(provider):
    """Verl's `router_padding_mask` may also exclude real tokens from load balancing."""
    call = dict(attention_mask=REAL, packed_seq_params=packed_params([0, 4, 10], [0, 6, 12]))
    expected, _ = as_model_inputs(provider, GROUPS, IDS_REFUSALS, **call)
    assert expected.padding_mask.sum() == 2
    for more in (torch.zeros(1, 12).bool(), torch.arange(12)[None] == 7):
        given = expected.padding_mask | more
        ours, _ = as_model_inputs(provider, GROUPS, IDS_REFUSALS, padding_mask=given, **call)
        assert ours.layout == expected.layout and torch.equal(ours.padding_mask, given)
    with pytest.raises(ValueError, match="padding_mask has 0 for token 4 of the packed row, expected 1 for padding"):
        as_model_inputs(provider, GROUPS, IDS_REFUSALS, padding_mask=torch.zeros(1, 12).bool(), **call)
    with pytest.raises(ValueError, match=r"padding_mask has shape \[1, 11\], expected \[1, 12\]"):
        as_model_inputs(provider, GROUPS, IDS_REFUSALS, padding_mask=torch.zeros(1, 11), **call)
