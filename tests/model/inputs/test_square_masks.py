"""Attention masks that say what each token sees: read where they are causal with padding besides, refused otherwise."""

from __future__ import annotations

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.inputs import as_model_inputs, real_tokens

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3VLTextConfig
from transformers.masking_utils import create_causal_mask

from .support import GROUPS

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
