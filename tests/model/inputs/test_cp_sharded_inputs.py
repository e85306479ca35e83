"""Rows that arrive as context-parallel shares: the door puts the whole row together, once, on all ranks alike.

Ranks are threads here, and real for whole models: -m tests.model.inputs.test_cp_sharded_inputs OUTPUT DENSE MOE.
"""

import os
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from threading import Barrier
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.models import cp_sharded_inputs
from qwen3vl_bridge.models.inputs import as_model_inputs, read_arguments
from qwen3vl_bridge.parallel.collectives import gather_vocabulary

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.forked import run_ranks
from tests.parity.batches import Sample, make_batch, make_samples, run_reference
from tests.parity.conftest import Pair, make_pair
from tests.ranks import begin, leave

from .support import ALONE, no_grad, packed_params, share_of
from .test_inputs import params_of, pictures


class Ranks:
    def __init__(self, size, monkeypatch):
        self.size, self.barrier, self.given, self.gathered = size, Barrier(size, timeout=20), [None] * size, 0
        monkeypatch.setattr(cp_sharded_inputs, "gather_stacked", self.gather)

    def gather(self, local, group):
        self.given[group.rank()] = local
        self.gathered += group.rank() == 0
        self.barrier.wait()
        assert len({(values.shape, values.dtype) for values in self.given}) == 1
        whole = torch.stack(self.given)
        self.barrier.wait()
        return whole

    def group(self, rank):
        return types.SimpleNamespace(size=lambda: self.size, rank=lambda: rank)

    def call(self, function):
        """What `function(rank, group)` returns or raises, for each rank."""

        def one(rank):
            try:
                return function(rank, self.group(rank))
            except ValueError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def inputs(self, provider, arguments):
        """What the door gives each rank; `arguments` of a rank's number."""

        def one(rank, group):
            groups = types.SimpleNamespace(tp=ALONE, cp=group)
            inputs, answer = as_model_inputs(provider, groups, **arguments(rank))
            assert answer is None or answer.order is None
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
def test_shares_give_the_inputs_of_the_whole_row(provider, config, monkeypatch, cp, content):
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


def test_whole_rows_are_not_put_together(provider, monkeypatch):
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
def test_any_lengths(data):
    """Every argument comes back whole, and on one rank alone nothing happens."""
    cp = data.draw(st.integers(2, 4))
    padded = [2 * cp * chunk for chunk in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))]
    lengths = [data.draw(st.integers(0, n)) for n in padded]
    layout = SequenceLayout._build(1, lengths, padded)
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


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (dict(packed_seq_params=packed_params([0, 6, 16])), None, "segment 0: a padded length of 6 .* the 4 chunks"),
        (dict(packed_seq_params=packed_params([0, 6, 12, 14], [0, 8, 14, 16])), None, "segment 1: a padded length of"),
        (dict(packed_seq_params=packed_params([0, 8, 18])), None, "18 tokens in all.*expected 8 tokens.* also takes"),
        (dict(packed_seq_params=packed_params([0, 8, 18], [0, 8, 16])), None, r"segments of \[8, 10\] tokens in"),
        # All give one row without a mask, whose tokens are then not as many as the offsets count.
        (dict(packed_seq_params=packed_params([0, 16], [0, 16])), dict(input_ids=IDS), "16 tokens for row 0 of 8"),
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
        # Content of one rank alone, which each sees in the whole row.
        (dict(labels=IDS), dict(labels=IDS - 9), r"labels has shape \[1, 16\] .* in \[-8, 8\], expected \[1, 16\]"),
        (dict(attention_mask=IDS), dict(attention_mask=IDS * 0 + 1), "attention_mask has an entry 2, expected 1"),
        (
            dict(attention_mask=IDS * 0 + 1),
            dict(attention_mask=torch.tensor([[0] + [1] * 7])),
            "attention_mask has padding before real tokens in segment 0",
        ),
        (dict(padding_mask=IDS * 0), dict(padding_mask=IDS), "padding_mask has an entry 2, expected 1 for padding"),
        (dict(input_ids=IDS * 1.0), dict(input_ids=IDS * 2.0), r"input_ids has shape \[1, 16\] torch.float32"),
    ],
)
def test_wrong_shares_say_what_is_wrong_on_every_rank(provider, monkeypatch, one, other, message):
    """`one` on all ranks, `other` on the second besides: no rank is left waiting."""
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
def test_shares_may_look_alike(provider, monkeypatch, offsets, one, other):
    call = dict(packed_seq_params=packed_params(offsets))
    found = Ranks(2, monkeypatch).inputs(
        provider, lambda rank: dict(call, input_ids=torch.tensor([other if rank else one]))
    )
    assert [inputs.input_ids.tolist() for inputs in found] == [[one], [other]]


