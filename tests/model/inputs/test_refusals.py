"""The model's door refuses calls that mean nothing or two things, and says what it found and what it expected."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.inputs import REFUSED, as_model_inputs, real_tokens

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import Qwen3VLTextConfig
from transformers.masking_utils import create_causal_mask

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


ROOM = 6
IDS = torch.arange(1, 1 + 2 * ROOM).view(2, ROOM)
REAL = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6]).bool()
LEFT = REAL.flip(1)


def seen_by(real):
    """[B, 1, S, S] bool: causal, and padding is seen by nobody."""
    return (real[:, None, :] & torch.ones(ROOM, ROOM).bool().tril())[:, None]


def swift_mask(real):
    """As ms-swift's collator makes it for Megatron: [B, 1, S, S], True hides; padding sees what comes before it."""
    return ~seen_by(real)


def transformers_masks(real, implementation):
    """As transformers makes it for its own layers: numbers to be added (eager), or True where a token is seen."""
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
def test_padding_is_read(provider, kind, real):
    mask = MASKS[kind](real)
    assert mask.dim() > 2
    assert torch.equal(real_tokens(mask, None, IDS), real)
    ours, answer = as_model_inputs(provider, GROUPS, IDS, attention_mask=mask)
    expected, _ = as_model_inputs(provider, GROUPS, IDS, attention_mask=real)
    assert ours.layout == expected.layout and torch.equal(ours.input_ids, expected.input_ids)
    assert (answer is None) == (real is REAL)


@pytest.mark.parametrize("rows", [1, 2])
def test_one_causal_mask_for_all_rows_says_nothing_of_padding(provider, monkeypatch, rows):
    """NeMo-RL without sequence packing gives every batch [1, 1, S, S], which hides later tokens and no others."""
    monkeypatch.setattr(provider, "pad_token_id", 9)
    ids = torch.tensor([[1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 5, 6]])[:rows]
    mask = torch.ones(1, 1, ROOM, ROOM).tril() < 0.5
    call = dict(position_ids=torch.arange(ROOM).expand_as(ids), attention_mask=mask)
    ours, answer = as_model_inputs(provider, GROUPS, ids, **call)
    assert answer is None and ours.layout.lengths == (4, 6)[:rows]  # as without a mask
    ones = torch.ones(rows, ROOM)
    assert as_model_inputs(provider, GROUPS, ids, attention_mask=ones)[0].layout.lengths == (6, 6)[:rows]


def test_each_row_may_say_that_all_is_real(provider):
    mask = swift_mask(torch.ones_like(REAL))
    assert real_tokens(mask, None, IDS).all()


@given(st.data())
def test_any_padding_on_either_side(data):
    lengths = [data.draw(st.integers(0, ROOM)) for _ in IDS]
    first = [data.draw(st.integers(0, ROOM - n)) for n in lengths]
    place = torch.arange(ROOM)
    real = torch.stack([(place >= a) & (place < a + n) for a, n in zip(first, lengths, strict=True)])
    if real.any():
        mask = data.draw(st.sampled_from([swift_mask(real), seen_by(real), additive(real, -1e9)]))
        assert torch.equal(real_tokens(mask, None, IDS), real)


def changed(row, token, other, value):
    mask = swift_mask(REAL)
    mask[row, 0, token, other] = value
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(2, 1, ROOM, ROOM).bool(), "no token sees itself, or all see the last one"),
        (torch.ones(1, 1, ROOM, ROOM), "no token sees itself, or all see the last one"),
        (torch.stack([torch.zeros(1, ROOM, ROOM).bool(), swift_mask(REAL)[1]]), "some rows hide the last token"),
        (changed(1, 2, 1, True), "token 2 does not see token 1"),
        (changed(1, 2, 3, False), "token 2 sees token 3"),
        (~torch.block_diag(*[torch.ones(3, 3).tril()] * 2).bool()[None, None], "token 3 does not see token 0"),
        (torch.zeros(1, 1, ROOM, ROOM) - torch.arange(ROOM), "numbers between 0 and -10000, which is a bias"),
        (torch.full((1, 1, ROOM, ROOM), 2), "attention_mask has an entry 2, expected booleans"),
        (swift_mask(REAL)[:, :, :5], r"\[2, 1, 5, 6\], expected \[2, 6\], .* or what tokens see, \[2 or 1, 1, 6, 6\]"),
        (swift_mask(REAL).expand(2, 3, ROOM, ROOM), r"has shape \[2, 3, 6, 6\]"),
        (REAL[:, None, None], r"has shape \[2, 1, 1, 6\]"),
    ],
)  # fmt: skip
def test_masks_that_say_more_are_refused(provider, mask, message):
    with pytest.raises(ValueError, match=message):
        as_model_inputs(provider, GROUPS, IDS, attention_mask=mask)


def test_padding_masks_are_the_other_way_round(provider):
    """As megatron-core, and verl, name what experts are to leave out."""
    expected, _ = as_model_inputs(provider, GROUPS, IDS, attention_mask=REAL)
    for beside in (None, REAL, swift_mask(REAL)):
        ours, _ = as_model_inputs(provider, GROUPS, IDS, padding_mask=~REAL, attention_mask=beside)
        assert ours.layout == expected.layout and torch.equal(ours.padding_mask, expected.padding_mask)
    with pytest.raises(ValueError, match="padding_mask has 0 for token 4 of row 0, expected 1 to agree with attention"):
        as_model_inputs(provider, GROUPS, IDS, padding_mask=torch.zeros(2, ROOM), attention_mask=REAL)
    with pytest.raises(ValueError, match=r"padding_mask has shape \[2, 5\], expected \[2, 6\]: 1 for padding"):
        as_model_inputs(provider, GROUPS, IDS, padding_mask=torch.zeros(2, 5))
