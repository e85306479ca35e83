"""Separate vision ranks (dist-train): the sizes of both modules, and the memory of each rank.

What lives here: sizes, Megatron-Bridge's names for them, checks, memory. Standard library only. What may not: the
number of vision ranks (`encoder_sizing.py`), seconds.

The first ranks are the tower's: tensor- and data-parallel, without pipeline parallelism. For the language model's
pipeline they are one additional stage at the front, so that they hold one microbatch more than its first stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwen3vl_bridge.parallel.encoder_replicas import Replicas
from qwen3vl_bridge.planning.memory.estimate import (
    FIXED_RESERVE,
    FRAGMENTED,
    Estimate,
    StageEstimate,
    check,
    estimate_of,
)
from qwen3vl_bridge.planning.memory.microbatch_activations import Work, chunk_activations
from qwen3vl_bridge.planning.memory.model_states import stage_states
from qwen3vl_bridge.planning.settings import Sharding, Training
from qwen3vl_bridge.planning.split import Chunk, Split
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.dimensions import Dimensions

VISION_STAGE = -1
TOWER = Chunk(VISION_STAGE, 0, range(0), first=False, last=False, tower=True)


def check_family(n: Dimensions) -> None:
    """Check that the model supports separate vision ranks; raises ValueError if it does not."""
    if not family(n.family).dist_train:
        raise ValueError(
            f"the family {n.family} does not support separate vision ranks, expected it on the language model's ranks"
        )


@dataclass(frozen=True)
class DistSplit:
    """Both modules' ranks.

    Attributes:
        vision: tensor parallelism, and data parallelism of the remaining ranks.
        language: all other ranks, `Split.tower` False.
    """

    vision: Split
    language: Split

    @classmethod
    def of(cls, vision: int, vision_tp: int, language: Split) -> DistSplit:
        """A number of vision ranks in addition to a language model's.

        Raises:
            ValueError: sizes that do not divide.
        """
        return cls(Split(vision, tp=vision_tp), replace(language, tower=False))

    @property
    def world(self) -> int:
        """All ranks."""
        return self.vision.world + self.language.world

    @property
    def replicas(self) -> Replicas:
        """Numbers of data-parallel replicas of both modules."""
        return Replicas(self.vision.dp, self.language.dp)

    def settings(self) -> dict[str, bool | int | None]:
        """The fields of `cfg.model.dist_train`. The ratio is an integer there, so it is None below 1."""
        return {
            "use_dist_train": True,
            "vision_world_size": self.vision.world,
            "language_world_size": self.language.world,
            "vision_tensor_model_parallel_size": self.vision.tp,
            "vision_pipeline_model_parallel_size": 1,
            "vision_context_parallel_size": 1,
            "vision_to_llm_dp_ratio": self.replicas.ratio,
        }

    def check(self, n: Dimensions, training: Training) -> None:
        """Check that a model can be trained this way.

        Raises:
            ValueError: it cannot; the message says why.
        """
        check_family(n)
        self.replicas.check()
        if self.language.cp > 1 or (self.language.vpp or 1) > 1:
            raise ValueError(
                f"cp is {self.language.cp} and vpp {self.language.vpp}, expected neither with vision on ranks of its "
                "own: megatron-core's schedule for two modules supports neither context parallelism nor interleaved "
                "stages"
            )
        if training.sharding in (Sharding.GRADIENTS, Sharding.ALL):
            raise ValueError(f"sharding is {training.sharding.value}, expected the distributed optimizer or none with "
                             "separate vision ranks: Megatron-FSDP does not support pipeline stages")  # fmt: skip
        self.vision.check_tower(n)
        check(n, self.language, training)


def dist_microbatches(split: DistSplit, training: Training) -> int:
    """Microbatches of a step; the number of stages if no batch size is given."""
    if training.global_batch_size is None:
        return split.language.pp + 1
    return split.language.microbatches(training.global_batch_size, training.micro_batch_size)


def dist_estimate(n: Dimensions, split: DistSplit, training: Training, chosen: int) -> Estimate:
    """The memory of both kinds of ranks: the tower's as stage -1, before the language model's.

    Args:
        n: the model's dimensions.
        split: its ranks.
        training: rows, precision, what is trained, recomputation.
        chosen: experts per token.

    Raises:
        ValueError: the model cannot be trained this way.
    """
    split.check(n, training)
    rows = dist_microbatches(split, training) * split.language.dp * training.micro_batch_size
    language = estimate_of(n, split.language, replace(training, global_batch_size=rows), chosen)
    stages = (_tower(n, split, training), *language.stages)
    return replace(language, training=training, stages=stages, dist=split.vision)


def _tower(n: Dimensions, split: DistSplit, training: Training) -> StageEstimate:
    """Of a vision rank. Images are assumed to be divided evenly, as everywhere in the planner."""
    share = Work.of(n, split.language, training)
    most = split.replicas.language_per_encoder / split.replicas.encoders
    joined = n["v_merged"] // n["v_hidden"]
    work = Work(0, max(share.patches * most, joined), share.vision_tokens * most)
    found = chunk_activations(n, split.vision, training, TOWER, work=work)
    count = min(split.language.pp + 1, dist_microbatches(split, training))
    activations = {name: count * value for name, value in found.kept.items()}
    reserve = FIXED_RESERVE + FRAGMENTED * (sum(activations.values()) + found.passing)
    states = stage_states(n, split.vision, (TOWER,), training)
    return StageEstimate(VISION_STAGE, 0, states, activations, (count,), found.passing, reserve)
