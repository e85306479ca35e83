"""However a model with experts is split, its balancing loss weighs tokens as in one process, and padding not at all.

Also where a microbatch has no real token, and where losses are divided by microbatches, as by verl and miles.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout

import pytest
import torch

from tests.helpers.batches import make_batch
from tests.helpers.forked import results_of_ranks
from tests.helpers.steps import forward_backward
from tests.parity.on_ranks import Split, layout_of
from tests.parity.references import MICROBATCHES, step_samples, worst
from tests.parity.topologies import TOPOLOGIES, Topology

CONTENT, ROWS, EMPTY = "mixed", ("padded", "packed"), "with an empty microbatch"
BALANCE, Z_LOSS = 0.5, 0.1
# Of each kind, settings and the ways to split that it is tried with; None for all.
KINDS: dict[str, tuple[dict[str, Any], set[str] | None]] = {
    "per token": (dict(model__moe_z_loss_coeff=Z_LOSS), None),
    "per microbatch": (
        dict(model__calculate_per_token_loss=False, model__moe_z_loss_coeff=Z_LOSS),
        {"alone", "TP2+SP", "CP2", "DP2", "PP2", "TP2+SP+EP2"},
    ),
    "over all ranks": (
        dict(model__calculate_per_token_loss=False, model__moe_router_load_balancing_type="global_aux_loss"),
        {"alone", "DP2"},
    ),
}


def gradients(split: Split, batches: Iterator[TokenBatch], count: int) -> dict[str, torch.Tensor]:
    split.begin(batches, "padded")
    forward_backward(split.run, split.run.stream, count)
    return split.gradients()


def every_kind(split: Split, kind: str) -> dict[str, dict[str, torch.Tensor]]:
    size = split.run.groups.dp.size()
    if kind == "over all ranks":
        return {"packed": gradients(split, of_two(split), 1)}
    found = {rows: gradients(split, split.batches(CONTENT, rows), MICROBATCHES // size) for rows in ROWS}
    batches = split.batches(CONTENT, "padded")
    if split.run.groups.dp.rank() == 0:
        first = next(batches)
        layout = SequenceLayout.padded_rows([0] * len(first.input_ids), first.input_ids.size(1))
        empty = dataclasses.replace(first, layout=layout, loss_mask=torch.zeros_like(first.loss_mask))
        batches = itertools.chain([empty], batches)
    return found | {EMPTY: gradients(split, batches, MICROBATCHES // size)}


def of_two(split: Split) -> Iterator[TokenBatch]:
    """Return two microbatches joined, or one per data-parallel rank; only the balancing loss counts."""
    rank, size = split.run.groups.dp.rank(), split.run.groups.dp.size()
    samples = [one for microbatch in step_samples(CONTENT, split.hf_config, 0)[rank:2:size] for one in microbatch]
    batch = make_batch(samples, split.hf_config, layout=layout_of(samples, packed=True, multiple=4, tokens=None))
    yield dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))


def errors_of_ranks(folder: Path, expected: dict | None) -> dict:
    """Return errors of every parallel layout on two ranks, or the gradients of one process."""
    alone = {"alone": Topology(1)}
    two = {name: one for name, one in TOPOLOGIES.items() if one.ranks == 2 and "MoE" in one.families}
    found = {}
    for name, topology in (alone if expected is None else two).items():
        if topology.distributed_optimizer:  # which leaves each rank a part of the gradients
            continue
        for kind, (settings, splits) in KINDS.items():
            if splits is not None and name not in splits:
                continue
            for rows, given in every_kind(Split(folder, topology, BALANCE, **settings), kind).items():
                if expected is None:
                    found[kind, rows] = given
                else:
                    found[name, kind, rows] = worst(given, expected[kind, rows])
    return found


pytestmark = pytest.mark.slow

GRADIENT = 2e-5  # relative to the largest entry of each


def test_moe_load_balancing_gradients_on_two_ranks_match_one_process(moe_folder):
    expected = results_of_ranks(errors_of_ranks, 1, moe_folder, None)
    found = results_of_ranks(errors_of_ranks, 2, moe_folder, expected)
    print({case: f"{error:.1e}" for case, error in found.items()})
    assert {name for name, *_ in found} >= {"CP2", "TP2+SP", "PP2", "DP2", "EP2", "TP2+SP+EP2"} & TOPOLOGIES.keys()
    assert {(kind, rows) for _, kind, rows in found} >= {(k, r) for k in list(KINDS)[:2] for r in (*ROWS, EMPTY)}
    assert all(error <= GRADIENT for error in found.values()), found


def test_moe_load_balancing_of_padding_only_gives_zero_router_gradient(moe_folder):
    """Gradients are zero for both kinds of load balancing."""
    from tests.parity.conftest import make_pair

    for kind in ("aux_loss", "global_aux_loss"):
        pair = make_pair(moe_folder, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.5)
        layer = pair.megatron.decoder.layers[-1].mlp
        hidden = torch.randn(6, 1, pair.provider.hidden_size, requires_grad=True)
        probabilities, chosen = layer.router(hidden, padding_mask=torch.ones(6, 1, dtype=torch.bool))
        (probabilities * 0).sum().backward()
        assert chosen.sum() == 6 * pair.provider.moe_router_topk  # they go to experts all the same
        assert torch.equal(layer.router.weight.grad, torch.zeros_like(layer.router.weight))