def test_a_picture_in_one_share_alone_is_seen_by_all(provider, config, monkeypatch):
    """Pictures are those of the whole row on every rank; where one leaves them out, all raise."""
    ids = torch.full((1, 16), 5)
    ids[0, 1:3] = torch.tensor([config.vision_start_token_id, config.image_token_id])
    one = dict(pixel_values=torch.zeros(4, 1536), image_grid_thw=torch.tensor([[1, 2, 2]]))
    call, ranks = dict(packed_seq_params=packed_params([0, 8, 16])), Ranks(2, monkeypatch)

    def share(rank):
        return dict(call, input_ids=share_of(ids, (8, 8), 2, rank))

    found = ranks.inputs(provider, lambda rank: share(rank) | one)
    assert [inputs.fuse.positions.tolist() for inputs in found] == [[], [0]]
    for error in ranks.inputs(provider, lambda rank: share(rank) | (one if rank == 0 else {})):
        with pytest.raises(ValueError, match=r"pixel_values is None on .* rank 1 and \[4, 1536\] .*whole row"):
            raise error


@pytest.mark.parametrize("ids", [IDS, IDS * 0 + 7], ids=["text", "one token over and over"])
def test_a_whole_row_whose_padding_makes_it_as_long_as_its_shares(provider, monkeypatch, ids):
    """With `pad_to_length` and with FP8 padding verl gets there: [1, n], and a segment of cp * n."""
    ranks = Ranks(2, monkeypatch)
    call = dict(
        input_ids=ids, attention_mask=torch.ones(1, 8).bool(), packed_seq_params=packed_params([0, 16], [0, 16])
    )
    found = ranks.inputs(provider, lambda rank: call)
    for rank, inputs in enumerate(found):
        row = torch.nn.functional.pad(ids, (0, 8), value=inputs.input_ids[0, -1] if rank else 0)
        assert inputs.layout == SequenceLayout._build(1, [8], [16])
        kept = ~inputs.padding_mask
        assert torch.equal(inputs.input_ids[kept], share_of(row, (16,), 2, rank)[kept])


def test_labels_of_such_a_row_are_a_ranks_own(provider, monkeypatch):
    """With fused kernels verl gives whole rows and labels that are cut: they differ, and the tokens don't."""
    labels = torch.arange(1, 17)[None]
    found = Ranks(2, monkeypatch).inputs(
        provider,
        lambda rank: dict(
            input_ids=IDS,
            attention_mask=torch.ones(1, 8).bool(),
            packed_seq_params=packed_params([0, 16], [0, 16]),
            labels=share_of(labels, (16,), 2, rank),
        ),
    )
    assert [inputs.labels.tolist() for inputs in found] == [
        [[1, 2, 3, 4, 13, 14, 15, 16]],
        [[5, 6, 7, 8, 9, 10, 11, 12]],
    ]


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_shares_with_the_same_tokens_are_told_by_what_else_they_have(provider, monkeypatch, name):
    """A text that repeats itself: its tokens are alike on all ranks, its positions or its padding are not."""
    positions = torch.arange(16).expand(3, 1, 16)
    mask = torch.tensor([[1] * 14 + [0] * 2])
    whole = dict(position_ids=positions, attention_mask=mask)[name]
    found = Ranks(2, monkeypatch).inputs(
        provider,
        lambda rank: {
            "input_ids": torch.tensor([[1, 2] * 4]),
            "packed_seq_params": packed_params([0, 16]),
            name: share_of(whole, (16,), 2, rank),
        },
    )
    assert [inputs.input_ids.tolist() for inputs in found] == [[[1, 2] * 4]] * 2
    assert found[0].layout.lengths == ((14,) if name == "attention_mask" else (16,))


