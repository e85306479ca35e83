"""The model's door refuses calls that mean nothing or two things, and says what it found and what it expected."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.inputs import REFUSED, as_model_inputs

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from .support import GROUPS, SECOND_OF_TWO, packed_params


def ids(rows, tokens):
    return torch.ones(rows, tokens, dtype=torch.long)


ONE_PICTURE = dict(pixel_values=torch.zeros(4, 1536), image_grid_thw=torch.tensor([[1, 2, 2]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
        (dict(packed_seq_params=packed_params([0, 6, 12], [0, 4, 12])), r"tokens in lengths of \[4, 8\]"),
        (dict(packed_seq_params=packed_params([0, 8, 12])), "8 tokens for row 0 of 6; expected its real tokens"),
        (dict(packed_seq_params=packed_params([0, 4, 8, 12])), "row 1 of 6 tokens begins inside one"),
        (dict(packed_seq_params=packed_params([0, 4, 8, 9])), r"9 tokens in all.*expected 12 tokens.*each of 2 rows"),
        (dict(packed_seq_params=packed_params([0, 5, 10]), attention_mask=ids(2, 6)), "segment 0: attention_mask has"),
        (
            dict(packed_seq_params=packed_params([0, 5, 10], [0, 6, 12]), attention_mask=torch.eye(2, 6).cummax(1)[0]),
            "segment 0: attention_mask has 6 real tokens, packed_seq_params 5 in a length of 6",
        ),
        (dict(ONE_PICTURE), "the batch: image 0 of 1 x 1 x 1 tokens found 0 image tokens"),
        (dict(pixel_values=torch.zeros(4, 1536)), "image pixels: found 4 patches, expected 0"),
        (dict(pixel_values=torch.zeros(1, 4, 1536)), r"pixel_values has shape \[1, 4, 1536\]"),
        (dict(pixel_values_videos=torch.zeros(4, 99)), r"pixel_values_videos has shape \[4, 99\].*\[patches, 1536\]"),
        (dict(pixel_values=torch.zeros(4, 1536).byte()), "torch.uint8, expected .* floating point"),
        (dict(ONE_PICTURE, image_grid_thw=torch.tensor([1, 2, 2])), r"image grids: found \[3\]"),
        (dict(ONE_PICTURE, image_grid_thw=torch.tensor([[1, 2, 3]])), "divisible by 2"),
        *[(dict.fromkeys([name], object()), f"{name} is given, expected None: ") for name in REFUSED],
    ],
)
def test_wrong_calls_say_what_is_wrong(provider, arguments, message):
    with pytest.raises(ValueError, match=message):
        as_model_inputs(provider, GROUPS, **{"input_ids": ids(2, 6), **arguments})


def test_arguments_that_mean_nothing_pass_and_unknown_ones_do_not(provider):
    as_model_inputs(provider, GROUPS, ids(2, 6), loss_mask=None, extra_block_kwargs=None, inference_params=None)
    with pytest.raises(TypeError, match="unexpected argument 'image_grid_hwt'"):
        as_model_inputs(provider, GROUPS, ids(2, 6), image_grid_hwt=None)


@pytest.mark.parametrize(
    ("logical", "mask", "message"),
    [
        ([0, 4, 6], None, "6 tokens in all.* expected 8 tokens.*an attention_mask that says the rest is padding"),
        ([0, 4, 6], [[1] * 8], "an attention_mask that says the rest is padding"),
        ([0, 4, 16], None, "16 tokens in all.* expected 8 tokens, the whole batch. .* also takes one flat row"),
        ([0, 16], None, "16 tokens for row 0 of 8; expected .*its tokens times the ranks"),
        ([0, 4, 8], [[0, 1, 1, 1, 1, 1, 1, 1]], "padding before real tokens in segment 0"),
        ([0, 4, 8], [[1, 1, 1, 1, 1, 0, 1, 1]], "padding before real tokens in segment 1"),
        ([0, 8], [[1, 1, 0, 1, 1, 1, 1, 1]], "padding before real tokens in segment 0"),
    ],
)
def test_wrong_flat_rows_say_what_is_wrong(provider, logical, mask, message):
    mask = None if mask is None else torch.tensor(mask)
    with pytest.raises(ValueError, match=message):
        as_model_inputs(provider, GROUPS, ids(1, 8), packed_seq_params=packed_params(logical), attention_mask=mask)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.full((2, 6), 512), r"entries in \[512, 512\]"),
        (torch.ones(2, 6), "torch.float32"),
        (torch.full((2, 6), -1), r"entries in \[-1, -1\], expected \[2, 6\] token ids below 512, and anything else"),
        (torch.ones(2, 5, dtype=torch.long), r"labels has shape \[2, 5\]"),
        (torch.ones(1, 12, dtype=torch.long), r"labels has shape \[1, 12\]"),
    ],
)
def test_labels_that_no_loss_can_be_of_are_refused(provider, labels, message):
    with pytest.raises(ValueError, match=message):
        as_model_inputs(provider, GROUPS, ids(2, 6), labels=labels)


def test_outputs_that_would_not_return_under_context_parallelism_are_refused(provider):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"context parallelism over 2 ranks.*padded on the right"):
        as_model_inputs(provider, SECOND_OF_TWO, ids(1, 8), attention_mask=mask)
    as_model_inputs(provider, SECOND_OF_TWO, ids(1, 8), attention_mask=mask.flip(1))
    packed = dict(packed_seq_params=packed_params([0, 8, 16]))
    with pytest.raises(ValueError, match=r"labels in the packed row's order, \[1, tokens\]"):
        as_model_inputs(provider, SECOND_OF_TWO, ids(2, 8), labels=ids(2, 8), **packed)
    inputs, _ = as_model_inputs(provider, SECOND_OF_TWO, ids(2, 8), labels=torch.arange(16)[None], **packed)
    assert inputs.labels.tolist() == [[2, 3, 4, 5, 10, 11, 12, 13]]


def test_text_positions_that_are_no_order_are_refused_beside_pictures(provider, config):
    """Ignoring them, as Megatron-Bridge does, would be a wrong result: they say something else."""
    found = torch.tensor([[5, config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]])
    given = dict(position_ids=torch.tensor([[0, 1, 1, 2]]), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"position_ids has shape \[1, 4\] in a batch with images or videos"):
        as_model_inputs(provider, GROUPS, found, **given, **ONE_PICTURE)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("left_out", ["pixels", "grid", "both"])
def test_tokens_without_a_picture_are_refused_whatever_the_positions(provider, config, kind, left_out):
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


def test_pictures_in_padding_are_refused(provider, config):
    found = torch.tensor([[5, 5, config.image_token_id, 5]])
    with pytest.raises(ValueError, match="image token at 2 is in padding"):
        as_model_inputs(provider, GROUPS, found, attention_mask=torch.tensor([[1, 1, 0, 0]]), **ONE_PICTURE)
