"""Layouts, the token index and a rank's share of a batch, vision's too, against restatements; and copies to a GPU."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qwen3vl_bridge.batch import (
    SequenceLayout,
    TokenBatch,
    VisionInputs,
    VisionWork,
    device_transfer,
    gathered_index,
    make_vision_inputs,
    token_index,
    vision_slots,
)
from qwen3vl_bridge.batch.device_transfer import Movable, copy_to_gpu
from qwen3vl_bridge.batch.token_layout import segment_multiple
from qwen3vl_bridge.batch.vision_sharding import assign_frames, assign_vision
from qwen3vl_bridge.models.divisibility import row_multiple
from qwen3vl_bridge.training.step import to_device

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode


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
        assert whole.dtype == torch.int64
        np.testing.assert_array_equal(whole.numpy(), expected_index(layout, cp, cp_rank))
        parts = [token_index(layout, cp, cp_rank, sp, sp_rank) for sp_rank in range(sp)]
        assert all(part.shape == (len(whole) // sp, layout.num_rows) for part in parts)
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
        for sp_rank, part in enumerate(parts):
            np.testing.assert_array_equal(part.numpy(), expected_index(layout, cp, cp_rank, sp, sp_rank))


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


@pytest.mark.parametrize(("make", "message"), [
    (lambda: SequenceLayout.rows([], 4), "found 0 lengths"),
    (lambda: SequenceLayout.rows([3, 5], 4), "segment 1: 5 tokens do not fit a padded length of 4"),
    (lambda: SequenceLayout.rows([3, -1], 4), "segment 1: -1 tokens"),
    (lambda: SequenceLayout.packed_row([3, 0]), "segment 1: 0 tokens do not fit a padded length of 0"),
    (lambda: SequenceLayout.packed_row([3, 4], multiple=4, total=7), "2 segments take 8 tokens, padded to"),
    (lambda: SequenceLayout.packed_row([3], multiple=4, total=10), "has 6 unused tokens after the last segment"),
    (lambda: token_index(SequenceLayout.rows([8, 8], 10), 2, 0), "segment 0: a padded length of 10 .* 4 chunks"),
    (lambda: token_index(SequenceLayout.rows([3, 3], 3), 1, 0, 2, 0), "3 tokens a row .* over 2 sequence"),
    (lambda: token_index(SequenceLayout.rows([8, 8], 8), 2, 2), "context-parallel rank 2 .* group of 2"),
    (lambda: token_index(SequenceLayout.rows([8, 8], 8), 1, 0, 2, -1), "sequence-parallel rank -1 .* group of 2"),
    (lambda: token_index(SequenceLayout.rows([8, 8], 8), 2, 0, 3, 0), "4 tokens a row .* over 3 sequence"),
])  # fmt: skip
def test_contradictions_are_refused_with_both_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


IMAGE, VIDEO = 90, 91


def random_batch(random: np.random.Generator, multiple: int, packed: bool, pictures: bool = True) -> TokenBatch:
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
    return TokenBatch(
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
                    assert list(zip(rows.sources.tolist(), rows.targets.tolist(), strict=True)) == expected
                    if name == "deepstack" or sp_rank == 0:
                        slots_of[name] += rows.sources.tolist()
        for used in slots_of.values():
            assert sorted(used) == list(range(int((batch.vision_slot >= 0).sum())))


def test_without_pictures_there_is_nothing_to_fuse():
    batch = random_batch(np.random.default_rng(0), 4, packed=True, pictures=False)
    share = batch.local(2, 1)
    assert batch.vision is None and share.vision is None
    assert not len(share.fuse.sources) and not len(share.deepstack.sources)


def test_to_moves_every_tensor():
    batch = random_batch(np.random.default_rng(0), 4, packed=True)
    for moved in (batch.to("meta"), batch.local(2, 0).to("meta")):
        assert moved.input_ids.device.type == moved.layout.cu_seqlens.device.type == "meta"
        assert moved.vision is not None and moved.vision.pixel_values.device.type == "meta"
        assert moved.vision.lengths == batch.vision.lengths
    assert moved.fuse.sources.device.type == "meta"


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


# Far more for a patch than for a pair, as much for both at 4 patches, and the other way round.
WORKS = st.sampled_from([VisionWork(1e6, 1.0, 4), VisionWork(4.0, 1.0, 4), VisionWork(0.0, 1.0, 4)])
GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda n: 2 * n), st.integers(1, 3).map(lambda n: 2 * n))
COSTS = st.lists(st.integers(1, 50), max_size=40)
RANKS = st.integers(1, 8)


def totals(costs: list[int], shares: list[list[int]]) -> list[int]:
    return [sum(costs[frame] for frame in share) for share in shares]


@given(costs=COSTS, ranks=RANKS)
def test_each_frame_is_assigned_once(costs, ranks):
    shares = assign_frames(costs, ranks)
    assert len(shares) == ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert shares == assign_frames(tuple(costs), ranks)


@given(costs=COSTS.filter(bool), ranks=RANKS)
def test_no_rank_is_further_above_the_mean_than_the_costliest_frame(costs, ranks):
    """Graham's bound of 1966; he takes a little less than the costliest off, as here."""
    heaviest = max(totals(costs, assign_frames(costs, ranks)))
    assert ranks * heaviest <= sum(costs) + (ranks - 1) * max(costs)


