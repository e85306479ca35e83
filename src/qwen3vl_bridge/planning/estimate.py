"""The memory of each rank of a run: model states, activations of the microbatches in flight, and a reserve."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from qwen3vl_bridge.models.divisibility import Replicas, check_row_length, misfits
from qwen3vl_bridge.planning.activations import Activations, MicrobatchWork, chunk_activations
from qwen3vl_bridge.planning.hardware import GIB
from qwen3vl_bridge.planning.model_states import ModelStates, adapter_sizes, layers_by_kind, stage_states
from qwen3vl_bridge.planning.split import ModelSplit, PipelineChunk
from qwen3vl_bridge.planning.training_settings import TrainingSettings
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import Dimensions

# Assumed, not measured: the CUDA context and its kernels, NCCL's buffers of several groups, workspaces of cuBLAS and
# Transformer Engine.
FIXED_RESERVE = 4 * GIB
# Assumed too: fragmentation of the allocator between short-lived tensors. States are allocated once, in one piece.
_FRAGMENTED = 0.10

# Separate vision ranks (dist-train). For the language model's pipeline they are one additional stage at the front.
VISION_CHUNK = PipelineChunk(-1, range(0), pre_process=False, post_process=False, vision=True)


@dataclass(frozen=True)
class StageEstimate:
    """Peak bytes on each rank of a pipeline stage."""

    stage: int  # pipeline rank; -1 for separate vision ranks
    layers: int  # text layers of its chunks
    states: ModelStates
    activations: Mapping[str, float]  # stored ones of the microbatches in flight, by module
    in_flight: tuple[int, ...]  # microbatches of each of its chunks
    temporary: float  # while a layer or the loss is computed

    @property
    def reserve(self) -> float:
        """Memory other than the run's tensors."""
        return FIXED_RESERVE + _FRAGMENTED * (sum(self.activations.values()) + self.temporary)

    @property
    def updating(self) -> float:
        """Memory while the optimizer steps."""
        return self.states.total + (1 + _FRAGMENTED) * self.states.updating + FIXED_RESERVE

    @property
    def passes(self) -> float:
        """The run's tensors at the maximum of forward and backward pass."""
        return self.states.total + sum(self.activations.values()) + self.temporary

    @property
    def allocated(self) -> float:
        """The run's tensors at the maximum, which torch allocates."""
        return max(self.passes, self.states.total + self.states.updating, self.states.unsharded)

    @property
    def total(self) -> float:
        """The maximum of forward and backward pass, the optimizer's step, and before the model is sharded."""
        return max(self.passes + self.reserve, self.updating, self.states.unsharded + FIXED_RESERVE)


