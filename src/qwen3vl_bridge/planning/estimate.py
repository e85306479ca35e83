"""The memory of each rank of a run: model states, activations of the microbatches in flight, and a reserve."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qwen3vl_bridge.models.divisibility import Replicas
from qwen3vl_bridge.planning.activations import MicrobatchWork, chunk_activations
from qwen3vl_bridge.planning.hardware import GIB
from qwen3vl_bridge.planning.model_states import ModelStates, adapter_sizes, layers_by_kind, stage_states
from qwen3vl_bridge.planning.split import ModelSplit, PipelineChunk
from qwen3vl_bridge.planning.training_settings import TrainingSettings
from qwen3vl_bridge.registry import dimensions_of, family
from qwen3vl_bridge.weights.rows import Dimensions

# Assumed, not measured: the CUDA context and its kernels, NCCL's buffers of several groups, workspaces of cuBLAS and
# Transformer Engine.
FIXED_RESERVE = 4 * GIB
# Assumed too: fragmentation of the allocator between short-lived tensors. States are allocated once, in one piece.
_FRAGMENTED = 0.10

# Separate vision ranks (dist-train). For the language model's pipeline they are one additional stage at the front.
_VISION_STAGE = -1
VISION_CHUNK = PipelineChunk(_VISION_STAGE, 0, range(0), pre_process=False, post_process=False, vision=True)


@dataclass(frozen=True)
class StageEstimate:
    """Peak bytes on each rank of a pipeline stage.

    Attributes:
        stage: pipeline rank; -1 for separate vision ranks.
        layers: text layers of its chunks.
        states: parameters, gradients, optimizer.
        activations: stored activations of the microbatches in flight, by module.
        in_flight: microbatches of each of its chunks.
        temporary: memory while a layer is computed.
    """

    stage: int
    layers: int
    states: ModelStates
    activations: Mapping[str, float]
    in_flight: tuple[int, ...]
    temporary: float

    @property
    def reserve(self) -> float:
        """Memory other than the run's tensors."""
        return FIXED_RESERVE + _FRAGMENTED * (sum(self.activations.values()) + self.temporary)

    @property
    def updating(self) -> float:
        """Memory while the optimizer steps."""
        return self.states.total + (1 + _FRAGMENTED) * self.states.updating + FIXED_RESERVE

    @property
    def total(self) -> float:
        """The maximum of forward and backward pass, the optimizer's step, and before the model is sharded."""
        passes = self.states.total + sum(self.activations.values()) + self.temporary + self.reserve
        return max(passes, self.updating, self.states.unsharded + FIXED_RESERVE)


