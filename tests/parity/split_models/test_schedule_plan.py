"""Experts' all-to-all under computation: every loss and gradient is that of the schedule without it, to the last bit.

megatron-core accepts the setting only for 16 bits; it is read anew in each step, so here it is switched in a model of
float32 that has been built.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import results_of_ranks
from tests.ranks import of_all_ranks
from tests.steps import forward_backward

from ..on_ranks import Split
from ..references import MICROBATCHES
from ..topologies import TOPOLOGIES, Topology

_STAGES = TOPOLOGIES["PP2+VPP2"].fields | TOPOLOGIES["EP2"].fields
SPLITS = {name: TOPOLOGIES[name] for name in ("EP2", "TP2+SP+EP2", "CP2+EP2", "DP2+CP2+EP2", "TP2+SP+CP2+EP2")}
SPLITS |= {"PP2+VPP2+EP2": Topology(4, _STAGES)}
BALANCE = 0.5  # weight of the balancing loss, so that padding that is routed as tokens is seen


def computed(split: Split, content: str, rows: str, *, overlap: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sum of losses and number of tokens; and this rank's gradients."""
    run = split.run
    run.cfg.model.overlap_moe_expert_parallel_comm = overlap
    split.begin(split.batches(content, rows, steps=1), rows)
    loss = forward_backward(run, run.stream, MICROBATCHES // run.cfg.data_parallel_size)
    return loss, [p.main_grad.clone() for p in split.parameters if p.requires_grad]


def differing(split: Split, content: str, rows: str) -> dict[str, float]:
    """On any rank, what the schedule changes, with the error relative to the largest entry."""
    (loss, gradients), (expected, without) = (computed(split, content, rows, overlap=on) for on in (True, False))
    names = [n for chunk in split.run.model for n, p in chunk.named_parameters() if p.requires_grad]
    pairs = {"loss": (loss, expected)} | dict(zip(names, zip(gradients, without, strict=True), strict=True))
    assert all(torch.isfinite(one).all() for one, _ in pairs.values())
    assert all(
        one.any()
        for name, (one, _) in pairs.items()
        if name.endswith("layernorm.weight") and "decoder.layers" in name and "vision" not in name
    )
    mine = {
        name: ((one - other).abs().max() / other.abs().max().clamp(min=1e-9)).item()
        for name, (one, other) in pairs.items()
        if not torch.equal(one, other)
    }
    return {name: error for found in of_all_ranks(mine) for name, error in found.items()}


def differing_of(folder: Path, topologies: list[str], cases: list[tuple[str, str]], settings: dict[str, Any]) -> dict:
    def each() -> Iterator[tuple[tuple[str, ...], dict[str, float]]]:
        for name in topologies:
            split = Split(folder, SPLITS[name], BALANCE, **settings)
            for case in cases:
                yield (name, *case), differing(split, *case)

    return dict(each())


CASES = [("mixed", "padded"), ("mixed", "packed"), ("text", "packed")]


@pytest.mark.parametrize("ranks", [2])
def test_losses_and_gradients_are_those_without_it(moe_folder, ranks):
    topologies = [name for name, one in TOPOLOGIES.items() if one.ranks == ranks and name in ("EP2",)]
    found = results_of_ranks(differing_of, ranks, moe_folder, topologies, CASES, {})
    assert found == {case: {} for case in found}