@dataclass(frozen=True)
class MemoryEstimate:
    """All stages of a run."""

    split: ModelSplit  # of the language model, and of the vision tower unless it is on separate ranks
    training: TrainingSettings
    stages: tuple[StageEstimate, ...]  # the language model's, preceded by that of separate vision ranks
    vision_split: ModelSplit | None = None  # of separate vision ranks

    @property
    def peak(self) -> StageEstimate:
        """The stage whose ranks need most memory, which has to fit."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def saving(self) -> ModelStates:
        """The stage whose ranks need most host memory while a checkpoint is saved."""
        return max((stage.states for stage in self.stages), key=lambda states: states.host_total)


def check_trainable(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, vision_split: ModelSplit | None = None
) -> None:
    """Refuse (ValueError) what cannot be trained; the arguments are those of `estimate`."""
    if vision_split is not None:
        if not family(dims.family).dist_train:
            raise ValueError(
                f"the family {dims.family} does not support separate vision ranks, expected it on the language model's "
                "ranks"
            )
        if split.cp > 1 or (split.vpp or 1) > 1:
            raise ValueError(
                f"cp is {split.cp} and vpp {split.vpp}, expected neither with vision on ranks of its own: "
                "megatron-core's schedule for two modules supports neither context parallelism nor interleaved stages"
            )
        if training.sharding.is_fsdp:
            raise ValueError(
                f"sharding is {training.sharding.value}, expected the distributed optimizer or none with separate "
                "vision ranks: Megatron-FSDP does not support pipeline stages"
            )
        Replicas(vision_split.dp, split.dp).check()
        vision_split.check_vision(dims)
        split = replace(split, vision=False)
    split.check(dims)
    bits = training.eight_bits
    check_row_length(training.seq_length, split.cp, split.sequence_ranks, bits.multiple if bits else 1)
    if bits is not None:
        rows, shared = family(dims.family).rows(), dict(tp=split.tp, etp=split.expert_tp)
        for layer, side, size, ranks in misfits(rows, dims, **shared, multiple=bits.multiple, exempt=bits.exempt):
            raise ValueError(
                f"{layer} has {size} {side} on {ranks} tensor-parallel ranks, expected a multiple of {bits.multiple} "
                "on each: products in 8 bits take nothing else"
            )
    split.microbatches(training.global_batch_size, training.micro_batch_size)
    if training.sharding.is_fsdp and split.pp > 1:
        raise ValueError(
            f"pp is {split.pp} with {training.sharding.value}, expected 1: Megatron-FSDP does not support pipeline "
            "stages"
        )
    if training.lora is not None:
        known = {name for layers in layers_by_kind(dims) for name in adapter_sizes(dims, layers[0])}
        if not known & set(training.lora.targets):
            raise ValueError(
                f"LoRA's targets are {training.lora.targets}, none of which this model has outside its experts, which "
                f"get no adapters; expected some of {', '.join(sorted(known))}"
            )
    if training.trains_mtp and not dims.sizes.get("mtp"):
        raise ValueError("this model has no multi-token prediction to train; omit --mtp")
    moe = {"moe", "moe_act"} & training.recompute.modules
    if moe and not dims.indices["moe_layers"]:
        raise ValueError(f"recompute_modules has {sorted(moe)}, expected neither: this model has no experts")
    if "mlp" in training.recompute.modules and not dims.indices["dense_layers"]:
        raise ValueError("recompute_modules has 'mlp', expected 'moe': every layer of this model has experts")


def estimate(
    dims: Dimensions,
    split: ModelSplit,
    training: TrainingSettings,
    vision_split: ModelSplit | None = None,
    *,
    stages: Collection[int] | None = None,
) -> MemoryEstimate:
    """Peak memory of the ranks of each pipeline stage, of a model with these dimensions.

    Args:
        vision_split: of separate vision ranks, whose number is added to that of `split`; None without them.
        stages: only these pipeline stages; None for all.

    Raises:
        ValueError: the model cannot be split this way, or the settings contradict each other.
    """
    check_trainable(dims, split, training, vision_split)
    microbatches = split.microbatches(training.global_batch_size, training.micro_batch_size)
    estimates: list[StageEstimate] = []

    def add(
        chunks: tuple[PipelineChunk, ...], held: tuple[int, ...], stored: list[Activations], of: ModelSplit
    ) -> None:
        pairs = list(zip(held, stored, strict=True))
        modules = dict.fromkeys(module for one in stored for module in one.stored)
        activations = {name: sum(n * one.stored.get(name, 0.0) for n, one in pairs) for name in modules}
        layers, states = sum(len(chunk.layers) for chunk in chunks), stage_states(dims, of, chunks, training)
        temporary, logits = max(one.temporary for one in stored), max(one.logits for one in stored)
        if states.gathered_layer:  # while gradients wait to be reduced, activations of their layers are freed
            later = states.gathered_gradients // states.gathered_layer
            freed = later * min(states.gathered_layer, round(activations["language model"] / layers))
            left = states.gathered_gradients - freed
            states = replace(states, gathered=states.gathered - freed, gathered_gradients=left)
        # Under ZeRO-3 logits are freed before layers' weights are gathered for the backward pass, and before there are
        # unsharded gradients, which are allocated once a parameter's backward pass is over: the larger of the two
        # counts. Source: megatron-core 0.19, Megatron-FSDP's `_grad_acc`.
        in_layers = states.gathered_weights + states.gathered_gradients
        if logits > temporary + in_layers:
            states = replace(states, gathered=states.gathered - in_layers, gathered_weights=0, gathered_gradients=0)
            temporary = logits
        estimates.append(StageEstimate(chunks[0].stage, layers, states, activations, held, temporary))

    if vision_split is not None:
        # Separate vision ranks encode for all language replicas that they serve, and hold one microbatch more than the
        # language model's first stage. Images are assumed to be divided evenly, as everywhere here.
        split = replace(split, vision=False)
        if training.global_batch_size is None:
            microbatches = split.pp + 1  # which keeps the additional stage busy
        share, work = split.dp / vision_split.dp, MicrobatchWork.of(dims, split, training)
        patches = max(work.patches * share, dims["v_merged"] // dims["v_hidden"])
        work = MicrobatchWork(0, patches, work.vision_tokens * share)
        stored = [chunk_activations(dims, vision_split, training, VISION_CHUNK, work)]
        add((VISION_CHUNK,), (min(split.pp + 1, microbatches),), stored, vision_split)
    for chunks in split.chunks(len(dims.indices["text_layers"])):
        if stages is None or chunks[0].stage in stages:
            stored = [chunk_activations(dims, split, training, chunk) for chunk in chunks]
            if training.overlaps_experts and split.pp == 1 and microbatches > 1:
                stored = [with_next_microbatch(one) for one in stored]
            held = microbatches_in_flight(
                split, chunks[0].stage, microbatches, [one.total for one in stored], ahead=training.overlaps_experts
            )
            add(chunks, held, stored, split)
    return MemoryEstimate(split, training, tuple(estimates), vision_split)


def with_next_microbatch(one: Activations) -> Activations:
    """In addition, what the combined schedule of a single stage holds of the next microbatch: its tower and layers."""
    once = {"language model", "loss", "multi-token prediction"}
    stored = {name: nbytes * (2 - (name in once)) for name, nbytes in one.stored.items()}
    return one._replace(stored=stored, temporary=one.temporary + one.ahead)


def microbatches_in_flight(
    split: ModelSplit, stage: int, microbatches: int, chunk_bytes: Sequence[float], *, ahead: bool = False
) -> tuple[int, ...]:
    """The number of microbatches of each chunk whose activations a pipeline stage holds at its peak.

    In the order of megatron-core's schedules, 1F1B (Narayanan et al., arXiv 2006.09503) and interleaved (arXiv
    2104.04473), which is one forward pass ahead if experts' communication is overlapped (`ahead`). `chunk_bytes` are
    those of a microbatch in each of the stage's chunks.
    """
    chunks = len(chunk_bytes)
    if chunks == 1:
        return (min(split.pp - stage, microbatches),)
    group = split.vpp_group or split.pp
    # The chunk of each forward pass.
    groups = (range(begin, min(begin + group, microbatches)) for begin in range(0, microbatches, group))
    order = [chunk for rows in groups for chunk in range(chunks) for _ in rows]
    warmup = (split.pp - stage - 1) * 2 + (chunks - 1) * group + ahead
    held, peak = [0] * chunks, (0.0, (0,) * chunks)
    for step, chunk in enumerate(order):
        held[chunk] += 1
        nbytes = sum(count * each for count, each in zip(held, chunk_bytes, strict=True))
        peak = max(peak, (nbytes, tuple(held)))
        if step >= warmup:  # backward passes use the chunks in reverse order
            held[chunks - 1 - order[step - warmup]] -= 1
    return peak[1]
