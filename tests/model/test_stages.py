"""What pipeline stages hand to each other: a chain of them gives what the layers give in one piece, gradients too."""

import types

from qwen3vl_bridge.batch.packed_batch import VisionRows
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


def places(length: int, rows: int, tokens: int) -> torch.Tensor:
    """Where vision tokens lie in the flat hidden states; a place may be asked for twice, which adds up."""
    return torch.randint(length * rows, (tokens,))


def run_layers(hidden: torch.Tensor, features: torch.Tensor, where: torch.Tensor, layers: int) -> torch.Tensor:
    """Layers as the model's: each does something of its own, and the first ones add a feature.

    Where there are none, megatron-core's block gives a copy, as here: what came in is not to be freed with it.
    """
    hidden = hidden.clone()
    for number in range(layers):
        hidden = 2 * hidden
        if number < len(features):
            hidden = hidden.flatten(0, 1).index_add(0, where, features[number]).view_as(hidden)
    return hidden


def chain(num_features: int, layers: list[int]) -> list[DeepStackStage]:
    firsts = [sum(layers[:n]) for n in range(len(layers))]
    return [DeepStackStage.of(num_features, first, here) for first, here in zip(firsts, layers, strict=True)]


@given(**SIZES)
def test_unpacking_inverts_packing(length, rows, tokens, width, num_features, stages):
    hidden, features = make(length, rows, width), make(num_features, tokens, width)
    received, own = hidden, features
    for here, following in zip(parts := chain(num_features, stages), parts[1:], strict=False):
        sent = here.pack(received, own)
        assert sent._base is None and sent.dim() == 3 and sent.size(-1) == width
        assert sent.numel() == width * (length * rows + here.sent * tokens)
        received, own = following.unpack(sent, length, rows, tokens)
        assert torch.equal(received, hidden)
        assert own.shape == (following.received, tokens, width)
        assert torch.equal(own, features[num_features - following.received :])


@given(**SIZES)
def test_a_chain_is_the_layers_in_one_piece(length, rows, tokens, width, num_features, stages):
    """Stages are processes of their own: gradients come back one tensor at a time, after what was sent was freed."""
    hidden, features, where = make(length, rows, width), make(num_features, tokens, width), places(length, rows, tokens)
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


def test_rows_of_another_length_than_the_schedule_was_told_are_refused():
    """What a later stage receives is as large as the schedule's `seq_length` says, whatever the rows are."""
    stage = DeepStackStage(received=1, sent=0)
    assert stage.unpack(torch.ones(3 * 2 + 4, 1, 5), 3, 2, 4)[0].shape == (3, 2, 5)
    said = "sent 16 hidden states, expected 3 tokens of 2 rows and 4 DeepStack features, 10: give the schedule"
    with pytest.raises(ValueError, match=said):
        stage.unpack(torch.ones(8, 2, 5), 3, 2, 4)


@pytest.mark.parametrize(("sent", "pictures", "fits"), [(1, 2, False), (1, 0, True), (0, 2, True), (1, None, True)])
def test_features_need_tensors_of_any_size_between_stages(sent, pictures, fits):
    """Rows of text may have any length that the schedule is told; it is told nothing of pictures."""
    where = None if pictures is None else VisionRows(torch.zeros(pictures).long(), torch.zeros(pictures).long())
    inputs, stage = types.SimpleNamespace(deepstack=where), DeepStackStage(received=3, sent=sent)
    stage.check(inputs, types.SimpleNamespace(variable_seq_lengths=True))
    fixed = types.SimpleNamespace(variable_seq_lengths=False)
    if fits:
        stage.check(inputs, fixed)
        return
    with pytest.raises(ValueError, match="variable_seq_lengths is False and 2 DeepStack features go to the next"):
        stage.check(inputs, fixed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 2])
def test_features_travel_in_the_hidden_states_type(dtype, tokens):
    """One tensor has one type, which the schedules know beforehand."""
    stage = DeepStackStage(received=2, sent=1)
    sent = stage.pack(torch.ones(3, 2, 4, dtype=dtype), torch.ones(2, tokens, 4))
    assert sent.dtype == dtype and sent.shape == (6 + tokens, 1, 4)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_view_is_sent_as_none(frozen):
    """The output of a layer may be one; the tensor that is freed must hold its own memory."""
    base = torch.ones(6, 4, requires_grad=not frozen)
    for sent in (0, 1):
        loaded = DeepStackStage(received=1, sent=sent).pack(base.view(3, 2, 4), base.view(1, 6, 4))
        assert loaded._base is None and loaded.requires_grad is not frozen
