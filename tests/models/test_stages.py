"""Tensors between ranks: hidden states of pipeline stages, and payloads of vision ranks."""

import types
from dataclasses import replace

from qwen3vl_bridge.core.batch import TokenBatch, VisionPlacement, VisionRankInputs
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings, make_vision_inputs
from qwen3vl_bridge.core.vision_sharding import VisionShard, VisionWork, assign_vision
from qwen3vl_bridge.dist_train.modules import Headers, pack, unpack
from qwen3vl_bridge.models.qwen3_vl.model import DeepStackStage

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor

SIZES = dict(
    length=st.integers(1, 5), rows=st.integers(1, 3), tokens=st.integers(0, 6), width=st.integers(1, 3),
    num_features=st.integers(0, 4), stages=st.lists(st.integers(0, 3), min_size=1, max_size=5),
)  # fmt: skip


def make(*shape: int) -> torch.Tensor:
    return torch.randint(1, 9, shape).double().requires_grad_()


def run_layers(hidden: torch.Tensor, features: torch.Tensor, where: torch.Tensor, layers: int) -> torch.Tensor:
    """Run substitute layers: each changes the hidden states, and the first ones add a feature.

    Without layers it returns a copy, like megatron-core's block, so that the input can be freed.
    """
    hidden = hidden.clone()
    for number in range(layers):
        hidden = 2 * hidden
        if number < len(features):
            hidden = hidden.flatten(0, 1).index_add(0, where, features[number]).view_as(hidden)
    return hidden


def chain(num_features: int, layers: list[int]) -> list[DeepStackStage]:
    firsts = [sum(layers[:n]) for n in range(len(layers))]
    return [DeepStackStage.from_layers(num_features, first, here) for first, here in zip(firsts, layers, strict=True)]


@given(**SIZES)
def test_pipeline_stages_with_deepstack_features_match_unsplit_layers(
    length, rows, tokens, width, num_features, stages
):
    """As between processes, gradients return one tensor at a time, after the sent tensor was freed."""
    hidden, features = make(length, rows, width), make(num_features, tokens, width)
    where = torch.randint(length * rows, (tokens,))  # a place may be asked for twice, which adds up
    whole = run_layers(hidden, features, where, sum(stages))
    weights = torch.randint(1, 9, whole.shape).double()
    expected = torch.autograd.grad((whole * weights).sum(), (hidden, features), allow_unused=True)
    exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
    received, own = hidden, features
    parts = chain(num_features, stages)
    for number, (part, layers) in enumerate(zip(parts, stages, strict=True)):
        output = run_layers(received, own, where, layers)
        if number + 1 == len(parts):
            break
        sent = part.pack(output, own)
        received = sent.detach().clone().requires_grad_()
        deallocate_output_tensor(sent, True)
        exchanged.append((sent, received))
        received, own = parts[number + 1].unpack(received, length, rows, tokens)
    assert torch.equal(output, whole)
    output.backward(weights)
    for sent, received in reversed(exchanged):
        custom_backward(sent, received.grad)
    for leaf, right in zip((hidden, features), expected, strict=True):
        found, right = (torch.zeros_like(leaf) if grad is None else grad for grad in (leaf.grad, right))
        assert torch.equal(found, right)


def test_stage_unpack_raises_if_received_tensor_has_wrong_size():
    """The size of the received tensor follows the schedule's `seq_length`."""
    stage = DeepStackStage(received=1, sent=0)
    assert stage.unpack(torch.ones(3 * 2 + 4, 1, 5), 3, 2, 4)[0].shape == (3, 2, 5)
    said = r"sent 16 hidden states, expected 10 \(3 tokens of 2 rows and 4 DeepStack features\)"
    with pytest.raises(ValueError, match=said):
        stage.unpack(torch.ones(8, 2, 5), 3, 2, 4)


@pytest.mark.parametrize(("sent", "pictures", "fits"), [(1, 2, False), (1, 0, True), (0, 2, True)])
def test_stage_raises_if_it_sends_features_with_fixed_seq_lengths(sent, pictures, fits):
    """The schedule knows the length of rows, but not the number of features, which depends on images."""
    where = VisionPlacement(torch.zeros(pictures).long(), torch.zeros(pictures).long())
    inputs, stage = types.SimpleNamespace(deepstack=where), DeepStackStage(received=3, sent=sent)
    stage.check_variable_lengths(inputs, types.SimpleNamespace(variable_seq_lengths=True))
    fixed = types.SimpleNamespace(variable_seq_lengths=False)
    if fits:
        stage.check_variable_lengths(inputs, fixed)
        return
    with pytest.raises(ValueError, match="variable_seq_lengths is False, but this pipeline stage sends 2 DeepStack"):
        stage.check_variable_lengths(inputs, fixed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 2])
