"""Seconds of a microbatch in each pipeline stage and in the vision tower, forward and backward.

What lives here: FLOPs at a fixed fraction of the peak, plus communication within a stage. Standard library only. What
may not: communication between stages (`planning/communication.py`), their order (`planning/encoder_sizing.py`), memory.

As in `step_time.py` nothing overlaps here, and kernels all reach the same fraction of the peak. The times order ways to
train; they do not predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwen3vl_bridge.planning.communication import Passes, layer_seconds, tower_seconds
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.speed.microbatch_flops import (
    Costs,
    Line,
    Operations,
    language_operations,
    tower_operations,
)
from qwen3vl_bridge.planning.speed.step_time import REACHED
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.weights.dimensions import Dimensions


@dataclass(frozen=True)
class Pace:
    """Seconds for each token or patch, and for each pair.

    Attributes:
        forward, backward: of the passes; recomputation belongs to the backward pass.
    """

    forward: Line
    backward: Line

    @property
    def both(self) -> Line:
        """In a step."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Mix:
    """Contents of rows.

    Attributes:
        patches: per token of a full row: the mean, or a percentile of rows.
        frame: patches of the frame that contains a patch, on average over patches.
        sample: tokens of the sample that contains a token, on average over tokens.
        largest: patches of a row's largest frame, on average over rows.
    """

    patches: float
    frame: float
    sample: float
    largest: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} of the mix is {value}, expected more than 0")


# Rows of 8,192 tokens of the mix in docs/packing.md, with `max_patches` at 1.15 times their mean.
PUBLISHED = Mix(patches=2.85, frame=3470, sample=2400, largest=5200)


@dataclass(frozen=True)
class Contents:
    """Contents of one microbatch of a data-parallel replica.

    Attributes:
        tokens: including padding.
        token_pairs: sum over samples of the squared number of tokens.
        patches: of all images and videos.
        patch_pairs: sum over frames of the squared number of patches.
    """

    tokens: float
    token_pairs: float
    patches: float
    patch_pairs: float

    @classmethod
    def of(cls, training: Training, mix: Mix) -> Contents:
        """Of full rows of a mix."""
        tokens = training.micro_batch_size * training.seq_length
        patches = mix.patches * tokens
        if training.max_patches is not None:
            patches = min(patches, training.micro_batch_size * training.max_patches)
        return cls(tokens, tokens * min(mix.sample, training.seq_length), patches, patches * mix.frame)


def language_paces(costs: Costs, n: Dimensions, split: Split, training: Training, gpu: Gpu) -> list[Pace]:
    """Of each pipeline stage without the tower, for the tokens of a whole microbatch.

    Args:
        costs: the model's.
        n: its dimensions.
        split: tensor- and context-parallel ranks share a stage.
        training: what is trained and recomputed.
        gpu: the kind of GPU.
    """
    ranks = split.tp * split.cp
    sent = layer_seconds(costs.chosen, n, split, training, gpu).values()
    forward, backward = (sum(getattr(one, way) for one in sent) / split.cp for way in ("forward", "backward"))
    found = []
    stages = split.chunks(len(n.indices["text_layers"]))
    for chunks, one in zip(stages, language_operations(costs, n, split, training), strict=True):
        layers = sum(len(chunk.layers) for chunk in chunks) + (chunks[-1].last and training.trains_mtp)
        found.append(_pace(one, ranks, gpu, forward * layers, backward * layers))
    return found


def mean_passes(paces: Sequence[Pace], row: Contents) -> Passes:
    """Seconds of a microbatch on average of stages."""
    ways = ([getattr(one, way).of(row.tokens, row.token_pairs) for one in paces] for way in ("forward", "backward"))
    return Passes(*(sum(way) / len(paces) for way in ways))


def tower_pace(costs: Costs, n: Dimensions, split: Split, training: Training, gpu: Gpu) -> Pace:
    """Of the tower, for the patches that one tensor-parallel group encodes."""
    operations, sent = tower_operations(costs, training), tower_seconds(n, split, training, gpu)
    # If nothing of it is trained, no gradients are sent.
    return _pace(operations, split.tp, gpu, sent.forward, sent.backward if operations.backward.each else 0.0)


def _pace(operations: Operations, ranks: int, gpu: Gpu, forward: float, backward: float) -> Pace:
    second = 1 / (REACHED * gpu.bf16_flops * ranks)
    behind = operations.backward + operations.again
    return Pace(operations.forward * second + Line(forward), behind * second + Line(backward))
