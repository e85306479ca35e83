"""Parallel sizes of a run, the text layers of each pipeline stage, and checks that they can divide a model.

A run makes the same checks when its model configuration is finalized (`config/model_validation.py`, megatron-core),
which the planner does not import.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.config.divisibility import exchanges_states, indivisible_sizes
from qwen3vl_bridge.weights.rows import Dimensions


@dataclass(frozen=True)
class PipelineChunk:
    """One model chunk of a pipeline stage: its text layers, and which other components it has."""

    stage: int  # pipeline rank
    layers: range  # indices of the text layers
    pre_process: bool  # the chunk has the embedding
    post_process: bool  # the chunk has the output layer
    vision: bool = False  # the chunk has the vision tower


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes of a run, as Megatron defines them.

    Raises:
        ValueError: The sizes contradict each other or do not divide the number of ranks.
    """

    world: int  # number of ranks
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # None: 1 with expert parallelism and tp without, as in Megatron-Bridge
    vpp: int | None = None  # model chunks of each pipeline rank
    vpp_group: int | None = None  # `microbatch_group_size_per_vp_stage`; None for pp
    sequence_parallel: bool = False
    first_layers: int | None = None  # `num_layers_in_first_pipeline_stage`
    last_layers: int | None = None  # `num_layers_in_last_pipeline_stage`
    embedding_as_layer: bool = False  # `account_for_embedding_in_pipeline_split`
    loss_as_layer: bool = False  # `account_for_loss_in_pipeline_split`
    # `pipeline_model_parallel_layout`, as numbers of text layers by [pipeline rank][virtual stage].
    pipeline_layout: tuple[tuple[int, ...], ...] | None = None
    linear_cp_mode: str | None = None  # `linear_cp_mode` of the model
    vision: bool = True  # the first stage has the vision tower; False with separate vision ranks (dist-train)

    def __post_init__(self) -> None:
        groups = {"tp * pp * cp": self.tp * self.pp * self.cp}
        if self.ep > 1 or self.etp is not None:  # a dense model has no expert-parallel groups
            groups["etp * ep * pp"] = self.expert_tp * self.ep * self.pp
        for name, group in groups.items():
            if self.world % group:
                raise ValueError(f"there are {self.world} GPUs, expected a multiple of {name}, which is {group}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel is True and tp is 1, expected tp 2 or more, or sequence_parallel False")
        if self.pp == 1 and (self.vpp or 1) > 1:
            raise ValueError(f"vpp is {self.vpp} and pp is 1, expected vpp None: only pipeline stages are interleaved")

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of experts."""
        return self.etp or (1 if self.ep > 1 else self.tp)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def sequence_ranks(self) -> int:
        """Number of tensor-parallel ranks that share tokens by sequence parallelism; 1 without it."""
        return self.tp if self.sequence_parallel else 1

    def num_microbatches(self, global_batch_size: int | None, micro_batch_size: int) -> int:
        """Return the number of microbatches in a step on each data-parallel rank.

        If `global_batch_size` is None, return the number that keeps all pipeline stages busy.
        """
        if global_batch_size is None:
            return self.pp * (self.vpp or 1)
        rows = micro_batch_size * self.dp
        if global_batch_size % rows or global_batch_size < rows:
            raise ValueError(
                f"global_batch_size is {global_batch_size}, expected a multiple of {rows}: micro_batch_size times "
                f"{self.dp} data-parallel ranks"
            )
        return global_batch_size // rows

    def chunks(self, num_layers: int) -> tuple[tuple[PipelineChunk, ...], ...]:
        """Return the model chunks of each pipeline rank, for a model with `num_layers` text layers.

        Raises:
            ValueError: The layers cannot be divided over the stages.
        """
        counts = self.pipeline_layout or self._layers_per_chunk(num_layers)
        stages: list[list[PipelineChunk]] = [[] for _ in range(self.pp)]
        vp_stages, begin = len(counts[0]), 0
        for vp_stage, stage in itertools.product(range(vp_stages), range(self.pp)):
            layers = range(begin, begin + counts[stage][vp_stage])
            first, last = stage == vp_stage == 0, (stage, vp_stage) == (self.pp - 1, vp_stages - 1)
            stages[stage].append(PipelineChunk(stage, layers, first, last, first and self.vision))
            begin = layers.stop
        return tuple(map(tuple, stages))

    def _layers_per_chunk(self, num_layers: int) -> list[list[int]]:
        """Return the number of text layers in each model chunk, as a list [pipeline rank][virtual stage]."""
        pp, vpp = self.pp, self.vpp or 1
        fixed = {0: self.first_layers, pp - 1: self.last_layers}
        fixed = {stage: count for stage, count in fixed.items() if count is not None}
        remaining = num_layers - sum(fixed.values()) + self.embedding_as_layer + self.loss_as_layer
        free = pp - len(fixed)
        per_stage, rest = divmod(remaining, free) if free else (0, remaining)
        if rest or per_stage < 0:
            raise ValueError(
                f"{remaining} layers cannot be divided evenly over {free} pipeline stages: change the number of "
                "stages, or set num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage, "
                "account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split"
            )
        stages = [fixed.get(stage, per_stage) for stage in range(pp)]
        for stage, count in enumerate(stages):
            if count % vpp:
                raise ValueError(f"pipeline stage {stage} has {count} layers, expected a multiple of vpp, {vpp}")
        counts = [[count // vpp] * vpp for count in stages]
        counts[0][0] -= self.embedding_as_layer
        counts[-1][-1] -= self.loss_as_layer
        return counts

    def check(self, dims: Dimensions) -> None:
        """Raise ValueError if a model cannot be trained with this layout. `dims["vocab"]` must include padding."""
        _check_divisible(
            dims, tp=self.tp, cp=self.cp, ep=self.ep, etp=self.expert_tp, vision_tp=self.tp if self.vision else 1,
            linear_mode=self.linear_cp_mode,
        )  # fmt: skip
        has_experts = bool(dims.indices["moe_layers"])
        if not has_experts and (self.ep > 1 or self.expert_tp not in (1, self.tp)):
            raise ValueError(f"ep is {self.ep} and etp {self.etp}, expected 1 and None: this model has no experts")
        if self.tp > 1 and not self.sequence_parallel:
            if has_experts:
                raise ValueError(
                    f"sequence_parallel is False with experts and tp {self.tp}, expected True: megatron-core cannot "
                    "train experts otherwise"
                )
            if dims.indices.get("linear_layers"):
                raise ValueError(
                    f"sequence_parallel is False with linear attention and tp {self.tp}, expected True: otherwise "
                    "megatron-core does not sum the gradients of its output norm over the ranks"
                )
        self.chunks(len(dims.indices["text_layers"]))

    def exchanges_states(self, dims: Dimensions) -> bool:
        """Return whether context-parallel ranks exchange states of linear attention ("chunkwise") instead of tokens."""
        return exchanges_states(dims, self.linear_cp_mode, self.tp, self.cp)

    def check_vision(self, dims: Dimensions) -> None:
        """Raise ValueError if the vision tower cannot be divided over separate vision ranks with this layout."""
        _check_divisible(dims, tp=1, vision_tp=self.tp)


def _check_divisible(dims: Dimensions, **sizes: Any) -> None:
    for setting, size, parallel_size, ranks, either in indivisible_sizes(dims, **sizes):
        multiple = "multiple or divisor" if either else "multiple"
        name = parallel_size.removesuffix(" of vision")
        raise ValueError(f"{setting} is {size}, expected a {multiple} of {name}, {ranks}")
