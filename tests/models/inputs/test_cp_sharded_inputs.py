"""Rows that callers have divided over context-parallel ranks are gathered on all ranks.

Ranks are threads here; the matrix of `tests/parity` runs models on real ranks.
"""

import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from threading import Barrier

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.inputs import cp_sharded
from qwen3vl_bridge.models.inputs.caller_batches import as_model_inputs, read_arguments

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import make_batch, make_samples, pictures
from tests.models.inputs.support import ALONE, packed_params, share_of
from tests.models.inputs.test_inputs import params_of


class Ranks:
    def __init__(self, size, monkeypatch):
        self.size, self.barrier, self.given, self.gathered = size, Barrier(size, timeout=20), [None] * size, 0
        monkeypatch.setattr(cp_sharded, "gather_stacked", self.gather)
        monkeypatch.setattr(cp_sharded, "gather_objects", self.objects)

    def gather(self, local, group):
        self.gathered += group.rank() == 0
        gathered = self.objects(local, group)
        assert len({(values.shape, values.dtype) for values in gathered}) == 1
        return torch.stack(gathered)

    def objects(self, local, group):
        self.given[group.rank()] = local
        self.barrier.wait()
        gathered = list(self.given)
        self.barrier.wait()
        return gathered

    def group(self, rank):
        return types.SimpleNamespace(size=lambda: self.size, rank=lambda: rank)

    def call(self, function):
        """Return the result of `function(rank, group)`, or its exception, for each rank."""

        def one(rank):
            try:
                return function(rank, self.group(rank))
            except ValueError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def inputs(self, provider, arguments):
        """Return each rank's model inputs for `arguments(rank)`."""

        def one(rank, group):
            groups = types.SimpleNamespace(tp=ALONE, cp=group)
            inputs, answer = as_model_inputs(provider, groups, **arguments(rank))
            assert answer is None or answer.slots is None
            return inputs

        return self.call(one)


def layout_of(samples, cp):
    lengths, multiple = [len(s.ids) for s in samples], 2 * cp
    return SequenceLayout.packed_row(
        lengths, multiple=multiple, total=sum(-(-n // multiple) * multiple for n in lengths) + multiple
    )


def assert_equal(found, expected):
    for field in fields(expected):
        ours, right = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(right, torch.Tensor):
            assert torch.equal(ours, right), field.name
        elif is_dataclass(right):
            assert_equal(ours, right)
        else:
            assert ours == right, field.name


@pytest.mark.parametrize("content", ["mixed", "text only", "video"])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_context_parallel_slices_give_same_model_inputs_as_full_row(provider, config, monkeypatch, cp, content):
    samples = make_samples(content, config, seed=0)
    batch = make_batch(samples, config, layout=layout_of(samples, cp))
    layout, ranks = batch.layout, Ranks(cp, monkeypatch)
    whole = dict(
        input_ids=batch.input_ids, labels=batch.labels.masked_fill(batch.loss_mask == 0, -100),
        loss_mask=batch.loss_mask.double(),
        position_ids=torch.cat((torch.arange(layout.total)[None, None], batch.position_ids)),
        attention_mask=~layout.padding_mask()[None], padding_mask=layout.padding_mask()[None],
    )  # fmt: skip
    more = dict(packed_seq_params=params_of(layout), **pictures(samples))

    def share(name, rank):
        values = share_of(whole[name], layout.padded_lengths, cp, rank)
        return values.int() if rank == 1 and name == "input_ids" else values  # what kind of integers is each one's own

    for names in (list(whole), ["input_ids"], ["input_ids", "labels", "loss_mask"], ["input_ids", "position_ids"]):
        ranks.gathered = 0
        found = ranks.inputs(provider, lambda rank, names=names: {name: share(name, rank) for name in names} | more)
        assert ranks.gathered == 1 + len(names)  # the first compares the arguments
        expected = ranks.inputs(provider, lambda rank, names=names: {name: whole[name] for name in names} | more)
        assert ranks.gathered == 1 + len(names)
        for rank, (ours, right) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours.input_ids, share("input_ids", rank))
            assert_equal(ours, right)


def test_full_rows_on_each_context_parallel_rank_are_not_gathered(provider, monkeypatch):
    ranks, ids = Ranks(2, monkeypatch), torch.arange(16)[None]
    for total, call in (
        (16, dict(input_ids=ids, packed_seq_params=packed_params([0, 12, 16]))),
        (16, dict(input_ids=ids, packed_seq_params=packed_params([0, 16]))),
        (16, dict(input_ids=ids.view(2, 8), packed_seq_params=packed_params([0, 8, 16]))),
        (32, dict(input_ids=ids.view(2, 8), packed_seq_params=packed_params([0, 4, 12], [0, 16, 32]))),
        (16, dict(input_ids=ids)),
    ):
        found = ranks.inputs(provider, lambda rank, call=call: call)
        assert ranks.gathered == 0 and found[0].layout.total == total
        assert found[0].input_ids.numel() == total // 2


@given(st.data())
def test_read_arguments_gathers_slices_of_random_lengths_into_full_row(data):
    """Every argument is restored; a single rank changes nothing."""
    cp = data.draw(st.integers(2, 4))
    padded = [2 * cp * chunk for chunk in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))]
    lengths = [data.draw(st.integers(0, n)) for n in padded]
    layout = SequenceLayout.from_lengths(1, lengths, padded)
    whole = dict(input_ids=torch.randperm(layout.total)[None], position_ids=torch.rand(3, 1, layout.total))
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = Ranks(cp, monkeypatch).call(
            lambda rank, group: read_arguments(
                {name: share_of(values, padded, cp, rank) for name, values in whole.items()}
                | dict(packed_seq_params=params_of(layout), more=rank),
                group,
            )
        )
    for rank, one in enumerate(found):
        assert one["more"] == rank
        assert all(torch.equal(one[name], values) for name, values in whole.items())
    alone = read_arguments(found[0], ALONE)
    assert alone.keys() == found[0].keys() and all(torch.equal(alone[name], found[0][name]) for name in whole)


