"""How a model is split over ranks, in plain numbers.

What lives here: the sizes, the text layers of each pipeline stage, and checks. What may not: bytes. The real model has
the same checks (`models/common/settings/parallelism.py`, megatron-core), when its configuration is finalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qwen3vl_bridge.weights.dimensions import Dimensions


@dataclass(frozen=True)
class Chunk:
    """A part of the pipeline: consecutive text layers.

    Attributes:
        stage: its pipeline rank.
        number: index of its virtual stage.
        layers: indices of its text layers.
        first: it embeds tokens.
        last: it has the output layer.
        tower: it has the vision tower.
    """

    stage: int
    number: int
    layers: range
    first: bool
    last: bool
    tower: bool = False


@dataclass(frozen=True)
class Split:
    """Parallel sizes, with Megatron's meaning.

    Attributes:
        world: number of ranks.
        tp, cp, pp, ep: tensor, context, pipeline and expert parallelism.
        vpp: chunks of each pipeline rank, or None.
        vpp_group: `microbatch_group_size_per_vp_stage`; None for pp.
        etp: tensor parallelism of experts; None for 1 with expert parallelism and for tp without, as in
            Megatron-Bridge.
        sequence_parallel: hidden states are divided over tensor-parallel ranks too.
        first_layers, last_layers: `num_layers_in_first_pipeline_stage` and `..._last_...`.
        embedding_as_layer, loss_as_layer: `account_for_embedding_in_pipeline_split` and `account_for_loss_...`.
        layout: text layers of each [pipeline rank][virtual stage], of a `pipeline_model_parallel_layout`, or None.
        tower: the first stage has the vision tower; False if it is on separate ranks (`encoder_ranks.py`).

    Raises:
        ValueError: a size below 1; a number of ranks that is not a multiple of tp * pp * cp or etp * ep * pp; sequence
            parallelism with tp 1, or virtual stages with pp 1.
    """

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    vpp_group: int | None = None
    sequence_parallel: bool = False
    first_layers: int | None = None
    last_layers: int | None = None
    embedding_as_layer: bool = False
    loss_as_layer: bool = False
    layout: tuple[tuple[int, ...], ...] | None = None
    tower: bool = True

    def __post_init__(self) -> None:
        for name in ("world", "tp", "pp", "cp", "ep", "etp", "vpp"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}, expected 1 or more")
        for name, group in (("tp * pp * cp", self.tp * self.pp * self.cp), ("etp * ep * pp", self._expert_ranks)):
            if self.world % group:
                raise ValueError(f"{self.world} GPUs, expected a multiple of {name}, which is {group}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel is True with tp 1, expected tp 2 or more: there are no ranks to split "
                "the sequence over"
            )
        if self.pp == 1 and (self.vpp or 1) > 1:
            raise ValueError(f"vpp is {self.vpp} with pp 1, expected None: there are no stages to interleave")

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism of experts."""
        return self.etp or (1 if self.ep > 1 else self.tp)

    @property
    def _expert_ranks(self) -> int:
        # A dense model has no experts, and its ranks need not be a multiple of their sizes.
        return self.pp * (self.ep * self.expert_tp if self.ep > 1 or self.etp is not None else 1)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which train on different rows."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def replicas(self) -> int:
        """Ranks with the same weights, which share gradients and optimizer: data- times context-parallel ranks."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks with the same experts."""
        return self.world // (self.pp * self.ep * self.expert_tp)

    @property
    def sequence_ranks(self) -> int:
        """Ranks over which hidden states between the linear layers are divided."""
        return self.tp if self.sequence_parallel else 1

    def microbatches(self, global_batch_size: int | None, micro_batch_size: int) -> int:
        """Microbatches of a step on each data-parallel rank; pp * vpp if no global batch size is given.

        Raises:
            ValueError: rows that do not divide.
        """
        if global_batch_size is None:
            return self.pp * (self.vpp or 1)
        share = micro_batch_size * self.dp
        if global_batch_size % share or global_batch_size < share:
            raise ValueError(
                f"global_batch_size is {global_batch_size}, expected a multiple of {share}: micro_batch_size times "
                f"{self.dp} data-parallel ranks"
            )
        return global_batch_size // share

    def chunks(self, layers: int) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of each pipeline rank, of a model with this number of text layers.

        Raises:
            ValueError: layers that cannot be assigned this way.
        """
        counts = self._layers_of(layers)
        found: list[list[Chunk]] = [[] for _ in range(self.pp)]
        numbers, begin = len(counts[0]), 0
        for number in range(numbers):
            for stage in range(self.pp):
                end = begin + counts[stage][number]
                last = (stage, number) == (self.pp - 1, numbers - 1)
                first = stage == number == 0
                found[stage].append(Chunk(stage, number, range(begin, end), first, last, first and self.tower))
                begin = end
        if begin != layers:
            raise ValueError(f"pipeline stages have {begin} text layers together, expected {layers}")
        return tuple(map(tuple, found))

    def _layers_of(self, layers: int) -> list[list[int]]:
        """Text layers of each [pipeline rank][virtual stage]."""
        if self.layout is not None:
            return self._layout()
        pp, numbers = self.pp, self.vpp or 1
        fixed = {0: self.first_layers, pp - 1: self.last_layers}
        fixed = {stage: count for stage, count in fixed.items() if count is not None}
        if fixed and (self.embedding_as_layer or self.loss_as_layer):
            raise ValueError(
                "num_layers_in_first/last_pipeline_stage together with account_for_..., expected only one of them"
            )
        if fixed and pp == 1:
            raise ValueError("num_layers_in_first/last_pipeline_stage with pp 1, expected at least two stages")
        total = layers - sum(fixed.values()) + self.embedding_as_layer + self.loss_as_layer
        free = pp - len(fixed)
        each, rest = divmod(total, free) if free else (0, total)
        if rest or each < 0:
            raise ValueError(f"{total} layers for {free} pipeline stages, expected a multiple of the stages{_UNEVEN}")
        stages = [fixed.get(stage, each) for stage in range(pp)]
        for stage, count in enumerate(stages):
            if count % numbers:
                raise ValueError(f"pipeline stage {stage} has {count} layers, expected a multiple of vpp, {numbers}")
        counts = [[count // numbers] * numbers for count in stages]
        counts[0][0] -= self.embedding_as_layer
        counts[-1][-1] -= self.loss_as_layer
        return counts

    def _layout(self) -> list[list[int]]:
        assert self.layout is not None
        if len(self.layout) != self.pp or any(len(row) != (self.vpp or 1) for row in self.layout):
            raise ValueError(f"the pipeline layout is {self.layout}, expected {self.pp} times {self.vpp or 1} chunks")
        return [list(row) for row in self.layout]

    def check(self, n: Dimensions) -> None:
        """Check that a model can be split this way.

        Args:
            n: the model's dimensions; "vocab" includes padding.

        Raises:
            ValueError: sizes that do not divide.
        """
        self._check_widths(n, ["heads", "vocab"] + ["ffn"] * bool(n.indices["dense_layers"]))
        if self.tower:
            self.check_tower(n)
        if n["kv_heads"] % self.tp and self.tp % n["kv_heads"]:
            raise ValueError(f"num_query_groups is {n['kv_heads']}, expected a multiple or divisor of tp, {self.tp}")
        if not n.indices["moe_layers"]:
            if self.ep > 1 or self.expert_tp not in (1, self.tp):
                raise ValueError(f"ep is {self.ep} and etp {self.etp}, expected neither: this model has no experts")
        elif n["experts"] % self.ep:
            raise ValueError(f"num_moe_experts is {n['experts']}, expected a multiple of ep, {self.ep}")
        elif n["moe_ffn"] % self.expert_tp:
            raise ValueError(f"moe_ffn_hidden_size is {n['moe_ffn']}, expected a multiple of etp, {self.expert_tp}")
        elif self.world % (self.pp * self.ep * self.expert_tp):
            raise ValueError(f"{self.world} GPUs, expected a multiple of {self.pp * self.ep * self.expert_tp}: "
                             f"etp * ep * pp")  # fmt: skip
        elif self.tp > 1 and not self.sequence_parallel:
            raise ValueError(f"sequence_parallel is False with experts under tp {self.tp}, expected True: "
            f"megatron-core cannot train experts otherwise")  # fmt: skip
        if n.indices.get("linear_layers"):
            self._check_linear_attention(n)
        self.chunks(len(n.indices["text_layers"]))

    def _check_linear_attention(self, n: Dimensions) -> None:
        if self.tp > 1 and not self.sequence_parallel:
            raise ValueError(f"sequence_parallel is False with linear attention under tp {self.tp}, expected True: "
            f"otherwise megatron-core does not sum the gradients of its output norm over the ranks")  # fmt: skip
        for name, heads in (("key", n["l_key"] // n["l_key_dim"]), ("value", n["l_value_heads"])):
            if heads % (self.tp * self.cp):
                raise ValueError(f"linear_num_{name}_heads is {heads}, expected a multiple of tp * cp, "
                                 f"{self.tp * self.cp}: linear attention divides its heads over both")  # fmt: skip

    def check_tower(self, n: Dimensions) -> None:
        """Check that the vision tower can be split this way.

        Raises:
            ValueError: widths that do not divide.
        """
        self._check_widths(n, ["v_heads", "v_ffn", "v_merged"])

    def _check_widths(self, n: Dimensions, names: Sequence[str]) -> None:
        for name in names:
            if n[name] % self.tp:
                raise ValueError(f"{_SPOKEN[name]} is {n[name]}, expected a multiple of tp, {self.tp}")

    def check_rows(self, seq_length: int) -> None:
        """Check that rows can be divided over context- and sequence-parallel ranks.

        Raises:
            ValueError: they cannot.
        """
        # As in `batch/token_layout.py`, `row_multiple`, which needs torch.
        multiple = math.lcm(2 * self.cp if self.cp > 1 else 1, self.cp * self.sequence_ranks)
        if seq_length % multiple:
            raise ValueError(
                f"seq_length is {seq_length}, expected a multiple of {multiple}: rows are split over {self.cp} "
                f"context-parallel ranks, and each part over {self.sequence_ranks} sequence-parallel ranks"
            )


_UNEVEN = (
    "; or uneven stages: num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage, "
    "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split"
)
_SPOKEN = {
    "heads": "num_attention_heads",
    "vocab": "the (padded) vocabulary",
    "v_heads": "vision_config.num_heads",
    "v_ffn": "vision_config.intermediate_size",
    "v_merged": "vision_config.hidden_size * spatial_merge_size ** 2",
    "ffn": "ffn_hidden_size",
}