def test_stage_pack_converts_features_to_dtype_of_hidden_states(dtype, tokens):
    """The schedules know one dtype in advance."""
    stage = DeepStackStage(received=2, sent=1)
    sent = stage.pack(torch.ones(3, 2, 4, dtype=dtype), torch.ones(2, tokens, 4))
    assert sent.dtype == dtype and sent.shape == (6 + tokens, 1, 4)


@pytest.mark.parametrize("frozen", [False, True])
def test_stage_pack_returns_tensor_that_owns_its_memory(frozen):
    """Schedules free the sent tensor, which must own its memory."""
    base = torch.ones(6, 4, requires_grad=not frozen)
    for sent in (0, 1):
        loaded = DeepStackStage(received=1, sent=sent).pack(base.view(3, 2, 4), base.view(1, 6, 4))
        assert loaded._base is None and loaded.requires_grad is not frozen


T, HIDDEN = 3, 8  # DeepStack features, hidden size
WORK = VisionWork(1.0, 0.1, 4)
COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=4)
GRIDS = st.lists(st.tuples(st.integers(1, 3), *[st.integers(1, 3).map(lambda side: 2 * side)] * 2), max_size=4)


def encoded(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange((T + 1) * tokens * HIDDEN, dtype=torch.float32).view(T + 1, tokens, HIDDEN) + 1
    return numbers[0].requires_grad_(), numbers[1:].requires_grad_()


def read(*arguments) -> list[torch.Tensor]:
    *found, header = unpack(*arguments)
    header.check()
    return found


def shards(counts: list[int]) -> tuple[VisionShard, ...]:
    return tuple(VisionShard(count, 2**31 + 7 * i) for i, count in enumerate(counts))


def batch_of(grids: list[tuple[int, int, int]], name: str = "a") -> TokenBatch:
    layout, vision = SequenceLayout.packed_row([16]), None
    if grids:
        sizes = torch.tensor(grids)
        pixels = torch.randn(int(sizes.prod(-1).sum()), 3)
        vision = make_vision_inputs(pixels, sizes, None, None, VisionSettings(-1, -1, 2, 16))
    zeros = torch.zeros(1, 16, dtype=torch.long)
    return TokenBatch(
        zeros, zeros, zeros.float(), zeros.expand(3, 1, 16), torch.full((16,), -1), layout, vision, (name,)
    )


@given(counts=COUNTS, more=st.integers(0, 3), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_vision_payload_pack_and_unpack_restore_tokens_and_features(counts, more, dtype):
    """From one sender to several receivers, and from several senders to one receiver."""
    tokens, features = (one.to(dtype) for one in encoded(sum(counts) + more))
    rows = max(counts) + more
    payload = pack(tokens, features, shards(counts), rows)
    assert payload.shape == (len(counts), 1 + rows, (T + 1) * HIDDEN)
    assert payload.dtype == dtype and payload._base is None
    starts = [sum(counts[:i]) for i in range(len(counts))]
    for shard, part, start in zip(shards(counts), payload.split(1), starts, strict=True):
        own = slice(start, start + shard.tokens)
        for found, expected in zip(read(part, (shard,), T, HIDDEN), (tokens[own], features[:, own]), strict=True):
            assert torch.equal(found, expected)
    found = read(payload, shards(counts), T, HIDDEN)
    for one, expected in zip(found, (tokens, features), strict=True):
        assert torch.equal(one, expected.narrow(-2, 0, sum(counts)))


@given(counts=COUNTS)
def test_vision_payload_passes_gradients_unchanged(counts):
    tokens, features = encoded(sum(counts))
    payload = pack(tokens, features, shards(counts), max(counts) + 1)
    weights = [torch.randn_like(one) for one in (tokens, features)]
    back = read(payload, shards(counts), T, HIDDEN)
    sum((one * weight).sum() for one, weight in zip(back, weights, strict=True)).backward()
    for one, weight in zip((tokens, features), weights, strict=True):
        assert torch.equal(one.grad, weight)


@pytest.mark.parametrize(("expected", "num_features", "hidden", "words"), [
    (VisionShard(3, 5), T, HIDDEN, r"sent shards with .*\[\(2, 5, 3, 8\)\], expected \[\(3, 5, 3, 8\)\]"),
    (VisionShard(2, 6), T, HIDDEN, "read the same batches in the same order"),
    (VisionShard(2, 5), 1, 2 * HIDDEN, r"expected \[\(2, 5, 1, 16\)\]"),  # a swap that has the same shape
    (VisionShard(2, 5), T, HIDDEN + 1, r"sent a tensor of shape \[1, 5, 32\], expected \[1, '3 or more', 36\]"),
    (VisionShard(9, 5), T, HIDDEN, r"expected \[1, '10 or more', 32\]"),
])  # fmt: skip
def test_unpack_raises_if_vision_payload_does_not_match_expected_shards(expected, num_features, hidden, words):
    payload = pack(*encoded(2), (VisionShard(2, 5),), 4)
    with pytest.raises(ValueError, match=words):
        read(payload, (expected,), num_features, hidden)


def test_vision_headers_report_mismatch_at_next_add_or_check():
    right, wrong = (
        unpack(pack(*encoded(2), (VisionShard(2, 5),), 4), (VisionShard(2, mark),), T, HIDDEN)[-1] for mark in (5, 6)
    )
    headers = Headers()
    headers.add(right)
    headers.add(wrong)  # nobody has looked at it yet
    with pytest.raises(ValueError, match="read the same batches in the same order"):
        headers.add(right)
    headers.add(wrong)
    with pytest.raises(ValueError, match="read the same batches in the same order"):
        headers.check_remaining()
    headers.check_remaining()


@given(grids=GRIDS, vision_ranks=st.integers(1, 4))
def test_vision_and_language_ranks_compute_equal_vision_shards(grids, vision_ranks):
    batch = batch_of(grids)
    expected = batch.local(vision_work=WORK, vision_ranks=vision_ranks)
    sent = [VisionRankInputs.from_batches((batch,), WORK, vision_ranks, share) for share in range(vision_ranks)]
    assert expected.vision is None and expected.vision_exchange is None
    assert (
        expected.vision_shards
        == batch.vision_shards_of(assign_vision(batch.vision, WORK, vision_ranks))
        == tuple(one.shards[0] for one in sent)
    )
    assert {one.max_tokens for one in sent} == {max(shard.tokens for shard in expected.vision_shards)}
    for one in sent:
        assert one.shards[0].tokens == sum(one.vision.lengths if one.vision else ()) // 4
    assert sorted(n for one in sent if one.vision for n in one.vision.lengths) == sorted(
        batch.vision.lengths if batch.vision else ()
    )


@given(grids=st.lists(GRIDS, min_size=2, max_size=3))
def test_vision_rank_inputs_join_batches_of_several_language_replicas(grids):
    batches = [batch_of(some, str(i)) for i, some in enumerate(grids)]
    one = VisionRankInputs.from_batches(batches, WORK, 1, 0)
    assert one.shards == tuple(batch.local(vision_work=WORK, vision_ranks=1).vision_shards[0] for batch in batches)
    pictures = [batch.vision for batch in batches if batch.vision]
    assert (one.vision is None) == (not pictures)
    if pictures:
        assert torch.equal(one.vision.pixel_values, torch.cat([each.pixel_values for each in pictures]))
        assert one.vision.lengths == tuple(n for each in pictures for n in each.lengths)
        assert one.vision.cu_seqlens.diff().tolist() == list(one.vision.lengths)


def test_vision_shard_checksum_changes_with_samples_row_layout_or_images():
    batch = batch_of([(1, 4, 4), (1, 2, 4)])
    others = [
        replace(batch, sample_ids=("b",)), replace(batch, layout=SequenceLayout.packed_row([8, 8])),
        batch_of([(1, 2, 4), (1, 4, 4)]),
    ]  # fmt: skip
    marks = {one.vision_shards_of(assign_vision(one.vision, WORK, 1))[0].checksum for one in (batch, *others)}
    assert len(marks) == 4
