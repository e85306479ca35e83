"""Layouts, the token index and one rank's share of a batch, token by token, against plain numpy restatements."""

from qwen3vl_bridge.batch import (
    PackedBatch,
    SequenceLayout,
    gathered_index,
    make_vision_inputs,
    token_index,
    vision_slots,
)
from qwen3vl_bridge.batch.token_layout import segment_multiple
from qwen3vl_bridge.models.divisibility import row_multiple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def ring_attention_share(tokens: np.ndarray, size: int, rank: int) -> np.ndarray:
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


IMAGE, VIDEO = 90, 91


def random_batch(random: np.random.Generator, multiple: int, packed: bool, pictures: bool = True) -> PackedBatch:
    lengths = random.integers(1, 30, random.integers(1, 5)).tolist()
    layout = (
        SequenceLayout.packed_row(lengths, multiple=multiple)
        if packed
        else SequenceLayout.rows(lengths, -(-max(lengths) // multiple) * multiple)
    )
    shape = (layout.num_rows, layout.total // layout.num_rows)
    images = 4 if pictures else 0
    ids = torch.tensor(random.integers(0, 90, layout.total))
    ids[torch.tensor(random.permutation(layout.total)[:images])] = IMAGE
    images = int((ids == IMAGE).sum())
    vision = make_vision_inputs(
        torch.randn(4 * images, 3), torch.tensor([[1, 2, 2]]).expand(images, 3), None, None,
        num_position_embeddings=16, spatial_merge_size=2,
    )  # fmt: skip
    return PackedBatch(
        input_ids=ids.view(shape), labels=torch.tensor(random.integers(0, 90, shape)),
        loss_mask=torch.tensor(random.random(shape), dtype=torch.float32),
        position_ids=torch.tensor(random.integers(0, 90, (3, *shape))),
        vision_slot=vision_slots(ids, IMAGE, VIDEO, images), layout=layout, vision=vision,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("cp", "sp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_a_share_is_a_gather_of_the_whole(cp, sp, packed):
    random = np.random.default_rng(10 * cp + sp)
    for _ in range(20):
        batch = random_batch(random, (1 if cp == 1 else 2 * cp) * sp, packed)
        slots_of = {"fuse": [], "deepstack": []}
        for cp_rank in range(cp):
            for sp_rank in range(sp):
                share = batch.local(cp, cp_rank, sp, sp_rank)
                held = {"fuse": token_index(batch.layout, cp, cp_rank)}
                held["deepstack"] = token_index(batch.layout, cp, cp_rank, sp, sp_rank)
                tokens = held["fuse"].T.numpy()  # [b, s]
                for name in ("input_ids", "labels", "loss_mask"):
                    expected = getattr(batch, name).numpy().ravel()[tokens]
                    np.testing.assert_array_equal(getattr(share, name).numpy(), expected)
                for axis in range(3):
                    expected = batch.position_ids[axis].numpy().ravel()[tokens]
                    np.testing.assert_array_equal(share.position_ids[axis].numpy(), expected)
                padding = batch.layout.padding_mask()[held["deepstack"].T]
                assert torch.equal(share.padding_mask, padding)
                assert share.vision is batch.vision and share.layout is batch.layout
                for name, index in held.items():
                    rows = getattr(share, name)
                    expected = [
                        (int(batch.vision_slot[token]), place)
                        for place, token in enumerate(index.flatten().tolist())
                        if batch.vision_slot[token] >= 0
                    ]
                    assert list(zip(rows.rows.tolist(), rows.positions.tolist(), strict=True)) == expected
                    if name == "deepstack" or sp_rank == 0:
                        slots_of[name] += rows.rows.tolist()
        for used in slots_of.values():
            assert sorted(used) == list(range(int((batch.vision_slot >= 0).sum())))


def test_without_pictures_there_is_nothing_to_fuse():
    batch = random_batch(np.random.default_rng(0), 4, packed=True, pictures=False)
    share = batch.local(2, 1)
    assert batch.vision is None and share.vision is None and share.fuse is None and share.deepstack is None


def test_to_moves_every_tensor():
    batch = random_batch(np.random.default_rng(0), 4, packed=True)
    for moved in (batch.to("meta"), batch.local(2, 0).to("meta")):
        assert moved.input_ids.device.type == moved.layout.cu_seqlens.device.type == "meta"
        assert moved.vision is not None and moved.vision.pixel_values.device.type == "meta"
        assert moved.vision.lengths == batch.vision.lengths
    assert moved.fuse.rows.device.type == "meta"


ranks = st.integers(1, 6)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), cp=ranks, sp=ranks, more=st.integers(0, 3))
def test_rows_of_such_multiples_can_be_shared(lengths, cp, sp, more):
    segment, row = segment_multiple(cp), row_multiple(cp, sp)
    padded = sum(-(-length // segment) * segment for length in lengths)
    total = -(-(padded + 1) // row) * row + more * row
    layout = SequenceLayout.packed_row(lengths, multiple=segment, total=total)
    shares = [token_index(layout, cp, rank, sp, part) for rank in range(cp) for part in range(sp)]
    assert sorted(token for share in shares for token in share.flatten().tolist()) == list(range(total))


@given(length=st.integers(1, 200), cp=ranks, sp=ranks)
def test_rows_of_other_lengths_cannot(length, cp, sp):
    """The multiple is the least: a row is shared if and only if it is one."""
    layout = SequenceLayout.rows([length], length)
    if length % row_multiple(cp, sp) == 0:
        token_index(layout, cp, cp - 1, sp, sp - 1)
    else:
        with pytest.raises(ValueError, match=r"divide"):
            token_index(layout, cp, cp - 1, sp, sp - 1)
