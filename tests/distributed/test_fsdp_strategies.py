"""Megatron-FSDP trains as replicated data parallelism does, with every sharding strategy, over several optimizer steps.

Each step accumulates gradients over several microbatches. Would have caught these defects reported for Megatron-LM:
updates that are too small (5976, 6357), and gradients doubled in each microbatch of a rank that holds a buffer alone
(6660).
"""

from pathlib import Path

import pytest

from tests.helpers.forked import results_of_ranks
from tests.helpers.steps import train_step
from tests.parity.on_ranks import Split
from tests.parity.topologies import TOPOLOGIES, Topology

STEPS, CONTENT, ROWS = 4, "mixed", "packed"
ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# Relative, of losses and gradient norms. A later loss depends on all weights. Measured: at most 2e-7.
TOLERANCE = 2e-6
ALONE = {"one rank": Topology(1)}

type Steps = list[tuple[float, float]]


def train(folder: Path, topology: Topology, strategy: str | None) -> Steps:
    """Return loss and gradient norm of each step; a strategy of None is replicated data parallelism."""
    settings = {}
    if strategy is not None:
        settings = dict(
            ddp__use_megatron_fsdp=True, dist__use_megatron_fsdp=True, ddp__data_parallel_sharding_strategy=strategy,
            ddp__use_distributed_optimizer=True, optimizer__use_distributed_optimizer=True,
            checkpoint__ckpt_format="fsdp_dtensor",
        )  # fmt: skip
    split = Split(folder, topology, **settings)
    sharded = type(split.run.model[0]).__name__ == "FullyShardedDataParallel"
    assert sharded == (strategy is not None)
    split.run.stream = split.batches(CONTENT, ROWS, STEPS)
    logs = [train_step(split.run) for _ in range(STEPS)]
    return [(log["loss"], log["grad_norm"]) for log in logs]


def train_all(folder: Path, topology: Topology, strategies: tuple[str, ...]) -> tuple[Steps, dict[str, Steps]]:
    found = {strategy: train(folder, topology, strategy) for strategy in strategies}
    return train(folder, topology, None), found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "strategies"), [
    ("untied", "DP2", ALL), ("tied", "DP2", ALL[-1:]), ("moe", "one rank", ALL[-1:]), ("moe", "TP2+SP+EP2", ALL[1:]),
    # With other strategies megatron-core 0.19 cannot cut these tiny widths into rows and fails before the first step.
    ("moe", "EP2", ALL[-1:]),
])  # fmt: skip
def test_fsdp_sharding_strategy_matches_replicated_data_parallel_training(kind, name, strategies, request):
    topology, folder = (TOPOLOGIES | ALONE)[name], request.getfixturevalue(f"{kind}_folder")
    expected, found = results_of_ranks(train_all, topology.ranks, folder, topology, strategies)
    errors = {
        strategy: max(
            abs(value / right - 1)
            for step, replicated in zip(steps, expected, strict=True)
            for value, right in zip(step, replicated, strict=True)
        )
        for strategy, steps in found.items()
    }
    print(name, {strategy: f"{error:.1e}" for strategy, error in errors.items()})
    assert max(errors.values()) <= TOLERANCE, errors
    assert len({loss for loss, _ in expected}) == STEPS  # the weights change