@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=6), ranks=st.integers(2, 3))
def test_the_best_way_is_not_much_better(costs, ranks):
    """Graham's bound of 1969, 4/3 - 1/(3 ranks), which assigning in any other order than the costliest first breaks."""
    best = min(
        max(totals(costs, [[frame for frame, r in enumerate(way) if r == rank] for rank in range(ranks)]))
        for way in itertools.product(range(ranks), repeat=len(costs))
    )
    assert 3 * ranks * max(totals(costs, assign_frames(costs, ranks))) <= (4 * ranks - 1) * best


@given(kinds=st.lists(st.integers(1, 50), min_size=1, max_size=8), ranks=RANKS, more=st.integers(0, 9))
def test_many_frames_are_balanced_within_five_percent(kinds, ranks, more):
    times = -(-20 * max(kinds) * ranks // sum(kinds)) + more
    costs = kinds * times
    assert 20 * max(costs) * ranks <= sum(costs)
    assert 20 * ranks * max(totals(costs, assign_frames(costs, ranks))) <= 21 * sum(costs)


@given(frames=st.integers(0, 40), ranks=RANKS)
def test_equal_frames_are_equally_many(frames, ranks):
    assert {len(share) for share in assign_frames([3.5] * frames, ranks)} <= {frames // ranks, -(-frames // ranks)}


def test_frames_are_exchanged_where_that_is_better():
    for costs in ([3, 3, 2, 2, 2], [5, 5, 4, 4, 3, 3, 3, 3], [7, 6, 5, 4, 3, 3]):  # 7 to 5, 16 to 14, 15 to 13 before
        even = sum(costs) / 2
        assert totals(costs, assign_frames(costs, 2)) == [even, even]


def make_vision(images: list[tuple[int, int, int]], videos: list[tuple[int, int, int]]) -> VisionInputs | None:
    grids = [torch.tensor(some, dtype=torch.int64).view(-1, 3) for some in (images, videos)]
    pixels = torch.randperm(3 * int(sum(grid.prod(-1).sum() for grid in grids))).double().view(-1, 3)
    first = int(grids[0].prod(-1).sum())
    return make_vision_inputs(
        pixels[:first], grids[0], pixels[first:], grids[1], num_position_embeddings=16, spatial_merge_size=2
    )


def encode(vision: VisionInputs | None) -> torch.Tensor:
    """[M, 10], what a tower could see: a token's patches with their positions, and its frame's as attention does."""
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
def test_shares_make_up_the_whole(images, videos, work, ranks):
    """All of them encoded, one rank's tokens after the other's and put in their places, are the batch encoded whole."""
    vision = make_vision(images, videos)
    assume(vision is not None)
    assignment = assign_vision(vision, work, ranks)
    parts = [assignment.part(vision, rank) for rank in range(ranks)]
    encoded = [encode(part) for part in parts]
    assert assignment.counts == tuple(map(len, encoded))
    assert [part is None for part in parts] == [len(tokens) == 0 for tokens in encoded]
    assert assignment.encoded_index.dtype == torch.int64
    assert sorted(assignment.encoded_index.tolist()) == list(range(len(vision.pixel_values) // 4))
    assert torch.equal(torch.cat(encoded)[assignment.encoded_index], encode(vision))


def test_cost_decides_and_not_the_number_of_frames_or_patches():
    vision = make_vision([(1, 4, 6), (3, 2, 4), (2, 2, 2)], [])  # frames of 24; 8, 8, 8; 4, 4 patches
    by_patches, by_pairs = [(24, 4), (8, 8, 8, 4)], [(24,), (8, 8, 8, 4, 4)]
    for work, expected in ((VisionWork(1, 0, 4), by_patches), (VisionWork(0, 1, 4), by_pairs)):
        assignment = assign_vision(vision, work, 2)
        assert [assignment.part(vision, rank).lengths for rank in range(2)] == expected


def test_frames_that_are_no_whole_tokens_are_refused():
    vision = make_vision([(1, 2, 2), (1, 2, 6)], [])
    with pytest.raises(ValueError, match=r"frames have \(4, 12\) patches, expected multiples of 8"):
        assign_vision(vision, VisionWork(1, 1, 8), 2)


@st.composite
def batches(draw: st.DrawFn) -> tuple[TokenBatch, int, int]:
    """A batch with the sizes of context and sequence parallelism; vision tokens anywhere among the real ones."""
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
        vision_slot=vision_slots(ids, IMAGE, VIDEO, images), layout=layout, vision=make_vision(*grids),
    )  # fmt: skip
    return batch, cp, sp


@pytest.mark.parametrize("predicts", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@given(case=batches(), work=WORKS)
def test_every_rank_is_sent_the_rows_of_its_own_tokens_and_no_others(shared, predicts, case, work):
    batch, cp, sp = case
    slots, whole = batch.vision_slot, encode(batch.vision)
    works = work if shared else None
    locals_ = {
        (c, s): batch.local(cp, c, sp, s, works, predicts=predicts) for c, s in itertools.product(range(cp), range(sp))
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
            reads += [("following", after[own], inputs.following.fuse)] if predicts else []
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
def test_one_rank_alone_shares_nothing(ranks):
    vision = make_vision([(1, 2, 2), (1, 2, 4)], [])
    ids = torch.tensor([[IMAGE, IMAGE, IMAGE, 1]])
    more = torch.zeros(1, 4)
    batch = TokenBatch(ids, ids, more, ids.expand(3, 1, 4), torch.tensor([0, 1, 2, -1]),
                        SequenceLayout.packed_row([4]), vision)  # fmt: skip
    inputs = batch.local(ranks, 0, vision_work=VisionWork(1, 1, 4))
    assert (inputs.vision is vision) == (inputs.vision_exchange is None) == (ranks == 1)


GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, name: str, requests: list[tuple]) -> None:
        self.name, self._requests = name, requests

    def wait_stream(self, other: "Stream") -> None:
        self._requests.append((self.name, "waits for", other.name))


class Requests(TorchFunctionMode):
    """What is asked for while it is on: (stream, what, of which storage or stream)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.made: list[tuple] = []
        self.current = self.computing = Stream("computing", self.made)
        self._pinned: list[int] = []
        self._kept: list[Tensor] = []
        device_transfer._copying_stream.cache_clear()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("copying", self.made))
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.computing

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        self.made.append((stream.name, "uses", tensor.data_ptr()))

    def _note(self, what: str, tensor: Tensor) -> None:
        self._kept.append(tensor)  # so that no other gets its address
        self.made.append((self.current.name, what, tensor.data_ptr()))

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, first = getattr(function, "__name__", ""), args[0] if args else None
        if name == "__get__" and getattr(function, "__self__", None) is Tensor.device:
            return GPU if isinstance(first, torch.nn.Parameter) else torch.device("cpu")
        if name == "pin_memory":
            pinned = first.clone()
            self._pinned.append(pinned.data_ptr())
            self._note("pins", pinned)
            return pinned
        if name == "to" and args[1] == GPU:
            assert kwargs == {"non_blocking": True} and first.data_ptr() in self._pinned, "the host would wait"
            moved = first.clone()
            self._note("copies", moved)
            return moved
        return function(*args, **kwargs or {})


@pytest.fixture
def requests(monkeypatch):
    yield Requests(monkeypatch)
    device_transfer._copying_stream.cache_clear()


def tensors_of(inputs: Movable) -> list[Tensor]:
    found: list[Tensor] = []
    for value in vars(inputs).values():
        found += tensors_of(value) if isinstance(value, Movable) else [value] if isinstance(value, Tensor) else []
    return found


def places(requests: list[tuple], stream: str, what: str) -> list[int]:
    return [number for number, (by, done, _) in enumerate(requests) if (by, done) == (stream, what)]


def test_copies_wait_for_nothing_and_the_step_waits_for_them(requests):
    """Two microbatches, one after the other, in what a step does before it calls the model."""
    model = torch.nn.Linear(1, 1)
    shares = [random_batch(np.random.default_rng(seed), 1, packed=True).local() for seed in (0, 1)]
    for share in shares:
        requests.made.clear()
        with requests:
            moved = to_device(share, model)
        made, (there, before) = requests.made, (tensors_of(moved), tensors_of(share))
        assert len(there) == len(before) > 10
        for one, other in zip(there, before, strict=True):
            assert one.data_ptr() != other.data_ptr() and one.equal(other)
        copies, (waits,) = places(made, "copying", "copies"), places(made, "computing", "waits for")
        assert len(copies) == len(there) and made[waits][2] == "copying" and max(copies) < waits
        assert not places(made, "copying", "waits for") and not places(made, "computing", "copies")
        # Or the copy after next would be written where this microbatch is still computed.
        used = {made[place][2] for place in places(made, "computing", "uses")}
        assert used == {one.data_ptr() for one in there} == {made[place][2] for place in copies}


def test_one_stream_for_all_copies_to_a_device(requests, monkeypatch):
    streams = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or Stream("copying", []))
    share = random_batch(np.random.default_rng(0), 1, packed=False).local()
    with requests:
        copy_to_gpu(share, GPU)
        copy_to_gpu(share, GPU)
    assert streams == [GPU]


def test_on_the_cpu_nothing_is_copied():
    share = random_batch(np.random.default_rng(0), 1, packed=True).local()
    moved = to_device(share, torch.nn.Linear(1, 1))
    assert [one.data_ptr() for one in tensors_of(moved)] == [one.data_ptr() for one in tensors_of(share)]
