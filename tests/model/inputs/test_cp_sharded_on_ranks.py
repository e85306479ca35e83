"""Rows that context-parallel ranks have shared out already give the losses, logits and gradients of transformers.

Run on ranks: -m tests.model.inputs.test_cp_sharded_on_ranks OUTPUT DENSE_FOLDER MOE_FOLDER.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.parallel.collectives import gather_vocabulary

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.forked import run_ranks
from tests.parity.batches import Sample, make_batch, make_samples, run_reference
from tests.parity.conftest import Pair, make_pair
from tests.ranks import begin, leave

from .support import no_grad, packed_params, share_of

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
            packed_seq_params=packed_params(*offsets), **pictures(self.samples)
        )

    def real(self, share: Tensor) -> Tensor:
        """[1, T / cp, ...] of each rank -> [real tokens, ...] of the whole row, without the package's help."""
        whole = share.new_zeros(self.batch.layout.total, *share.shape[2:])
        whole[self.share(torch.arange(len(whole)))] = share[0]
        dist.all_reduce(whole, group=self.groups.cp)
        return whole[~self.batch.layout.padding_mask()]


def pictures(samples: list[Sample]) -> dict[str, Tensor]:
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
    for name, fields in TOPOLOGIES[int(os.environ["WORLD_SIZE"])].items():
        for family, folder in (("dense", dense), ("MoE", moe)):
            pair = make_pair(folder, moe_aux_loss_coeff=0.0, **fields)
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
        "tests.model.inputs.test_cp_sharded_on_ranks",
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
