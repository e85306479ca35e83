"""Labels and loss masks in callers' conventions."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.inputs import as_model_inputs

import pytest
import torch

from tests.parity.batches import make_samples

from .support import GROUPS, SECOND_OF_TWO, gaps, make_rows, no_grad, offsets, packed_params

IDS = torch.arange(1, 17).view(2, 8)
LABELS = IDS + 1
FLAT = dict(input_ids=IDS.view(1, 16), packed_seq_params=packed_params([0, 8, 16]))
ROWS = dict(input_ids=IDS, packed_seq_params=packed_params([0, 8, 16]))


def test_a_loss_mask_without_labels_changes_nothing(pair):
    """In miles every forward gets one, to train and for log-probabilities."""
    samples = make_samples("mixed", pair.config, seed=2)
    rows = make_rows(samples, gaps(samples))
    call = dict(attention_mask=rows.attention_mask, **rows.pixels)
    expected = no_grad(pair.megatron, rows.input_ids, **call)
    assert torch.equal(no_grad(pair.megatron, rows.input_ids, loss_mask=rows.loss_mask, **call), expected)
    by_place = (rows.input_ids, None, rows.attention_mask, None, rows.loss_mask)
    assert torch.equal(no_grad(pair.megatron, *by_place, **rows.pixels), expected)


@pytest.mark.parametrize(
    ("given", "shapes"),
    [(dict(input_ids=IDS), r"\[2, 8\]"), (ROWS, r"\[2, 8\] or \[1, 16\]"), (FLAT, r"\[1, 16\]")],
    ids=["rows", "rows packed", "flat"],
)
def test_a_loss_mask_without_labels_has_their_shape(provider, given, shapes):
    with pytest.raises(ValueError, match=rf"loss_mask has shape \[2, 7\], expected {shapes}$"):
        as_model_inputs(provider, GROUPS, **given, loss_mask=torch.ones(2, 7))
    for mask in (torch.ones(2, 8), torch.ones(1, 16)):
        if str(list(mask.shape)) in shapes.replace("\\", ""):
            inputs, answer = as_model_inputs(provider, GROUPS, **given, loss_mask=mask)
            assert answer is None and inputs.labels is None


def test_ignored_labels_have_no_loss(pair):
    """As ms-swift and Hugging Face collators give them, with and without packing."""
    samples = make_samples("mixed", pair.config, seed=2)
    rows, lengths = make_rows(samples, gaps(samples)), [len(s.ids) for s in samples]
    labels = rows.labels.masked_fill(rows.loss_mask == 0, -100)
    for more in (dict(), dict(packed_seq_params=packed_params(offsets(lengths)))):
        call = dict(attention_mask=rows.attention_mask, **rows.pixels, **more)
        found = no_grad(pair.megatron, rows.input_ids, labels=labels, **call)
        expected = no_grad(pair.megatron, rows.input_ids, labels=rows.labels, **call)
        assert torch.equal(found, expected * rows.loss_mask)


def test_losses_of_labels_that_a_mask_leaves_out_are_still_losses(pair):
    """The mask is the caller's to multiply by; who asks for log-probabilities may want the others too."""
    samples = make_samples("mixed", pair.config, seed=2)
    rows = make_rows(samples, [0] * 4)
    call = dict(attention_mask=rows.attention_mask, labels=rows.labels, **rows.pixels)
    expected = no_grad(pair.megatron, rows.input_ids, **call)
    assert torch.equal(no_grad(pair.megatron, rows.input_ids, loss_mask=rows.loss_mask, **call), expected)


@pytest.mark.parametrize("given", [dict(input_ids=IDS), ROWS, FLAT], ids=["rows", "rows packed", "flat"])
def test_labels_may_be_cut_over_ranks_beside_whole_tokens(provider, given):
    """As Megatron-Bridge's `qwen3_vl_step` and verl's fused kernels give them."""
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
def test_labels_cut_beside_rows_with_padding_on_the_left_are_refused(provider, given):
    """Tokens are rolled to the front of their rows on the way in; what was cut from the rows was not."""
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    own = LABELS.view(2, 4, 2)[:, 1:3].reshape(2, -1)
    with pytest.raises(ValueError, match=r"context parallelism over 2 ranks .* expected rows padded on the right"):
        as_model_inputs(provider, SECOND_OF_TWO, IDS, attention_mask=mask, **{given: own})
    right = mask.flip(1)
    inputs, _ = as_model_inputs(provider, SECOND_OF_TWO, IDS, attention_mask=right, **{given: own})
    assert torch.equal(getattr(inputs, given).long(), own)


def test_ignored_labels_of_a_ranks_own(provider):
    own = torch.tensor([[3, -100, 5, 6], [11, 12, -100, 14]])
    inputs, answer = as_model_inputs(provider, SECOND_OF_TWO, IDS, labels=own)
    assert torch.equal(inputs.labels, own.clamp(min=0)) and torch.equal(answer.unlabelled, own < 0)
    losses = torch.ones(2, 4)
    assert torch.equal(answer.of(losses), (own > 0).float())


@pytest.mark.parametrize("given", [dict(input_ids=IDS), FLAT], ids=["rows", "flat"])
@pytest.mark.parametrize("labels", [True, False])
def test_a_whole_loss_mask_comes_back_cut(provider, given, labels):
    """Megatron-Bridge's `vlm_step` takes the tuple that its own model returns then."""
    shape = given["input_ids"].shape
    mask = (IDS % 3 > 0).view(shape).float()
    more = dict(labels=LABELS.view(shape)) if labels else {}
    inputs, answer = as_model_inputs(provider, SECOND_OF_TWO, **given, loss_mask=mask, **more)
    output = torch.rand(shape[0], shape[1] // 2)
    found, own = answer.of(output)
    assert found is output and torch.equal(own, mask.view(2, 4, 2)[:, 1:3].reshape(own.shape))
    assert own.shape == inputs.input_ids.shape == output.shape
    assert as_model_inputs(provider, GROUPS, **given, loss_mask=mask, **more)[1] is None


def test_labels_and_masks_of_one_kind_each_are_refused(provider):
    with pytest.raises(ValueError, match=r"loss_mask has shape \[2, 8\], expected \[2, 4\] as labels"):
        as_model_inputs(provider, SECOND_OF_TWO, IDS, labels=LABELS[:, :4], loss_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"labels has shape \[2, 4\] .* expected \[2, 8\] token ids below 512"):
        as_model_inputs(provider, GROUPS, IDS, labels=LABELS[:, :4])


def test_an_ignored_label_that_the_mask_counts_is_refused(provider):
    labels = LABELS.masked_fill(LABELS == 5, -100)
    with pytest.raises(ValueError, match=r"entries in \[-100, 17\], expected .* only where loss_mask is 0"):
        as_model_inputs(provider, GROUPS, IDS, labels=labels, loss_mask=torch.ones(2, 8))


def test_one_shape_that_could_be_two_orders_is_refused(provider):
    """A row that begins with padding and is as long as its segment; verl's rows can be so by chance."""
    call = dict(attention_mask=torch.tensor([[0] + [1] * 7]), packed_seq_params=packed_params([0, 8]))
    inputs, answer = as_model_inputs(provider, GROUPS, IDS[:1], **call)
    assert answer is None and inputs.input_ids[0, :7].tolist() == IDS[0, 1:].tolist()
    with pytest.raises(ValueError, match="its order could be either's"):
        as_model_inputs(provider, GROUPS, IDS[:1], labels=LABELS[:1], **call)