IDS = torch.arange(1, 9)[None]


@pytest.mark.parametrize(("one", "other", "message"), [
    (dict(packed_seq_params=packed_params([0, 6, 16])), None,
     "segment 0 has a padded length of 6 tokens, expected a multiple of 4"),
    (dict(packed_seq_params=packed_params([0, 6, 12, 14], [0, 8, 14, 16])), None, "segment 1 has a padded length of"),
    (dict(packed_seq_params=packed_params([0, 8, 18])), None, "18 tokens in all.*expected 8 tokens.* also takes"),
    (dict(packed_seq_params=packed_params([0, 8, 18], [0, 8, 16])), None, r"segments of \[8, 10\] tokens in"),
    # All give one row without a mask, whose tokens are then not as many as the offsets count.
    (dict(packed_seq_params=packed_params([0, 16], [0, 16])), dict(input_ids=IDS), "16 tokens for row 0, which"),
    (dict(labels=IDS.repeat(1, 2)), None, r"labels has shape \[1, 16\], expected \[1, 8\]: .*row of 16 tokens"),
    (dict(loss_mask=IDS[0] * 1.0), None, r"loss_mask has shape \[8\], expected \[1, 8\]"),
    (dict(position_ids=IDS.expand(3, 2, 8)), None, r"position_ids has shape \[3, 2, 8\], expected \[3, 1, 8\]"),
    (dict(attention_mask=IDS[:, None, None].expand(1, 1, 8, 8)), None, r"\[1, 1, 8, 8\], expected \[1, 8\]"),
    (dict(), dict(labels=IDS), r"labels is \[1, 8\] integers on .* rank 1 and None on rank 0; expected the same"),
    (dict(labels=IDS), dict(labels=None), r"labels is None on .* rank 1 and \[1, 8\] integers on rank 0"),
    (dict(loss_mask=IDS), dict(loss_mask=IDS * 1.0), r"\[1, 8\] floating point on .* rank 1 and \[1, 8\] integers"),
    (dict(labels=IDS), dict(labels=IDS[:, :4]), r"labels is \[1, 4\] integers on .* rank 1 and \[1, 8\]"),
    (dict(), dict(packed_seq_params=packed_params([0, 4, 16])), "of context-parallel rank 1 has other segments"),
    (dict(), dict(packed_seq_params=packed_params([0, 7, 15], [0, 8, 16])), "rank 1 has other segments"),
    # Wrong values on one rank, which all ranks see in the full row.
    (dict(labels=IDS), dict(labels=IDS - 9), r"labels has shape \[1, 16\] .* in \[-8, 8\], expected \[1, 16\]"),
    (dict(attention_mask=IDS), dict(attention_mask=IDS * 0 + 1), "attention_mask has an entry 2, expected 1"),
    (dict(attention_mask=IDS * 0 + 1), dict(attention_mask=torch.tensor([[0] + [1] * 7])),
     "attention_mask has padding before real tokens in segment 0"),
    (dict(padding_mask=IDS * 0), dict(padding_mask=IDS), "padding_mask has an entry 2, expected 1 for padding"),
    (dict(input_ids=IDS * 1.0), dict(input_ids=IDS * 2.0), r"input_ids has shape \[1, 16\] torch.float32"),
])  # fmt: skip
def test_invalid_context_parallel_slices_raise_on_every_rank(provider, monkeypatch, one, other, message):
    """All ranks pass `one`, the second rank also `other`. No rank waits forever."""
    calls = [dict(input_ids=IDS, packed_seq_params=packed_params([0, 8, 16])), {}]
    calls[1] = dict(calls[0], input_ids=IDS + 10) | one | (other or {})
    calls[0] |= one
    for error in Ranks(2, monkeypatch).inputs(provider, calls.__getitem__):
        with pytest.raises(ValueError, match=message):
            raise error


