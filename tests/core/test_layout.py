"""Layouts, token index and segment ids, compared with restatements in numpy."""

from qwen3vl_bridge.config.divisibility import row_length_multiple
from qwen3vl_bridge.core.layout import (
    SequenceLayout,
    inverse_token_index,
    segment_ids,
    segment_multiple,
    segment_offsets,
    token_index,
)

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.support import layouts


def expected_index(layout: SequenceLayout, cp: int, cp_rank: int, sp: int = 1, sp_rank: int = 0) -> np.ndarray:
    segments = np.split(np.arange(layout.total), np.cumsum(layout.padded_lengths)[:-1])
    if cp == 1:
        held = segments
    else:
        chunks = (np.split(tokens, 2 * cp) for tokens in segments)
        held = [np.concatenate([each[cp_rank], each[2 * cp - 1 - cp_rank]]) for each in chunks]
    rows = held if layout.num_rows > 1 else [np.concatenate(held)]
    columns = np.stack(rows, axis=1)
    part = len(columns) // sp
    return columns[sp_rank * part : (sp_rank + 1) * part]


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_token_index_matches_numpy_reference(case):
    layout, cp, sp = case
    for cp_rank in range(cp):
        whole = token_index(layout, cp, cp_rank)
        assert whole.dtype == torch.int64
        np.testing.assert_array_equal(whole.numpy(), expected_index(layout, cp, cp_rank))
        parts = [token_index(layout, cp, cp_rank, sp, sp_rank) for sp_rank in range(sp)]
        assert all(part.shape == (len(whole) // sp, layout.num_rows) for part in parts)
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
        for sp_rank, part in enumerate(parts):
            np.testing.assert_array_equal(part.numpy(), expected_index(layout, cp, cp_rank, sp, sp_rank))


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_inverse_token_index_restores_order_of_tokens_gathered_from_ranks(case):
    layout, cp, _ = case
    tokens = torch.randperm(layout.total)
    shares = [tokens[token_index(layout, cp, rank).T.flatten()] for rank in range(cp)]
    index = inverse_token_index(layout, cp)
    assert index.dtype == torch.int64
    torch.testing.assert_close(torch.cat(shares)[index], tokens, rtol=0, atol=0)
    restated = np.concatenate([expected_index(layout, cp, rank).T.flatten() for rank in range(cp)])
    np.testing.assert_array_equal(index.numpy(), np.argsort(restated))


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_sequence_layout_offsets_and_padding_mask_match_lengths(case):
    layout, _, _ = case
    mask = np.concatenate([np.arange(p) >= n for n, p in zip(layout.lengths, layout.padded_lengths, strict=True)])
    np.testing.assert_array_equal(layout.padding_mask().numpy(), mask)
    assert layout.cu_seqlens.dtype == layout.cu_seqlens_padded.dtype == torch.int32
    assert layout.cu_seqlens.diff().tolist() == list(layout.lengths)
    assert layout.cu_seqlens_padded.diff().tolist() == list(layout.padded_lengths)
    assert layout.total == int(layout.cu_seqlens_padded[-1])


def test_packed_row_layout_pads_each_segment_and_end_of_row():
    layout = SequenceLayout.packed_row([3, 4, 5], multiple=4, total=24)
    assert layout.packed and layout.padded_lengths == (4, 4, 8, 8) and layout.lengths == (3, 4, 5, 0)
    assert layout.padding_mask().nonzero().squeeze(-1).tolist() == [3, 13, 14, 15, *range(16, 24)]
    assert token_index(layout, 2, 0, 2, 1).squeeze(1).tolist() == [14, 15, 16, 17, 22, 23]
    assert SequenceLayout.packed_row([4, 4], multiple=4, total=8).lengths == (4, 4)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: SequenceLayout.padded_rows([], 4), "found 0 lengths"),
    (lambda: SequenceLayout.padded_rows([3, 5], 4), "segment 1: 5 tokens do not fit a padded length of 4"),
    (lambda: SequenceLayout.padded_rows([3, -1], 4), "segment 1: -1 tokens"),
    (lambda: SequenceLayout.packed_row([3, 0]), "segment 1: 0 tokens do not fit a padded length of 0"),
    (lambda: SequenceLayout.packed_row([3, 4], multiple=4, total=7), "padded to multiples of 4, have 8 tokens"),
    (lambda: SequenceLayout.packed_row([3], multiple=4, total=10), "has 6 unused tokens after the last segment"),
    (
        lambda: token_index(SequenceLayout.padded_rows([8, 8], 10), 2, 0),
        "segment 0 has a padded length of 10 tokens, expected a multiple of 4",
    ),
    (lambda: token_index(SequenceLayout.padded_rows([3, 3], 3), 1, 0, 2, 0), "3 tokens per row, .* the 2 sequence"),
    (lambda: token_index(SequenceLayout.padded_rows([8, 8], 8), 2, 2), "context-parallel rank 2 .* group of 2"),
    (lambda: token_index(SequenceLayout.padded_rows([8, 8], 8), 1, 0, 2, -1), "sequence-parallel rank -1 .* of 2"),
    (lambda: token_index(SequenceLayout.padded_rows([8, 8], 8), 2, 0, 3, 0), "4 tokens per row, .* the 3 sequence"),
])  # fmt: skip
def test_sequence_layout_and_token_index_raise_if_arguments_are_invalid(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_segment_ids_and_segment_offsets_match_lengths(lengths):
    ids = segment_ids(torch.tensor(lengths), sum(lengths))
    assert ids.dtype == torch.int64 and ids.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert segment_offsets(torch.tensor(lengths)).tolist() == [place for n in lengths for place in range(n)]


def test_place_tokens_fills_padding_with_given_value():
    layout = SequenceLayout.packed_row([1, 3], multiple=2, total=8)
    placed = layout.place_tokens([torch.tensor([5]), torch.tensor([6, 7, 8])], 9)
    assert placed.tolist() == [[5, 9, 6, 7, 8, 9, 9, 9]]


ranks = st.integers(1, 6)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), cp=ranks, sp=ranks, more=st.integers(0, 3))
def test_token_index_assigns_each_token_of_packed_row_to_one_rank(lengths, cp, sp, more):
    segment, row = segment_multiple(cp), row_length_multiple(cp, sp)
    padded = sum(-(-length // segment) * segment for length in lengths)
    total = -(-(padded + 1) // row) * row + more * row
    layout = SequenceLayout.packed_row(lengths, multiple=segment, total=total)
    shares = [token_index(layout, cp, rank, sp, part) for rank in range(cp) for part in range(sp)]
    assert sorted(token for share in shares for token in share.flatten().tolist()) == list(range(total))


@given(length=st.integers(1, 200), cp=ranks, sp=ranks)
def test_token_index_raises_if_row_length_is_not_divisible(length, cp, sp):
    """`row_length_multiple` returns the smallest possible multiple."""
    layout = SequenceLayout.padded_rows([length], length)
    if length % row_length_multiple(cp, sp) == 0:
        token_index(layout, cp, cp - 1, sp, sp - 1)
    else:
        with pytest.raises(ValueError, match=r"expected a multiple of|does not divide"):
            token_index(layout, cp, cp - 1, sp, sp - 1)
