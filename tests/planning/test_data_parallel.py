"""Time between replicas, restated: a ring that is played step by step, published rates, and orders of known runs."""

from __future__ import annotations

from dataclasses import replace

from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.communication import Passes
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.planning.settings import BF16, FP32, Lora, Sharding, Training
from qwen3vl_bridge.planning.speed.data_parallel import data_seconds, ring_seconds
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.model_parts import Part

import pytest

H100, GB200 = GPUS["H100"], GPUS["GB200"]
NOTHING = Passes()
LONG = Passes(1e9, 1e9)


def played(nbytes: float, ranks: int, apart: int, per_node: int, nvlink: float, adapter: float) -> float:
    """A reduce-scatter, piece by piece.

    Each rank has as many pieces as there are ranks, and passes one on in each of N - 1 turns. Of several rings at once
    each has its share of the bytes, and leaves the node at another GPU, so by another adapter.
    """
    nodes = [rank * apart // per_node for rank in range(ranks)]
    rings = nodes.count(nodes[0])  # as many as the group has GPUs in a node
    slowest = 0.0
    for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        piece = nbytes / rings / ranks
        # Within a node all rings share each GPU's NVLink.
        slowest = max(slowest, piece * rings / nvlink if one == other else piece / adapter)
    return (ranks - 1) * slowest


@pytest.mark.parametrize("apart", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_a_ring_that_is_played(ranks, apart):
    expected = played(64e9, ranks, apart, 8, 0.8 * 450e9, 0.8 * 50e9)
    assert ring_seconds(64e9, ranks, apart, H100) == pytest.approx(expected)


def test_one_rank_has_nothing_to_send():
    assert ring_seconds(64e9, 1, 1, H100) == 0


def test_published_bandwidth():
    """https://github.com/NVIDIA/nccl/issues/1229: what nccl-tests calls the bus bandwidth, on nodes of eight H100 with
    an adapter of 400 Gb/s each: bytes times (N - 1) / N over the time.
    """
    published = {4: 360, 8: 345, 16: 320, 32: 300, 64: 280, 128: 260}
    for nodes, measured in published.items():
        ranks = 8 * nodes
        ours = 8e9 * (ranks - 1) / ranks / ring_seconds(8e9, ranks, 1, H100) / 1e9
        assert 0.85 < ours / measured < 1.25, nodes
    assert ours == pytest.approx(320)


def test_a_rack_of_nvlink_has_no_network_in_it():
    assert ring_seconds(1e9, 72, 1, GB200) == pytest.approx(71 / 72 * 1e9 / (0.8 * 900e9))
    assert ring_seconds(1e9, 64, 2, GB200) == pytest.approx(63 / 64 * 1e9 / (0.8 * min(900e9, 36 * 50e9)))


class TestAStep:
    """Of 2B on four nodes, counted by hand: every parameter, its bytes, and where they go."""

    N = presets.parameter_count("2B")
    RATE = 0.8 * 400e9 * 32 / 31

    def seconds(self, work=NOTHING, microbatches=3, **training):
        split = Split(32)
        return data_seconds(
            dimensions_of(presets.config_dict("2B")), split, Training(**training), microbatches, H100, work
        )

    @pytest.mark.parametrize(
        ("training", "nbytes"),
        [
            (dict(), 4 + 2),  # gradients once, weights once
            (dict(precision=FP32), 4 + 4),
            (dict(sharding=Sharding.NONE), 2 * 4),  # reduced whole, which is scattered and gathered
            (dict(sharding=Sharding.GRADIENTS), 3 * 4 + 2),  # every microbatch's
            (dict(sharding=Sharding.ALL), 3 * (2 + 2 + 4)),
            (dict(sharding=Sharding.ALL, precision=replace(BF16, fsdp_gradient=None)), 3 * (2 + 2 + 2)),
            (dict(lora=Lora(8)), 0),
            (dict(lora=Lora(8), sharding=Sharding.ALL), 3 * (2 + 2)),
        ],
    )
    def test_bytes(self, training, nbytes):
        assert self.seconds(**training) == pytest.approx(nbytes * self.N / self.RATE)

    def test_what_is_frozen_is_not_sent(self):
        whole, part = self.seconds(), self.seconds(frozen=frozenset({Part.LANGUAGE_MODEL}))
        assert 0 < part < 0.3 * whole

    def test_work_hides_it(self):
        """Gradients behind the last backward pass, weights behind the first forward one; each what it can."""
        gradients, weights = (each * self.N / self.RATE for each in (4, 2))
        assert self.seconds(LONG) == 0
        assert self.seconds(Passes(0, gradients / 2)) == pytest.approx(gradients / 2 + weights)
        assert self.seconds(Passes(weights / 2, 0)) == pytest.approx(gradients + weights / 2)
        assert self.seconds(Passes(2 * weights, 0)) == pytest.approx(gradients)
        apart = dict(overlap_grad_reduce=False, overlap_param_gather=False)
        assert self.seconds(LONG, **apart) == self.seconds()
        assert self.seconds(LONG, overlap_grad_reduce=False) == pytest.approx(gradients)

    def test_every_microbatch_of_zero_3_hides_its_own(self):
        half = Passes(self.N / self.RATE, 0)  # half of the weights
        expected = 3 * (1 + 2 + 4) * self.N / self.RATE
        assert self.seconds(half, sharding=Sharding.ALL) == pytest.approx(expected)


def test_experts_have_a_group_of_their_own():
    """30B-A3B on 16 with EP 8: two copies of an expert, one in each node, for each of them one adapter."""
    n = dimensions_of(presets.config_dict("30B-A3B"))
    experts = 48 * 128 * 3 * n["hidden"] * n["moe_ffn"]
    shared = presets.parameter_count("30B-A3B") - experts
    found = data_seconds(n, Split(16, ep=8, etp=1), Training(), 1, H100, NOTHING)
    expected = 6 * (shared * 15 / 16 / (0.8 * 400e9) + experts / 8 / 2 / (0.8 * 50e9))
    assert found == pytest.approx(expected, rel=1e-3)


def test_tensor_parallel_groups_share_a_nodes_adapters():
    """With TP 8 a group has one GPU in a node, and so one adapter; its bytes are an eighth."""
    n = dimensions_of(presets.config_dict("32B"))
    one, eight = (
        data_seconds(n, Split(16, tp=tp, sequence_parallel=tp > 1), Training(), 1, H100, NOTHING) for tp in (1, 8)
    )
    assert eight / one == pytest.approx((1 / 2) / 8 / (15 / 16) * 8, rel=0.02)
