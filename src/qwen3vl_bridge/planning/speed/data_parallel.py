"""Time of exchanging gradients and weights between data-parallel ranks, and the part of it that is not overlapped.

What lives here: bytes between replicas, over which links, and the overlapped part. Standard library only. What may not:
bandwidths of links (`planning/hardware.py`), communication within a replica (`planning/communication.py`).

- Bytes: the distributed optimizer reduces and scatters gradients, then gathers weights (ZeRO, Rajbhandari et al., arXiv
  1910.02054, section 7); without it gradients are all-reduced; under ZeRO-3 weights are gathered in both passes of
  every microbatch, and gradients scattered in the second.
- A ring over N ranks takes (N - 1) / N of the bytes over each link to scatter or to gather, and twice that for an
  all-reduce (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009; nccl-tests' doc/PERFORMANCE.md).
- Links: each GPU has its own adapter (DGX H100: eight of 400 Gb/s). A ring goes through a node's GPUs by NVLink and
  leaves by one adapter; there are as many rings at once as the group has GPUs in a node. Ranks are ordered as in
  megatron-core: tensor, context, expert, data, and pipeline parallelism last.
- Bandwidth: 0.8 of the slower link. Bus bandwidths of a reduce-scatter on H100, of 400 GB/s: 360 on 4 nodes, 345 on 8,
  320 on 16, 300 on 32, 280 on 64, 260 on 128 (https://github.com/NVIDIA/nccl/issues/1229).
- Overlap: gradients are sent during the last microbatch's backward pass, weights during the first one's forward pass
  (`overlap_grad_reduce`, `overlap_param_gather`); under ZeRO-3 during every pass. The rest is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwen3vl_bridge.planning.communication import Passes
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.memory.parameters import Count, held_and_trained
from qwen3vl_bridge.planning.settings import Sharding, Training
from qwen3vl_bridge.planning.split import Chunk, Split
from qwen3vl_bridge.weights.dimensions import Dimensions

RING = 0.8  # of the slowest link's bandwidth


def ring_seconds(nbytes: float, ranks: int, apart: int, gpu: Gpu) -> float:
    """Time to scatter or to gather a number of bytes in total.

    Args:
        nbytes: that each rank has before a scatter, or after a gather.
        ranks: of the group.
        apart: distance between neighbours of the group, in ranks.
        gpu: the kind of GPU.
    """
    if ranks == 1:
        return 0.0
    inside = min(ranks, max(gpu.nvlink_gpus // apart, 1))
    rate = gpu.nvlink_bytes if inside == ranks else min(gpu.nvlink_bytes, inside * gpu.network_bytes)
    return (ranks - 1) / ranks * nbytes / (RING * rate)


def data_seconds(n: Dimensions, split: Split, training: Training, microbatches: int, gpu: Gpu, work: Passes) -> float:
    """Seconds that a step waits for its replicas' gradients and weights, in the stage with the longest wait.

    Args:
        n, split, training, gpu: as everywhere.
        microbatches: of a step.
        work: seconds of a microbatch's passes, which can overlap with communication.
    """
    stages = split.chunks(len(n.indices["text_layers"]))
    # Stages between the second and the last have the same number.
    ends = {stage: stages[stage] for stage in (0, min(1, split.pp - 1), split.pp - 1)}.values()
    return max(stage_data_seconds(n, split, chunks, training, microbatches, gpu, work) for chunks in ends)


def stage_data_seconds(
    n: Dimensions,
    split: Split,
    chunks: Sequence[Chunk],
    training: Training,
    microbatches: int,
    gpu: Gpu,
    work: Passes,
) -> float:
    """Like `data_seconds`, for a stage with these chunks."""
    sent = _sent(*held_and_trained(n, split, chunks, training), split, training, gpu)
    every_pass = training.sharding is Sharding.ALL
    scattered = training.sharding in (Sharding.GRADIENTS, Sharding.ALL)
    forward = max(sent.forward - work.forward * training.overlap_param_gather, 0.0)
    backward = max(sent.backward - work.backward * training.overlap_grad_reduce, 0.0)
    return forward * (microbatches if every_pass else 1) + backward * (microbatches if scattered else 1)


def _sent(held: Count, trained: Count, split: Split, training: Training, gpu: Gpu) -> Passes:
    """Seconds of one exchange, in a forward and in a backward pass. Adapters are small, and not counted."""
    gradient, _ = training.precision.under(training.sharding)
    weight = training.precision.weight

    def ring(count: Count, each: int) -> float:
        shared = ring_seconds(count.shared * each, split.replicas, split.tp, gpu)
        return shared + ring_seconds(count.experts * each, split.expert_replicas, split.expert_tp * split.ep, gpu)

    if training.sharding is Sharding.NONE:
        return Passes(backward=2 * ring(trained, gradient))
    if training.sharding is Sharding.ALL:
        return Passes(ring(held, weight), ring(held, weight) + ring(trained, gradient))
    return Passes(ring(trained, weight), ring(trained, gradient))