SEEDS = {"many images": 11, "video": 5, "text only": 9, "mixed": 7}
CP2, TP2_SP = dict(context_parallel_size=2), dict(tensor_model_parallel_size=2, sequence_parallel=True)
TOPOLOGIES = {2: {"CP2": CP2}, 4: {"CP4": dict(context_parallel_size=4), "CP2+TP2+SP": CP2 | TP2_SP}}
# What callers give beside the token ids and pictures. In the last, offsets count padding as tokens; the mask tells it.
CALLS = {
    "labels": ["labels"],
    "labels with a mask": ["labels", "loss_mask"],
    "positions": ["labels", "loss_mask", "position_ids"],
    "all": ["labels", "loss_mask", "position_ids", "attention_mask"],
}


class Case:
    def __init__(self, pair: Pair, content: str) -> None:
        self.pair, self.groups = pair, pair.provider._pg_collection
        self.samples = make_samples(content, pair.config, SEEDS[content])
        self.batch = make_batch(self.samples, pair.config, layout=self.make_layout(self.samples))
        logits, loss = run_reference(pair.reference, self.samples)
        loss.backward()
        self.logits = torch.cat(logits).detach()
        labels = torch.cat([sample.labels for sample in self.samples])
        self.losses = F.cross_entropy(self.logits, labels, reduction="none")
        self.loss_mask = torch.cat([sample.loss_mask for sample in self.samples])

    def make_layout(self, samples: list[Sample]) -> SequenceLayout:
        """Each document is padded as context parallelism needs it, the row as sequence parallelism does too."""
        chunks = 2 * self.groups.cp.size()
        multiple, lengths = chunks * self.groups.tp.size(), [len(sample.ids) for sample in samples]
        documents = sum(-(-length // chunks) * chunks for length in lengths)
        return SequenceLayout.packed_row(lengths, multiple=chunks, total=-(-(documents + 1) // multiple) * multiple)

    def share(self, whole: Tensor) -> Tensor:
        """[..., T] -> this rank's [..., T / cp], without the package's help."""
        return share_of(whole, self.batch.layout.padded_lengths, self.groups.cp.size(), self.groups.cp.rank())

    def arguments(self, names: list[str], *, whole: bool = False) -> dict[str, Any]:
        batch, layout = self.batch, self.batch.layout
        mask = (~layout.padding_mask())[None]
        given = dict(
            input_ids=batch.input_ids,
            labels=batch.labels.masked_fill(batch.loss_mask == 0, -100) if "loss_mask" in names else batch.labels,
            loss_mask=batch.loss_mask, position_ids=batch.position_ids, attention_mask=mask,
        )  # fmt: skip
        offsets = (layout.cu_seqlens_padded.tolist(),)
        if "attention_mask" not in names:
            offsets = (layout.cu_seqlens.tolist(), *offsets)
        per_token = {name: values if whole else self.share(values) for name, values in given.items()}
        return {name: per_token[name] for name in ("input_ids", *names)} | dict(
            packed_seq_params=packed_params(*offsets), **pictures_cp_sharded_on_ranks(self.samples)
        )

    def real(self, share: Tensor) -> Tensor:
        """[1, T / cp, ...] of each rank -> [real tokens, ...] of the whole row, without the package's help."""
        whole = share.new_zeros(self.batch.layout.total, *share.shape[2:])
        whole[self.share(torch.arange(len(whole)))] = share[0]
        dist.all_reduce(whole, group=self.groups.cp)
        return whole[~self.batch.layout.padding_mask()]


def pictures_cp_sharded_on_ranks(samples: list[Sample]) -> dict[str, Tensor]:
    names = {name for s in samples for name in s.pixels}
    return {name: torch.cat([s.pixels[name] for s in samples if name in s.pixels]) for name in sorted(names)}


def compare(case: Case) -> Iterator[tuple[str, dict[str, float]]]:
    """Absolute errors of logits and losses, and to those of a whole row; relative errors of gradients."""
    model = case.pair.megatron
    logits = no_grad(model, **case.arguments([]))
    whole = no_grad(model, **case.arguments([], whole=True))
    assert logits.shape[:2] == (1, case.batch.layout.total // case.groups.cp.size())
    found = case.real(gather_vocabulary(logits, case.groups))[:, : case.logits.shape[-1]]
    yield "logits", dict(logits=gap(found, case.logits), whole=gap(logits, whole))
    for call, names in CALLS.items():
        model.zero_grad()
        losses = model(**case.arguments(names))
        (losses * case.share(case.batch.loss_mask)).sum().backward()
        whole = no_grad(model, **case.arguments(names, whole=True))
        if "loss_mask" in names:  # of the whole row: its share comes along
            whole, own_mask = whole
            assert torch.equal(own_mask, case.share(case.batch.loss_mask))
        counts = case.loss_mask if "loss_mask" in names else torch.ones(len(case.loss_mask))
        yield (
            call,
            dict(
                losses=gap(case.real(losses.detach()) * counts, case.losses * counts),
                gradients=gradient_error(case.pair),
                whole=gap(losses, whole),
            ),
        )


def gap(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def gradient_error(pair: Pair) -> float:
    """Of gradients added up as megatron-core does after a step.

    Over ranks that see different tokens; and norms of single heads over those that have different heads.
    """
    groups = pair.provider._pg_collection
    for name, p in pair.megatron.named_parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if getattr(p, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(p.grad, group=groups.tp)
        dist.all_reduce(p.grad, group=groups.dp_cp if getattr(p, "allreduce", True) else groups.expt_dp)
    return max(pair.gradient_errors().values())


def refusals(case: Case) -> Iterator[str]:
    second = case.groups.cp.rank() == 1
    good = case.arguments(["labels"])
    for wrong in (
        dict(good, labels=None) if second else good,
        dict(good, labels=good["labels"] - 1000) if second else good,
        dict(good, packed_seq_params=packed_params([0, case.batch.layout.total])) if second else good,
    ):
        try:
            case.pair.megatron(**wrong)
        except ValueError as error:
            yield str(error)
        else:
            yield "nothing"


def main(output: str, dense: str, moe: str) -> None:
    """Every topology of so many ranks; rank 0 writes the largest errors of all ranks, and what all ranks refused."""
    found, refused = {}, []
    for name, sizes in TOPOLOGIES[int(os.environ["WORLD_SIZE"])].items():
        for family, folder in (("dense", dense), ("MoE", moe)):
            pair = make_pair(folder, moe_aux_loss_coeff=0.0, **sizes)
            for content in SEEDS:
                pair.zero_grad()
                case = Case(pair, content)
                for call, errors in compare(case):
                    values = torch.tensor(list(errors.values()))
                    dist.all_reduce(values, op=dist.ReduceOp.MAX)
                    found[name, family, content, call] = dict(zip(errors, values.tolist(), strict=True))
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, list(refusals(case)))
            refused += everyone
    leave((found, refused), output)


# Of logits up to about 2 and losses of about 6, absolute; of each gradient, relative to its largest entry.
TOLERANCES = {
    "logits": 1e-5,  # measured 2.3e-6
    "losses": 1e-5,  # measured 1.4e-6
    "gradients": 2e-5,  # measured 3.6e-6
    "whole": 0.0,  # measured 0: from the same row on, all is the same
}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in TOPOLOGIES])
def test_shares_give_what_the_whole_row_gives(untied_folder, moe_folder, tmp_path, ranks):
    run_ranks(
        "tests.model.inputs.test_cp_sharded_inputs",
        ranks,
        tmp_path / "found.pt",
        untied_folder,
        moe_folder,
        timeout=1500,
    )
    found, refused = torch.load(tmp_path / "found.pt")

    assert len(found) == len(TOPOLOGIES[ranks]) * 2 * len(SEEDS) * (1 + len(CALLS))
    for name in TOPOLOGIES[ranks]:
        cases = [errors for key, errors in found.items() if key[0] == name]
        worst = {kind: max(errors.get(kind, 0.0) for errors in cases) for kind in TOLERANCES}
        print(name, " ".join(f"{kind} {error:.1e}" for kind, error in worst.items()))
    for key, errors in found.items():
        for kind, error in errors.items():
            assert error <= TOLERANCES[kind], (key, kind, error)

    assert len(refused) == len(TOPOLOGIES[ranks]) * 2 * ranks
    for other_arguments, wrong_labels, other_offsets in refused:
        assert "labels is None on context-parallel rank 1" in other_arguments
        assert "labels has shape" in wrong_labels and "token ids below 512" in wrong_labels
        assert "packed_seq_params of context-parallel rank 1 has other segments" in other_offsets


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:])