@pytest.mark.parametrize(
    ("offsets", "one", "other"),
    [([0, 16], [7] * 8, [7] * 8), ([0, 8, 16], [1, 2] * 4, [1, 2] * 4), ([0, 16], [1, 2] * 4, [2, 1] * 4)],
    ids=["one token", "two segments", "others"],
)
def test_context_parallel_slices_with_equal_or_repeated_tokens_are_gathered(provider, monkeypatch, offsets, one, other):
    call = dict(packed_seq_params=packed_params(offsets))
    found = Ranks(2, monkeypatch).inputs(
        provider, lambda rank: dict(call, input_ids=torch.tensor([other if rank else one]))
    )
    assert [inputs.input_ids.tolist() for inputs in found] == [[one], [other]]


def test_every_cp_rank_raises_if_one_rank_omits_pixels_of_full_row(provider, config, monkeypatch):
    """All ranks must pass the images of the full row; if one rank omits them, all raise."""
    ids = torch.full((1, 16), 5)
    ids[0, 1:3] = torch.tensor([config.vision_start_token_id, config.image_token_id])
    one = dict(pixel_values=torch.zeros(4, 1536), image_grid_thw=torch.tensor([[1, 2, 2]]))
    call, ranks = dict(packed_seq_params=packed_params([0, 8, 16])), Ranks(2, monkeypatch)

    def share(rank):
        return dict(call, input_ids=share_of(ids, (8, 8), 2, rank))

    found = ranks.inputs(provider, lambda rank: share(rank) | one)
    assert [inputs.fuse.targets.tolist() for inputs in found] == [[], [0]]
    for error in ranks.inputs(provider, lambda rank: share(rank) | (one if rank == 0 else {})):
        with pytest.raises(ValueError, match=r"pixel_values is None on .* rank 1 and \[4, 1536\] .*full row"):
            raise error


# With `pad_to_length` and with FP8 padding verl gets there: [1, n], and a segment of cp * n.
ROUNDED_UP = dict(attention_mask=torch.ones(1, 8).bool(), packed_seq_params=packed_params([0, 16], [0, 16]))


@pytest.mark.parametrize("ids", [IDS, IDS * 0 + 7], ids=["text", "one token over and over"])
def test_full_row_as_long_as_a_slice_is_not_gathered(provider, monkeypatch, ids):
    found = Ranks(2, monkeypatch).inputs(provider, lambda rank: dict(ROUNDED_UP, input_ids=ids))
    for rank, inputs in enumerate(found):
        row = torch.nn.functional.pad(ids, (0, 8), value=inputs.input_ids[0, -1] if rank else 0)
        assert inputs.layout == SequenceLayout.from_lengths(1, [8], [16])
        kept = ~inputs.padding_mask
        assert torch.equal(inputs.input_ids[kept], share_of(row, (16,), 2, rank)[kept])


def test_sliced_labels_are_kept_if_input_ids_are_full_row(provider, monkeypatch):
    """Verl's fused kernels pass full rows and sliced labels: only the labels differ between ranks."""
    labels = torch.arange(1, 17)[None]
    found = Ranks(2, monkeypatch).inputs(
        provider, lambda rank: dict(ROUNDED_UP, input_ids=IDS, labels=share_of(labels, (16,), 2, rank))
    )
    assert [inputs.labels[0].tolist() for inputs in found] == [[1, 2, 3, 4, 13, 14, 15, 16], [*range(5, 13)]]


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_slices_with_equal_tokens_are_gathered_if_positions_or_masks_differ(provider, monkeypatch, name):
    """In a repetitive text all ranks have the same tokens, but other positions or padding."""
    positions = torch.arange(16).expand(3, 1, 16)
    mask = torch.tensor([[1] * 14 + [0] * 2])
    whole = dict(position_ids=positions, attention_mask=mask)[name]
    found = Ranks(2, monkeypatch).inputs(
        provider,
        lambda rank: {
            "input_ids": torch.tensor([[1, 2] * 4]), "packed_seq_params": packed_params([0, 16]),
            name: share_of(whole, (16,), 2, rank),
        },
    )  # fmt: skip
    assert [inputs.input_ids.tolist() for inputs in found] == [[[1, 2] * 4]] * 2
    assert found[0].layout.lengths == ((14,) if name == "attention_mask" else (16,))
