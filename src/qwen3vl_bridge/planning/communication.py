"""Communication time of ranks, per token, per patch and per pipeline boundary.

What lives here: bytes per link. Standard library only. What may not: bandwidths of links (`hardware.py`), FLOPs
(`planning/speed/microbatch_flops.py`).

- Tensor and sequence parallelism: a layer gathers and scatters hidden states twice in each direction, and gathers twice
  more in backward (Korthikanti et al., arXiv 2205.05198, section 4.2.2); the tower reduces instead. Ranks that share a
  query group gather queries, keys and values of all.
- Context: keys and values pass through all ranks, in forward once, in backward twice. In linear attention each rank
  exchanges its tokens for heads after the first projection, and back before the last one.
- Experts: tokens to their experts and back, in forward and backward.
- Stages: hidden states, and the DeepStack features of layers after the boundary.
- Separate vision ranks: their output goes to one rank of a replica, through one adapter, and from there to all ranks of
  its first stage; as in megatron-core's bridge between grids.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.weights.dimensions import Dimensions

LINK = 0.5  # fraction of a link's bandwidth


@dataclass(frozen=True)
class Passes:
    """Seconds in a forward and in a backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def both(self) -> float:
        """In a step."""
        return self.forward + self.backward


def link(gpu: Gpu, ranks: int) -> float:
    """Bandwidth in bytes per second between ranks that so many neighbours share."""
    return LINK * (gpu.nvlink_bytes if ranks <= gpu.nvlink_gpus else gpu.network_bytes)


def layer_seconds(chosen: int, n: Dimensions, split: Split, training: Training, gpu: Gpu) -> dict[str, Passes]:
    """Of the mean text layer, for each token of a context-parallel rank, by cause, with `chosen` experts per token."""
    e, layers = training.precision.weight, len(n.indices["text_layers"])
    hidden = n["hidden"] * e
    tensor = (split.tp - 1) / split.tp * hidden / link(gpu, split.tp)
    linear = len(n.indices.get("linear_layers", ())) / layers
    groups = 0.0
    if split.tp > n["kv_heads"]:
        numbers = n.sizes.get("gated_q", n["q"]) + 2 * n["kv"]
        groups = (1 - linear) * (split.tp - 1) / split.tp * numbers * e / link(gpu, split.tp)
    between = link(gpu, split.tp * split.cp)
    keys = (split.cp - 1) * 2 * n["kv"] / split.tp * e / between
    exchanged = 0.0
    if linear:
        numbers = n["l_qkv"] + 2 * n["l_value"] + 2 * n["l_value_heads"]
        exchanged = linear * (split.cp - 1) / split.cp * numbers / split.tp * e / between
    experts = 0.0
    if n.indices["moe_layers"] and split.ep > 1:
        routed = chosen * hidden / split.sequence_ranks * split.expert_tp * (split.ep - 1) / split.ep
        # The time is determined by the traffic that leaves the machine.
        away = max(1 - gpu.nvlink_gpus / (split.ep * split.expert_tp), 0.0)
        moe = len(n.indices["moe_layers"]) / layers * training.expert_load
        experts = moe * routed * ((1 - away) / link(gpu, 1) + away / link(gpu, split.world + gpu.nvlink_gpus))
    return {
        "tensor": Passes(4 * tensor + groups, 6 * tensor + groups),
        "context": Passes((1 - linear) * keys + exchanged, 2 * (1 - linear) * keys + exchanged),
        "experts": Passes(2 * experts, 2 * experts),
    }


def tower_seconds(n: Dimensions, split: Split, training: Training, gpu: Gpu) -> Passes:
    """Of the whole tower, for each patch that a rank encodes."""
    reduced = (split.tp - 1) / split.tp * n["v_hidden"] * training.precision.weight / link(gpu, split.tp)
    once = 4 * len(n.indices["vision_layers"]) * reduced
    return Passes(once, once)


def boundary_seconds(
    n: Dimensions, split: Split, training: Training, gpu: Gpu, begin: int, tokens: float, vision_tokens: float
) -> float:
    """From one pipeline stage to the next, over the network.

    Args:
        n, split, training, gpu: as everywhere.
        begin: the first text layer after the boundary.
        tokens, vision_tokens: of a context-parallel rank's microbatch.
    """
    features = max(len(n.indices["deepstack_mergers"]) - begin, 0) * vision_tokens
    numbers = n["hidden"] * (tokens + features) / split.sequence_ranks
    return numbers * training.precision.weight / (LINK * gpu.network_bytes)


def payload_seconds(n: Dimensions, language: Split, training: Training, gpu: Gpu, vision_tokens: float) -> Passes:
    """From vision ranks to one language replica, and the gradients back.

    Args:
        n, training, gpu: as everywhere.
        language: how the language model is split.
        vision_tokens: of the replica's microbatch.
    """
    nbytes = vision_tokens * payload_numbers(n) * training.precision.weight
    across = nbytes / (LINK * gpu.network_bytes)
    ranks = language.tp * language.cp
    return Passes(across + nbytes * (ranks > 1) / link(gpu, ranks), across)


def payload_numbers(n: Dimensions) -> int:
    """Numbers sent per vision token: its embedding and the DeepStack features."""
    return (1 + len(n.indices["deepstack_mergers"])) * n["hidden"]
