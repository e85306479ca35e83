"""How a model is split over ranks: parallel sizes, the text layers of each pipeline stage, and what has to divide.

The real model has the same checks (`models/refusals.py`, megatron-core), when its configuration is finalised.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from qwen3vl_bridge.models.divisibility import indivisible
from qwen3vl_bridge.weights.rows import Dimensions


@dataclass(frozen=True)
class PipelineChunk:
    """A part of the pipeline: consecutive text layers."""

    stage: int  # its pipeline rank
    layers: range  # indices of its text layers
    pre_process: bool  # it embeds tokens
    post_process: bool  # it has the output layer
    vision: bool = False  # it has the vision tower


@dataclass(frozen=True)
class ModelSplit:
    """Parallel sizes, with Megatron's meaning; a ValueError if they contradict each other."""

    world: int  # number of ranks
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # of experts; None for 1 with expert parallelism and for tp without, as in Megatron-Bridge
    vpp: int | None = None  # chunks of each pipeline rank
    vpp_group: int | None = None  # `microbatch_group_size_per_vp_stage`; None for pp
    sequence_parallel: bool = False  # hidden states are divided over tensor-parallel ranks too
    first_layers: int | None = None  # `num_layers_in_first_pipeline_stage`
    last_layers: int | None = None
    embedding_as_layer: bool = False  # `account_for_embedding_in_pipeline_split`
    loss_as_layer: bool = False
    layout: tuple[tuple[int, ...], ...] | None = None  # text layers of each [pipeline rank][virtual stage]
    vision: bool = True  # the first stage has the vision tower; False if that is on separate ranks (dist-train)

    def __post_init__(self) -> None:
        groups = {"tp * pp * cp": self.tp * self.pp * self.cp}
        if self.ep > 1 or self.etp is not None:  # a dense model has no experts to divide
            groups["etp * ep * pp"] = self.expert_tp * self.ep * self.pp
        for name, group in groups.items():
            if self.world % group:
                raise ValueError(f"{self.world} GPUs, expected a multiple of {name}, which is {group}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel is True with tp 1, expected tp 2 or more: there are no ranks to split the sequence "
                "over"
            )
        if self.pp == 1 and (self.vpp or 1) > 1:
            raise ValueError(f"vpp is {self.vpp} with pp 1, expected None: there are no stages to interleave")

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism of experts."""
        return self.etp or (1 if self.ep > 1 else self.tp)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which train on different rows."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def sequence_ranks(self) -> int:
        """Ranks over which hidden states between the linear layers are divided."""
        return self.tp if self.sequence_parallel else 1

    def microbatches(self, global_batch_size: int | None, micro_batch_size: int) -> int:
        """Microbatches of a step on each data-parallel rank; as many as keep the stages busy if none is given."""
        if global_batch_size is None:
            return self.pp * (self.vpp or 1)
        share = micro_batch_size * self.dp
        if global_batch_size % share or global_batch_size < share:
            raise ValueError(
                f"global_batch_size is {global_batch_size}, expected a multiple of {share}: micro_batch_size times "
                f"{self.dp} data-parallel ranks"
            )
        return global_batch_size // share

    def chunks(self, num_layers: int) -> tuple[tuple[PipelineChunk, ...], ...]:
        """The chunks of each pipeline rank, of a model with so many text layers; a ValueError if that cannot be."""
        counts = self.layout or self._layers_of_chunks(num_layers)
        stages: list[list[PipelineChunk]] = [[] for _ in range(self.pp)]
        vp_stages, begin = len(counts[0]), 0
        for vp_stage, stage in itertools.product(range(vp_stages), range(self.pp)):
            layers = range(begin, begin + counts[stage][vp_stage])
            first, last = stage == vp_stage == 0, (stage, vp_stage) == (self.pp - 1, vp_stages - 1)
            stages[stage].append(PipelineChunk(stage, layers, first, last, first and self.vision))
            begin = layers.stop
        return tuple(map(tuple, stages))

    def _layers_of_chunks(self, num_layers: int) -> list[list[int]]:
        """Text layers of each [pipeline rank][virtual stage]."""
        pp, vpp = self.pp, self.vpp or 1
        fixed = {0: self.first_layers, pp - 1: self.last_layers}
        fixed = {stage: count for stage, count in fixed.items() if count is not None}
        remaining = num_layers - sum(fixed.values()) + self.embedding_as_layer + self.loss_as_layer
        free = pp - len(fixed)
        each, rest = divmod(remaining, free) if free else (0, remaining)
        if rest or each < 0:
            raise ValueError(
                f"{remaining} layers for {free} pipeline stages, expected a multiple of the stages; or uneven stages: "
                "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage, "
                "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split"
            )
        stages = [fixed.get(stage, each) for stage in range(pp)]
        for stage, count in enumerate(stages):
            if count % vpp:
                raise ValueError(f"pipeline stage {stage} has {count} layers, expected a multiple of vpp, {vpp}")
        counts = [[count // vpp] * vpp for count in stages]
        counts[0][0] -= self.embedding_as_layer
        counts[-1][-1] -= self.loss_as_layer
        return counts

    def check(self, dims: Dimensions) -> None:
        """Refuse (ValueError) a model that cannot be split this way; its size "vocab" includes padding."""
        _refuse_indivisible(
            dims, tp=self.tp, cp=self.cp, ep=self.ep, etp=self.expert_tp, vision_tp=self.tp if self.vision else 1
        )
        has_experts = bool(dims.indices["moe_layers"])
        if not has_experts and (self.ep > 1 or self.expert_tp not in (1, self.tp)):
            raise ValueError(f"ep is {self.ep} and etp {self.etp}, expected neither: this model has no experts")
        if self.tp > 1 and not self.sequence_parallel:
            if has_experts:
                raise ValueError(
                    f"sequence_parallel is False with experts under tp {self.tp}, expected True: megatron-core cannot "
                    "train experts otherwise"
                )
            if dims.indices.get("linear_layers"):
                raise ValueError(
                    f"sequence_parallel is False with linear attention under tp {self.tp}, expected True: otherwise "
                    "megatron-core does not sum the gradients of its output norm over the ranks"
                )
        self.chunks(len(dims.indices["text_layers"]))

    def check_vision(self, dims: Dimensions) -> None:
        """Refuse (ValueError) a vision tower that cannot be split this way; nothing else is checked."""
        _refuse_indivisible(dims, tp=1, vision_tp=self.tp)


def _refuse_indivisible(dims: Dimensions, **sizes: int) -> None:
    for setting, size, split, ranks, either in indivisible(dims, **sizes):
        multiple = "multiple or divisor" if either else "multiple"
        raise ValueError(f"{setting} is {size}, expected a {multiple} of {split.removesuffix(' of vision')}, {ranks}")
