"""Assignment of frames to ranks, and the exchange of vision tokens."""

import itertools

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout, token_index
from qwen3vl_bridge.core.vision_inputs import VisionInputs, make_vision_inputs, vision_slots
from qwen3vl_bridge.core.vision_sharding import VisionWork, assign_frames, assign_vision

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.support import IMAGE, SETTINGS, VIDEO, layouts

# Far more for a patch than for a pair, as much for both at 4 patches, and the other way round.
WORKS = st.sampled_from([VisionWork(1e6, 1.0, 4), VisionWork(4.0, 1.0, 4), VisionWork(0.0, 1.0, 4)])
GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda n: 2 * n), st.integers(1, 3).map(lambda n: 2 * n))
COSTS = st.lists(st.integers(1, 50), max_size=40)
RANKS = st.integers(1, 8)


def totals(costs: list[int], shares: list[list[int]]) -> list[int]:
    return [sum(costs[frame] for frame in share) for share in shares]


@given(costs=COSTS, ranks=RANKS)
def test_assign_frames_assigns_each_frame_to_one_rank(costs, ranks):
    shares = assign_frames(costs, ranks)
    assert len(shares) == ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert shares == assign_frames(tuple(costs), ranks)


@given(costs=COSTS.filter(bool), ranks=RANKS)
def test_assign_frames_keeps_largest_rank_cost_within_graham_1966_bound(costs, ranks):
    """Graham's bound of 1966: the mean cost of a rank, and 1 - 1/ranks of the most expensive frame."""
    heaviest = max(totals(costs, assign_frames(costs, ranks)))
    assert ranks * heaviest <= sum(costs) + (ranks - 1) * max(costs)


@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=6), ranks=st.integers(2, 3))
def test_assign_frames_keeps_largest_rank_cost_within_graham_1969_bound(costs, ranks):
    """Graham's bound of 1969, 4/3 - 1/(3 ranks), holds only if the most expensive frame is assigned first."""
    best = min(
        max(totals(costs, [[frame for frame, r in enumerate(way) if r == rank] for rank in range(ranks)]))
        for way in itertools.product(range(ranks), repeat=len(costs))
    )
    assert 3 * ranks * max(totals(costs, assign_frames(costs, ranks))) <= (4 * ranks - 1) * best


