"""What vision ranks send: packed and unpacked whatever the pictures are, and refused where it is not what was meant."""

from dataclasses import replace

from qwen3vl_bridge.batch import (
    EncoderInputs,
    EncoderShard,
    PackedBatch,
    SequenceLayout,
    VisionWork,
    make_vision_inputs,
)
from qwen3vl_bridge.batch.vision_sharding import assign_vision
from qwen3vl_bridge.dist_train.modules import Headers, pack, unpack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

TAPS, HIDDEN = 3, 8
WORK = VisionWork(1.0, 0.1, 4)
COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=4)
GRIDS = st.lists(st.tuples(st.integers(1, 3), *[st.integers(1, 3).map(lambda side: 2 * side)] * 2), max_size=4)


def encoded(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange((TAPS + 1) * tokens * HIDDEN, dtype=torch.float32).view(TAPS + 1, tokens, HIDDEN) + 1
    return numbers[0].requires_grad_(), numbers[1:].requires_grad_()


def read(*arguments) -> list[torch.Tensor]:
    *found, header = unpack(*arguments)
    header.check()
    return found


def shards(counts: list[int]) -> tuple[EncoderShard, ...]:
    return tuple(EncoderShard(count, 2**31 + 7 * i) for i, count in enumerate(counts))


def batch_of(grids: list[tuple[int, int, int]], name: str = "a") -> PackedBatch:
    layout, vision = SequenceLayout.packed_row([16]), None
    if grids:
        sizes = torch.tensor(grids)
        pixels = torch.randn(int(sizes.prod(-1).sum()), 3)
        vision = make_vision_inputs(pixels, sizes, None, None, num_position_embeddings=16, spatial_merge_size=2)
    zeros = torch.zeros(1, 16, dtype=torch.long)
    return PackedBatch(
        zeros, zeros, zeros.float(), zeros.expand(3, 1, 16), torch.full((16,), -1), layout, vision, (name,)
    )


@given(counts=COUNTS, more=st.integers(0, 3), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_one_side_packs_and_the_other_unpacks_the_same(counts, more, dtype):
    """One sender to several receivers, each of which gets its own tokens; then several senders to one receiver."""
    tokens, features = (one.to(dtype) for one in encoded(sum(counts) + more))
    rows = max(counts) + more
    payload = pack(tokens, features, shards(counts), rows)
    assert payload.shape == (len(counts), 1 + rows, (TAPS + 1) * HIDDEN)
    assert payload.dtype == dtype and payload._base is None
    starts = [sum(counts[:i]) for i in range(len(counts))]
    for shard, part, start in zip(shards(counts), payload.split(1), starts, strict=True):
        own = slice(start, start + shard.tokens)
        for found, expected in zip(read(part, (shard,), TAPS, HIDDEN), (tokens[own], features[:, own]), strict=True):
            assert torch.equal(found, expected)
    found = read(payload, shards(counts), TAPS, HIDDEN)
    for one, expected in zip(found, (tokens, features), strict=True):
        assert torch.equal(one, expected.narrow(-2, 0, sum(counts)))


@given(counts=COUNTS)
def test_gradients_come_back_to_where_they_belong(counts):
    tokens, features = encoded(sum(counts))
    payload = pack(tokens, features, shards(counts), max(counts) + 1)
    weights = [torch.randn_like(one) for one in (tokens, features)]
    back = read(payload, shards(counts), TAPS, HIDDEN)
    sum((one * weight).sum() for one, weight in zip(back, weights, strict=True)).backward()
    for one, weight in zip((tokens, features), weights, strict=True):
        assert torch.equal(one.grad, weight)


@pytest.mark.parametrize(
    ("expected", "taps", "hidden", "words"),
    [
        (EncoderShard(3, 5), TAPS, HIDDEN, r"sent shards of .*\[\(2, 5, 3, 8\)\], expected \[\(3, 5, 3, 8\)\]"),
        (EncoderShard(2, 6), TAPS, HIDDEN, "read the same batches in the same order"),
        (EncoderShard(2, 5), 1, 2 * HIDDEN, r"expected \[\(2, 5, 1, 16\)\]"),  # a swap that has the same shape
        (EncoderShard(2, 5), TAPS, HIDDEN + 1, r"sent \[1, 5, 32\], expected \[1, '3 or more', 36\]"),
        (EncoderShard(9, 5), TAPS, HIDDEN, r"expected \[1, '10 or more', 32\]"),
    ],
)
def test_another_payload_than_is_expected_is_refused(expected, taps, hidden, words):
    payload = pack(*encoded(2), (EncoderShard(2, 5),), 4)
    with pytest.raises(ValueError, match=words):
        read(payload, (expected,), taps, hidden)


def test_headers_are_compared_as_they_arrive_and_all_in_the_end():
    right, wrong = (
        unpack(pack(*encoded(2), (EncoderShard(2, 5),), 4), (EncoderShard(2, mark),), TAPS, HIDDEN)[-1]
        for mark in (5, 6)
    )
    headers = Headers()
    headers.add(right)
    headers.add(wrong)  # nobody has looked at it yet
    with pytest.raises(ValueError, match="read the same batches in the same order"):
        headers.add(right)
    headers.add(wrong)
    with pytest.raises(ValueError, match="read the same batches in the same order"):
        headers.check_all()
    headers.check_all()


@given(grids=GRIDS, encoders=st.integers(1, 4))
def test_both_sides_work_out_the_same_shards(grids, encoders):
    batch = batch_of(grids)
    expected = batch.local(vision_work=WORK, encoders=encoders)
    sent = [EncoderInputs.of((batch,), WORK, encoders, share) for share in range(encoders)]
    assert expected.vision is None and expected.vision_exchange is None
    assert (
        expected.encoder_shards
        == batch.encoder_shards_of(assign_vision(batch.vision, WORK, encoders))
        == tuple(one.shards[0] for one in sent)
    )
    assert {one.rows for one in sent} == {max(shard.tokens for shard in expected.encoder_shards)}
    for one in sent:
        assert one.shards[0].tokens == sum(one.vision.lengths if one.vision else ()) // 4
    assert sorted(n for one in sent if one.vision for n in one.vision.lengths) == sorted(
        batch.vision.lengths if batch.vision else ()
    )


@given(grids=st.lists(GRIDS, min_size=2, max_size=3))
def test_one_rank_encodes_for_several(grids):
    batches = [batch_of(some, str(i)) for i, some in enumerate(grids)]
    one = EncoderInputs.of(batches, WORK, 1, 0)
    assert one.shards == tuple(batch.local(vision_work=WORK, encoders=1).encoder_shards[0] for batch in batches)
    pictures = [batch.vision for batch in batches if batch.vision]
    assert (one.vision is None) == (not pictures)
    if pictures:
        assert torch.equal(one.vision.pixel_values, torch.cat([each.pixel_values for each in pictures]))
        assert one.vision.lengths == tuple(n for each in pictures for n in each.lengths)
        assert one.vision.cu_seqlens.diff().tolist() == list(one.vision.lengths)


def test_other_samples_or_pictures_have_another_mark():
    batch = batch_of([(1, 4, 4), (1, 2, 4)])
    others = [
        replace(batch, sample_ids=("b",)),
        replace(batch, layout=SequenceLayout.packed_row([8, 8])),
        batch_of([(1, 2, 4), (1, 4, 4)]),
    ]
    marks = {one.encoder_shards_of(assign_vision(one.vision, WORK, 1))[0].mark for one in (batch, *others)}
    assert len(marks) == 4
