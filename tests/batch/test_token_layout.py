"""Layouts and the token index, against plain numpy restatements."""

from qwen3vl_bridge.batch import SequenceLayout, gathered_index, token_index

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def ring_attention_share(tokens: np.ndarray, size: int, rank: int) -> np.ndarray:
    """A segment's tokens on one context-parallel rank, as the field's ring attention cuts them."""
    if size == 1:
        return tokens
    chunks = np.split(tokens, 2 * size)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])


def expected_index(layout: SequenceLayout, cp: int, cp_rank: int, sp: int = 1, sp_rank: int = 0) -> np.ndarray:
    segments = np.split(np.arange(layout.total), np.cumsum(layout.padded_lengths)[:-1])
    held = [ring_attention_share(tokens, cp, cp_rank) for tokens in segments]
    rows = held if layout.num_rows > 1 else [np.concatenate(held)]
    columns = np.stack(rows, axis=1)
    part = len(columns) // sp
    return columns[sp_rank * part : (sp_rank + 1) * part]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[SequenceLayout, int, int]:
    """A layout with context- and sequence-parallel sizes that fit it."""
    cp, sp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4]))
    multiple = (1 if cp == 1 else 2 * cp) * sp
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    if draw(st.booleans()):
        seq_length = -(-max(lengths) // multiple) * multiple
        return SequenceLayout.rows(lengths, seq_length), cp, sp
    packed = SequenceLayout.packed_row(lengths, multiple=multiple)
    total = packed.total + multiple * draw(st.integers(0, 3))
    return SequenceLayout.packed_row(lengths, multiple=multiple, total=total), cp, sp


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_token_index_is_the_zigzag_of_each_segment(case):
    layout, cp, sp = case
    for cp_rank in range(cp):
        whole = token_index(layout, cp, cp_rank)
        np.testing.assert_array_equal(whole.numpy(), expected_index(layout, cp, cp_rank))
        parts = [token_index(layout, cp, cp_rank, sp, sp_rank) for sp_rank in range(sp)]
        assert all(part.shape == (len(whole) // sp, layout.num_rows) for part in parts)
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
        for sp_rank, part in enumerate(parts):
            np.testing.assert_array_equal(part.numpy(), expected_index(layout, cp, cp_rank, sp, sp_rank))


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_ranks_together_hold_each_token_once(case):
    layout, cp, sp = case
    held = torch.cat([token_index(layout, cp, c, sp, s).flatten() for c in range(cp) for s in range(sp)])
    assert held.dtype == torch.int64
    assert held.sort().values.tolist() == list(range(layout.total))


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_shares_of_all_ranks_one_after_the_other_are_undone(case):
    layout, cp, _ = case
    tokens = torch.randperm(layout.total)
    shares = [tokens[token_index(layout, cp, rank).T.flatten()] for rank in range(cp)]
    index = gathered_index(layout, cp)
    assert index.dtype == torch.int64
    torch.testing.assert_close(torch.cat(shares)[index], tokens, rtol=0, atol=0)
    restated = np.concatenate([expected_index(layout, cp, rank).T.flatten() for rank in range(cp)])
    np.testing.assert_array_equal(index.numpy(), np.argsort(restated))


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_offsets_and_padding_mask_follow_the_lengths(case):
    layout, _, _ = case
    mask = np.concatenate([np.arange(p) >= n for n, p in zip(layout.lengths, layout.padded_lengths, strict=True)])
    np.testing.assert_array_equal(layout.padding_mask().numpy(), mask)
    assert layout.cu_seqlens.dtype == layout.cu_seqlens_padded.dtype == torch.int32
    assert layout.cu_seqlens.diff().tolist() == list(layout.lengths)
    assert layout.cu_seqlens_padded.diff().tolist() == list(layout.padded_lengths)
    assert layout.total == int(layout.cu_seqlens_padded[-1])


def test_packed_row_pads_each_segment_and_the_row():
    layout = SequenceLayout.packed_row([3, 4, 5], multiple=4, total=24)
    assert layout.packed and layout.padded_lengths == (4, 4, 8, 8) and layout.lengths == (3, 4, 5, 0)
    assert layout.padding_mask().nonzero().squeeze(-1).tolist() == [3, 13, 14, 15, *range(16, 24)]
    assert token_index(layout, 2, 0, 2, 1).squeeze(1).tolist() == [14, 15, 16, 17, 22, 23]
    assert SequenceLayout.packed_row([4, 4], multiple=4, total=8).lengths == (4, 4)


def test_equality_is_of_lengths_and_rows():
    assert SequenceLayout.rows([3, 4], 4) == SequenceLayout.rows([3, 4], 4)
    assert SequenceLayout.packed_row([3, 4], multiple=4) != SequenceLayout.rows([3, 4], 4)
    assert SequenceLayout.rows([3, 4], 4) != SequenceLayout.rows([3, 3], 4)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequenceLayout.rows([], 4), "found 0 lengths"),
        (lambda: SequenceLayout.rows([3, 5], 4), "segment 1: 5 tokens do not fit a padded length of 4"),
        (lambda: SequenceLayout.rows([3, -1], 4), "segment 1: -1 tokens"),
        (lambda: SequenceLayout.packed_row([3, 0]), "segment 1: 0 tokens do not fit a padded length of 0"),
        (lambda: SequenceLayout.packed_row([3], multiple=0), "at least 1: found 0"),
        (lambda: SequenceLayout.packed_row([3, 4], multiple=4, total=7), "2 segments take 8 tokens, padded to"),
        (lambda: SequenceLayout.packed_row([3], multiple=4, total=10), "has 6 unused tokens after the last segment"),
        (lambda: SequenceLayout(offsets(0, 3), offsets(0, 4), 2, (3,), (4,)), r"2 padded rows need 2 segments of one"),
        (lambda: SequenceLayout(offsets(0, 3, 6), offsets(0, 4, 9), 2, (3, 3), (4, 5)), r"segments of \[4, 5\]"),
        (lambda: SequenceLayout(offsets(0, 2), offsets(0, 4), 1, (3,), (4,)), r"cu_seqlens: found \[0, 2\]"),
        (lambda: SequenceLayout(offsets(0, 3), offsets(0, 5), 1, (3,), (4,)), r"cu_seqlens_padded: found \[0, 5\]"),
        (lambda: SequenceLayout(offsets(0, 3).long(), offsets(0, 4), 1, (3,), (4,)), r"cu_seqlens: found \[2\] torch"),
        (lambda: token_index(SequenceLayout.rows([8, 8], 10), 2, 0), "segment 0: a padded length of 10 .* 4 chunks"),
        (lambda: token_index(SequenceLayout.rows([3, 3], 3), 1, 0, 2, 0), "3 tokens a row .* over 2 sequence"),
        (lambda: token_index(SequenceLayout.rows([8, 8], 8), 2, 2), "context-parallel rank 2 .* group of 2"),
        (lambda: token_index(SequenceLayout.rows([8, 8], 8), 1, 0, 2, -1), "sequence-parallel rank -1 .* group of 2"),
        (lambda: token_index(SequenceLayout.rows([8, 8], 8), 2, 0, 3, 0), "4 tokens a row .* over 3 sequence"),
    ],
)
def test_contradictions_are_refused_with_both_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()
