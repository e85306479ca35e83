"""Estimate the memory of each rank of a run: model states, activations of the microbatches in flight, and a reserve."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from qwen3vl_bridge.config.divisibility import Replicas, check_row_length, misaligned_dims
from qwen3vl_bridge.planning.activations import Activations, MicrobatchWork, chunk_activations
from qwen3vl_bridge.planning.hardware import GIB
from qwen3vl_bridge.planning.model_states import ModelStates, adapter_sizes, estimate_states, group_layers_by_kind
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout, PipelineChunk
from qwen3vl_bridge.planning.training_settings import TrainingSettings
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import Dimensions

# Assumed, not measured: the CUDA context and its kernels, NCCL's buffers of several groups, workspaces of cuBLAS and
# Transformer Engine.
FIXED_RESERVE = 4 * GIB
# Assumed too: fragmentation of the allocator by short-lived tensors. Model states are allocated once.
_FRAGMENTATION = 0.10

# Separate vision ranks (dist-train) act as one more stage in front of the language model's pipeline.
VISION_CHUNK = PipelineChunk(-1, range(0), pre_process=False, post_process=False, vision=True)


@dataclass(frozen=True)
class StageEstimate:
    """Estimated memory in bytes on each rank of one pipeline stage."""

    stage: int  # pipeline rank; -1 for separate vision ranks
    layers: int  # number of text layers
    states: ModelStates
    activations: Mapping[str, float]  # stored by the microbatches in flight, by module
    in_flight: tuple[int, ...]  # number of microbatches in flight, for each chunk
    temporary: float  # while a layer or the loss is computed

    @property
    def reserve(self) -> float:
        """Estimated bytes for the CUDA context, buffers of libraries, and fragmentation of the allocator."""
        return FIXED_RESERVE + _FRAGMENTATION * (sum(self.activations.values()) + self.temporary)

    @property
    def optimizer_step(self) -> float:
        """Bytes needed during the optimizer step, after all activations are freed, including the reserve."""
        return self.states.total + (1 + _FRAGMENTATION) * self.states.optimizer_temporary + FIXED_RESERVE

    @property
    def forward_backward(self) -> float:
        """Bytes of all tensors at the peak of the forward and backward pass, without the reserve."""
        return self.states.total + sum(self.activations.values()) + self.temporary

    @property
    def allocated(self) -> float:
        """Peak bytes of all tensors in the run, comparable to `torch.cuda.max_memory_allocated`."""
        return max(
            self.forward_backward, self.states.total + self.states.optimizer_temporary, self.states.before_sharding
        )

    @property
    def total(self) -> float:
        """Peak bytes of the run: the maximum of the training passes, the optimizer step, and sharding at the start.

        All three include a reserve.
        """
        return max(
            self.forward_backward + self.reserve, self.optimizer_step, self.states.before_sharding + FIXED_RESERVE
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory of a run, with one `StageEstimate` per pipeline stage."""

    layout: ParallelLayout  # of the language model, and of the vision tower unless that has separate ranks
    training: TrainingSettings
    stages: tuple[StageEstimate, ...]  # separate vision ranks come first
    vision_layout: ParallelLayout | None = None  # of separate vision ranks

    @property
    def peak(self) -> StageEstimate:
        """Estimate of the pipeline stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def peak_while_saving(self) -> ModelStates:
        """Model states of the stage that needs most host memory while a checkpoint is saved."""
        return max((stage.states for stage in self.stages), key=lambda states: states.host_total)


def check_trainable(
    dims: Dimensions, layout: ParallelLayout, training: TrainingSettings, vision_layout: ParallelLayout | None = None
) -> None:
    """Raise ValueError if a run cannot train with these settings; see `estimate` for the arguments."""
    if vision_layout is not None:
        if not family(dims.family).dist_train:
            raise ValueError(
                f"{dims.family} does not support separate vision ranks; keep the vision tower on the ranks of the "
                "language model"
            )
        if layout.cp > 1 or (layout.vpp or 1) > 1:
            raise ValueError(
                f"cp is {layout.cp} and vpp is {layout.vpp} with separate vision ranks, expected 1 and None: "
                "megatron-core's schedule for two modules supports neither context parallelism nor interleaved stages"
            )
        if training.sharding.is_fsdp:
            raise ValueError(
                f"sharding is {training.sharding.value}, expected the distributed optimizer or none with separate "
                "vision ranks: Megatron-FSDP does not support pipeline stages"
            )
        Replicas(vision_layout.dp, layout.dp).check()
        vision_layout.check_vision(dims)
        layout = replace(layout, vision=False)
    layout.check(dims)
    fp8 = training.fp8
    check_row_length(training.seq_length, layout.cp, layout.sequence_ranks, fp8.multiple if fp8 else 1)
    if fp8 is not None:
        rows, shared = family(dims.family).rows(), dict(tp=layout.tp, etp=layout.expert_tp)
        for layer, side, size, ranks in misaligned_dims(
            rows, dims, **shared, multiple=fp8.multiple, exempt=fp8.bf16_linears
        ):
            raise ValueError(
                f"{layer} has {size} {side} on {ranks} tensor-parallel ranks, expected a multiple of {fp8.multiple} "
                "on each rank for FP8"
            )
    layout.num_microbatches(training.global_batch_size, training.micro_batch_size)
    if training.sharding.is_fsdp and layout.pp > 1:
        raise ValueError(
            f"pp is {layout.pp} with {training.sharding.value}, expected 1: Megatron-FSDP does not support pipeline "
            "stages"
        )
    if training.sharding.is_fsdp and dims.sizes.get("ple") and layout.ep * layout.expert_tp > 1:
        raise ValueError(
            f"ep * etp is {layout.ep * layout.expert_tp} with {training.sharding.value}, expected 1: Megatron-FSDP "
            "does not support an n-gram table that is divided over ranks"
        )
    if dims.sizes.get("streams"):
        if training.overlaps_experts:
            raise ValueError(
                "overlap_moe_expert_parallel_comm is True, expected False: gated residuals do not support it"
            )
        if "layernorm" in training.recompute.modules:
            raise ValueError(
                "recompute_modules has 'layernorm', remove it: this model has gated residuals in the place of norms, "
                "and always recomputes them"
            )
    if training.lora is not None:
        known = {name for layers in group_layers_by_kind(dims) for name in adapter_sizes(dims, layers[0])}
        if not known & set(training.lora.targets):
            raise ValueError(
                f"LoRA's targets are {training.lora.targets}, and this model has no such layers outside its experts; "
                f"expected some of {', '.join(sorted(known))}"
            )
    if training.trains_mtp and not dims.sizes.get("mtp"):
        raise ValueError("this model has no multi-token prediction to train; omit --mtp")
    moe = {"moe", "moe_act"} & training.recompute.modules
    if moe and not dims.indices["moe_layers"]:
        raise ValueError(f"recompute_modules has {sorted(moe)}, remove them: this model has no experts")
    if "mlp" in training.recompute.modules and not dims.indices["dense_layers"]:
        raise ValueError("recompute_modules has 'mlp', expected 'moe': every layer of this model has experts")


def estimate(
    dims: Dimensions,
    layout: ParallelLayout,
    training: TrainingSettings,
    vision_layout: ParallelLayout | None = None,
    *,
    stages: Collection[int] | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory on the ranks of each pipeline stage.

    Args:
        vision_layout: layout of separate vision ranks, in addition to the ranks of `layout`; None if there are none.
        stages: pipeline stages to estimate; None for all.

    Raises:
        ValueError: The layout cannot divide the model, or the settings contradict each other.
    """
    check_trainable(dims, layout, training, vision_layout)
    microbatches = layout.num_microbatches(training.global_batch_size, training.micro_batch_size)
    estimates: list[StageEstimate] = []
    if vision_layout is not None:
        layout = replace(layout, vision=False)
        if training.global_batch_size is None:
            microbatches = layout.pp + 1  # keeps the additional stage busy
        # Separate vision ranks encode the images of several language replicas, assumed to be divided evenly. They hold
        # one microbatch more than the language model's first stage.
        share, work = layout.dp / vision_layout.dp, MicrobatchWork.of_full_rows(dims, layout, training)
        patches = max(work.patches * share, dims["v_merged"] // dims["v_hidden"])
        work = MicrobatchWork(0, patches, work.vision_tokens * share)
        stored = [chunk_activations(dims, vision_layout, training, VISION_CHUNK, work)]
        in_flight = (min(layout.pp + 1, microbatches),)
        estimates.append(_estimate_stage(dims, vision_layout, training, (VISION_CHUNK,), in_flight, stored))
    for chunks in layout.chunks(len(dims.indices["text_layers"])):
        stage = chunks[0].stage
        if stages is None or stage in stages:
            stored = [chunk_activations(dims, layout, training, chunk) for chunk in chunks]
            if training.overlaps_experts and layout.pp == 1 and microbatches > 1:
                stored = [add_next_microbatch(activations) for activations in stored]
            chunk_bytes = [activations.total for activations in stored]
            in_flight = microbatches_in_flight(
                layout, stage, microbatches, chunk_bytes, one_ahead=training.overlaps_experts
            )
            estimates.append(_estimate_stage(dims, layout, training, chunks, in_flight, stored))
    return MemoryEstimate(layout, training, tuple(estimates), vision_layout)


def _estimate_stage(
    dims: Dimensions,
    layout: ParallelLayout,
    training: TrainingSettings,
    chunks: tuple[PipelineChunk, ...],
    in_flight: tuple[int, ...],
    stored: Sequence[Activations],  # of one microbatch in each chunk
) -> StageEstimate:
    modules = dict.fromkeys(module for one in stored for module in one.stored)
    pairs = list(zip(in_flight, stored, strict=True))
    activations = {name: sum(n * one.stored.get(name, 0.0) for n, one in pairs) for name in modules}
    layers, states = sum(len(chunk.layers) for chunk in chunks), estimate_states(dims, layout, chunks, training)
    temporary, logits = max(one.temporary for one in stored), max(one.logits for one in stored)
    if states.gathered_layer:  # while gradients wait to be reduced, activations of their layers are already freed
        waiting_layers = states.gathered_gradients // states.gathered_layer
        freed = waiting_layers * min(states.gathered_layer, round(activations["language model"] / layers))
        remaining = states.gathered_gradients - freed
        states = replace(states, gathered=states.gathered - freed, gathered_gradients=remaining)
    # Under ZeRO-3 logits are freed before the backward pass gathers weights of layers. Unsharded gradients are
    # allocated after a parameter's backward pass. So the larger of the two counts. Source: megatron-core 0.19,
    # Megatron-FSDP's `_grad_acc`.
    in_layers = states.gathered_weights + states.gathered_gradients
    if logits > temporary + in_layers:
        states = replace(states, gathered=states.gathered - in_layers, gathered_weights=0, gathered_gradients=0)
        temporary = logits
    return StageEstimate(chunks[0].stage, layers, states, activations, in_flight, temporary)


def add_next_microbatch(activations: Activations) -> Activations:
    """Return `activations` of a microbatch plus those of the next one that are in memory at the same time.

    This is the case in megatron-core's combined schedule with a single pipeline stage. The schedule has already run the
    vision tower of the next microbatch. It allocates the text layers of the next microbatch while it frees those of
    this microbatch.
    """
    not_started = {"language model", "loss", "multi-token prediction"}
    stored = {name: nbytes * (2 - (name in not_started)) for name, nbytes in activations.stored.items()}
    return activations._replace(stored=stored, temporary=activations.temporary + activations.next_microbatch)


def microbatches_in_flight(
    layout: ParallelLayout, stage: int, microbatches: int, chunk_bytes: Sequence[float], *, one_ahead: bool = False
) -> tuple[int, ...]:
    """Return how many microbatches each chunk of a pipeline stage has in flight at the memory peak of the stage.

    Passes run in the order of megatron-core's schedules: 1F1B (Narayanan et al., arXiv 2006.09503) and interleaved 1F1B
    (arXiv 2104.04473).

    Args:
        chunk_bytes: bytes of activations of one microbatch, for each chunk of the stage.
        one_ahead: the schedule is one forward pass ahead, as with `overlap_moe_expert_parallel_comm`.
    """
    chunks = len(chunk_bytes)
    if chunks == 1:
        return (min(layout.pp - stage, microbatches),)
    group = layout.vpp_group or layout.pp
    groups = (range(begin, min(begin + group, microbatches)) for begin in range(0, microbatches, group))
    forward_order = [chunk for rows in groups for chunk in range(chunks) for _ in rows]  # chunk of each forward pass
    warmup = (layout.pp - stage - 1) * 2 + (chunks - 1) * group + one_ahead
    held, peak = [0] * chunks, (0.0, (0,) * chunks)
    for step, chunk in enumerate(forward_order):
        held[chunk] += 1
        nbytes = sum(count * size for count, size in zip(held, chunk_bytes, strict=True))
        peak = max(peak, (nbytes, tuple(held)))
        if step >= warmup:  # backward passes use the chunks in reverse order
            held[chunks - 1 - forward_order[step - warmup]] -= 1
    return peak[1]