@dataclass(frozen=True)
class MemoryEstimate:
    """All stages of a run.

    Attributes:
        split: of the language model, and of the vision tower unless it is on separate ranks.
        training: how it is trained.
        stages: the language model's, preceded by that of separate vision ranks.
        vision_split: of separate vision ranks, or None.
    """

    split: ModelSplit
    training: TrainingSettings
    stages: tuple[StageEstimate, ...]
    vision_split: ModelSplit | None = None

    @property
    def peak(self) -> StageEstimate:
        """The stage whose ranks need most memory, which has to fit."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def saving(self) -> ModelStates:
        """The stage whose ranks need most host memory while a checkpoint is saved."""
        return max((stage.states for stage in self.stages), key=lambda states: states.host_total)


def estimate(
    config: Mapping, split: ModelSplit, training: TrainingSettings, *, vision_split: ModelSplit | None = None
) -> MemoryEstimate:
    """The memory of each rank.

    Args:
        config: a `config.json` as a mapping.
        split: parallel sizes.
        training: rows, precision, what is trained, recomputation.
        vision_split: of separate vision ranks, whose number is added to that of `split`; None without them.

    Raises:
        ValueError: the model cannot be split this way, or the settings contradict each other.
        KeyError: the configuration lacks a field; the message names it.
    """
    dims = dimensions_of(config)
    check(dims, split, training, vision_split)
    return estimate_of(dims, split, training, vision_split)


def check(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, vision_split: ModelSplit | None = None
) -> None:
    """Check that a model can be trained this way.

    Args:
        dims: the model's dimensions.
        split, training, vision_split: as for `estimate`.

    Raises:
        ValueError: it cannot; the message says why.
    """
    if vision_split is not None:
        _check_dist_train(dims, split, training, vision_split)
        split = replace(split, vision=False)
    split.check(dims)
    split.check_rows(training.seq_length)
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


def _check_dist_train(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, vision_split: ModelSplit
) -> None:
    if not family(dims.family).dist_train:
        raise ValueError(
            f"the family {dims.family} does not support separate vision ranks, expected it on the language model's "
            "ranks"
        )
    if split.cp > 1 or (split.vpp or 1) > 1:
        raise ValueError(
            f"cp is {split.cp} and vpp {split.vpp}, expected neither with vision on ranks of its own: megatron-core's "
            "schedule for two modules supports neither context parallelism nor interleaved stages"
        )
    if training.sharding.is_fsdp:
        raise ValueError(
            f"sharding is {training.sharding.value}, expected the distributed optimizer or none with separate vision "
            "ranks: Megatron-FSDP does not support pipeline stages"
        )
    Replicas(vision_split.dp, split.dp).check()
    vision_split.check_vision(dims)


def estimate_of(
    dims: Dimensions,
    split: ModelSplit,
    training: TrainingSettings,
    vision_split: ModelSplit | None = None,
    *,
    stages: Collection[int] | None = None,
) -> MemoryEstimate:
    """Like `estimate`, for dimensions that have been checked, and only these pipeline stages; None for all."""
    microbatches = split.microbatches(training.global_batch_size, training.micro_batch_size)
    estimates: list[StageEstimate] = []
    if vision_split is not None:
        split = replace(split, vision=False)
        if training.global_batch_size is None:
            microbatches = split.pp + 1  # which keeps the additional stage busy
        estimates.append(_vision_stage(dims, split, training, vision_split, microbatches))
    for chunks in split.chunks(len(dims.indices["text_layers"])):
        stage = chunks[0].stage
        if stages is not None and stage not in stages:
            continue
        of_chunks = [chunk_activations(dims, split, training, chunk) for chunk in chunks]
        in_flight = microbatches_in_flight(split, stage, microbatches, [microbatch.total for microbatch in of_chunks])
        activations: dict[str, float] = {}
        for microbatch, count in zip(of_chunks, in_flight, strict=True):
            for module, nbytes in microbatch.stored.items():
                activations[module] = activations.get(module, 0.0) + count * nbytes
        layers = sum(len(chunk.layers) for chunk in chunks)
        states = stage_states(dims, split, chunks, training)
        temporary = max(microbatch.temporary for microbatch in of_chunks)
        estimates.append(StageEstimate(stage, layers, states, activations, in_flight, temporary))
    return MemoryEstimate(split, training, tuple(estimates), vision_split)


def _vision_stage(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, vision_split: ModelSplit, microbatches: int
) -> StageEstimate:
    """A separate vision rank, which holds one microbatch more than the language model's first stage.

    It encodes for all language replicas that it serves. Images are assumed to be divided evenly, as everywhere here.
    """
    replicas = Replicas(vision_split.dp, split.dp)
    share = replicas.language_per_vision / replicas.vision_per_language
    work = MicrobatchWork.of(dims, split, training)
    patches = max(work.patches * share, dims["v_merged"] // dims["v_hidden"])
    work = MicrobatchWork(0, patches, work.vision_tokens * share)
    microbatch = chunk_activations(dims, vision_split, training, VISION_CHUNK, work)
    count = min(split.pp + 1, microbatches)
    activations = {module: count * nbytes for module, nbytes in microbatch.stored.items()}
    states = stage_states(dims, vision_split, (VISION_CHUNK,), training)
    return StageEstimate(_VISION_STAGE, 0, states, activations, (count,), microbatch.temporary)


def microbatches_in_flight(
    split: ModelSplit, stage: int, microbatches: int, chunk_bytes: Sequence[float]
) -> tuple[int, ...]:
    """The number of microbatches of each chunk whose activations a pipeline stage holds at its peak.

    In the order of megatron-core's schedules, 1F1B (Narayanan et al., arXiv 2006.09503) and interleaved (arXiv
    2104.04473).

    Args:
        split: the pipeline's stages and chunks.
        stage: a pipeline rank.
        microbatches: of a step.
        chunk_bytes: of a microbatch in each of the stage's chunks.
    """
    chunks = len(chunk_bytes)
    if chunks == 1:
        return (min(split.pp - stage, microbatches),)
    group = split.vpp_group or split.pp
    order = list(_chunk_order(microbatches, chunks, group))
    warmup = (split.pp - stage - 1) * 2 + (chunks - 1) * group
    held, peak = [0] * chunks, (0.0, (0,) * chunks)
    for step, chunk in enumerate(order):
        held[chunk] += 1
        nbytes = sum(count * each for count, each in zip(held, chunk_bytes, strict=True))
        peak = max(peak, (nbytes, tuple(held)))
        if step >= warmup:  # backward passes use the chunks in reverse order
            held[chunks - 1 - order[step - warmup]] -= 1
    return peak[1]


def _chunk_order(microbatches: int, chunks: int, group: int) -> Iterator[int]:
    """The chunk of each forward pass."""
    for begin in range(0, microbatches, group):
        for chunk in range(chunks):
            yield from (chunk for _ in range(begin, min(begin + group, microbatches)))