@given(kinds=st.lists(st.integers(1, 50), min_size=1, max_size=8), ranks=RANKS, more=st.integers(0, 9))
def test_assign_frames_balances_many_frames_within_5_percent_of_mean(kinds, ranks, more):
    times = -(-20 * max(kinds) * ranks // sum(kinds)) + more
    costs = kinds * times
    assert 20 * max(costs) * ranks <= sum(costs)
    assert 20 * ranks * max(totals(costs, assign_frames(costs, ranks))) <= 21 * sum(costs)


@given(frames=st.integers(0, 40), ranks=RANKS)
def test_assign_frames_of_equal_cost_gives_ranks_equal_frame_counts(frames, ranks):
    assert {len(share) for share in assign_frames([3.5] * frames, ranks)} <= {frames // ranks, -(-frames // ranks)}


def test_assign_frames_equalizes_rank_costs_where_greedy_does_not():
    for costs in ([3, 3, 2, 2, 2], [5, 5, 4, 4, 3, 3, 3, 3], [7, 6, 5, 4, 3, 3]):  # 7 to 5, 16 to 14, 15 to 13 before
        even = sum(costs) / 2
        assert totals(costs, assign_frames(costs, 2)) == [even, even]


def make_vision(images: list[tuple[int, int, int]], videos: list[tuple[int, int, int]]) -> VisionInputs | None:
    grids = [torch.tensor(some, dtype=torch.int64).view(-1, 3) for some in (images, videos)]
    pixels = torch.randperm(3 * int(sum(grid.prod(-1).sum() for grid in grids))).double().view(-1, 3)
    first = int(grids[0].prod(-1).sum())
    return make_vision_inputs(pixels[:first], grids[0], pixels[first:], grids[1], SETTINGS)


def encode(vision: VisionInputs | None) -> torch.Tensor:
    """Return [M, 10] numbers that depend on a token's patches, their positions and the token's frame."""
    if vision is None:
        return torch.zeros(0, 10, dtype=torch.float64)
    assert vision.cu_seqlens.dtype == torch.int32
    assert tuple(vision.cu_seqlens.diff().tolist()) == vision.lengths
    assert len(vision.pixel_values) == int(vision.cu_seqlens[-1])
    index, weight = vision.interpolation_index.double(), vision.interpolation_weight.double()
    embedding = torch.stack((index.sum(0), ((index + 1) * weight).sum(0)), dim=1)
    patches = torch.cat((vision.pixel_values, vision.position_ids.double(), embedding), dim=1)
    tokens = patches.view(-1, 4, 7).sum(1)
    edges = list(itertools.pairwise((vision.cu_seqlens // 4).tolist()))
    frames = torch.cat([tokens[a:b, :3].sum(0).expand(b - a, 3) for a, b in edges])
    return torch.cat((tokens, frames), dim=1)


@given(images=st.lists(GRIDS, max_size=6), videos=st.lists(GRIDS, max_size=3), work=WORKS, ranks=st.integers(1, 6))
def test_assign_vision_index_restores_token_order_of_full_batch(images, videos, work, ranks):
    """The encoded tokens of all ranks, reordered, equal the tokens of the full batch."""
    vision = make_vision(images, videos)
    assume(vision is not None)
    assignment = assign_vision(vision, work, ranks)
    parts = [assignment.select(vision, rank) for rank in range(ranks)]
    encoded = [encode(part) for part in parts]
    assert assignment.counts == tuple(map(len, encoded))
    assert [part is None for part in parts] == [len(tokens) == 0 for tokens in encoded]
    assert assignment.encoded_index.dtype == torch.int64
    assert sorted(assignment.encoded_index.tolist()) == list(range(len(vision.pixel_values) // 4))
    assert torch.equal(torch.cat(encoded)[assignment.encoded_index], encode(vision))


def test_assign_vision_balances_cost_by_patches_or_by_patch_pairs():
    vision = make_vision([(1, 4, 6), (3, 2, 4), (2, 2, 2)], [])  # frames of 24; 8, 8, 8; 4, 4 patches
    by_patches, by_pairs = [(24, 4), (8, 8, 8, 4)], [(24,), (8, 8, 8, 4, 4)]
    for work, expected in ((VisionWork(1, 0, 4), by_patches), (VisionWork(0, 1, 4), by_pairs)):
        assignment = assign_vision(vision, work, 2)
        assert [assignment.select(vision, rank).lengths for rank in range(2)] == expected


def test_assign_vision_raises_if_frame_has_fractional_number_of_tokens():
    vision = make_vision([(1, 2, 2), (1, 2, 6)], [])
    with pytest.raises(ValueError, match=r"frames have \(4, 12\) patches, expected multiples of 8"):
        assign_vision(vision, VisionWork(1, 1, 8), 2)


@st.composite
def batches(draw: st.DrawFn) -> tuple[TokenBatch, int, int]:
    """Return a batch with sizes of context and sequence parallelism; vision tokens are at random real positions."""
    layout, cp, sp = draw(layouts())
    real = (~layout.padding_mask()).nonzero().squeeze(-1)
    grids, room = ([], []), len(real)
    pictures = st.tuples(st.integers(0, 1), st.one_of(st.just((1, 2, 2)), GRIDS))
    for kind, grid in draw(st.one_of(st.just([]), *(st.lists(pictures, min_size=n, max_size=8) for n in (1, 2, 4)))):
        tokens = grid[0] * grid[1] * grid[2] // 4
        if tokens <= room:
            grids[kind].append(grid)
            room -= tokens
    places = torch.tensor(draw(st.permutations(real.tolist())))
    images, videos = (sum(t * h * w // 4 for t, h, w in kind) for kind in grids)
    ids = torch.arange(layout.total) % IMAGE
    ids[places[:images]], ids[places[images : images + videos]] = IMAGE, VIDEO
    shape = (layout.num_rows, -1)
    batch = TokenBatch(
        input_ids=ids.view(shape), labels=ids.view(shape), loss_mask=torch.ones(layout.total).view(shape),
        position_ids=torch.zeros(3, layout.total, dtype=torch.int64).view(3, *shape),
        vision_slot=vision_slots(ids, torch.tensor([[images, 2, 2]]), SETTINGS), layout=layout,
        vision=make_vision(*grids),
    )  # fmt: skip
    return batch, cp, sp


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("predicts", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@given(case=batches(), work=WORKS)
def test_vision_exchange_sends_exactly_the_tokens_that_receiver_uses(shared, predicts, case, work):
    batch, cp, sp = case
    slots, whole = batch.vision_slot, encode(batch.vision)
    works = work if shared else None
    locals_ = {
        (c, s): batch.local(cp, c, sp, s, works, with_next_tokens=predicts)
        for c, s in itertools.product(range(cp), range(sp))
    }
    exchanges = [locals_[c, 0].vision_exchange for c in range(cp)]
    is_shared = shared and cp > 1 and batch.vision is not None
    assert {one is not None for one in exchanges} == {is_shared}
    had = [encode(locals_[c, 0].vision) for c in range(cp)]
    if is_shared:
        sent = [rows[one.sources].split(one.sent) for rows, one in zip(had, exchanges, strict=True)]
        assert [one.received for one in exchanges] == [tuple(map(len, parts)) for parts in zip(*sent, strict=True)]
        had = [torch.cat(parts) for parts in zip(*sent, strict=True)]
    starts = [0, *itertools.accumulate(batch.layout.padded_lengths)]
    edges = zip(starts, batch.layout.lengths, batch.layout.padded_lengths, strict=False)
    after = torch.tensor([start + i + (i + 1 < real) for start, real, padded in edges for i in range(padded)])
    for c in range(cp):
        used = {"fuse": [], "following": [], "deepstack": []}
        own = token_index(batch.layout, cp, c)
        for s in range(sp):
            inputs, index = locals_[c, s], token_index(batch.layout, cp, c, sp, s)
            assert torch.equal(encode(inputs.vision), encode(locals_[c, 0].vision))
            reads = [("fuse", own, inputs.fuse), ("deepstack", index, inputs.deepstack)]
            reads += [("following", after[own], inputs.next_tokens.fuse)] if predicts else []
            for name, tokens, where in reads:
                assert batch.vision is not None or inputs.vision is None
                tokens = tokens.flatten()
                assert where.targets.tolist() == [place for place, token in enumerate(tokens) if slots[token] >= 0]
                assert torch.equal(had[c][where.sources], whole[slots[tokens[where.targets]]])
                used[name] += where.sources.tolist()
        assert sorted(used["deepstack"]) == sorted(set(used["fuse"]))
        if is_shared:
            assert set(used["fuse"] + used["following"]) == set(range(len(had[c])))


@pytest.mark.parametrize("ranks", [1, 2])
def test_token_batch_local_has_vision_exchange_only_with_several_ranks(ranks):
    vision = make_vision([(1, 2, 2), (1, 2, 4)], [])
    ids = torch.tensor([[IMAGE, IMAGE, IMAGE, 1]])
    more = torch.zeros(1, 4)
    batch = TokenBatch(ids, ids, more, ids.expand(3, 1, 4), torch.tensor([0, 1, 2, -1]),
                        SequenceLayout.packed_row([4]), vision)  # fmt: skip
    inputs = batch.local(ranks, 0, vision_work=VisionWork(1, 1, 4))
    assert (inputs.vision is vision) == (inputs.vision_exchange is None) == (ranks == 1)
