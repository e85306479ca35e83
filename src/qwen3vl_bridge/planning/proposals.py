"""Ways to split a model over a number of GPUs that fit, fewest model-parallel ranks (TP * PP * CP) first, so that most
ranks train on different rows; among as many least recomputation, then fewest pipeline and tensor-parallel ranks. Of
several EP the one with least recomputation counts, and of these the smallest; EP beyond a machine comes after all else.

Interleaved stages and expert tensor parallelism are not tried; `estimate` supports both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from qwen3vl_bridge.planning.estimate import MemoryEstimate, check_trainable, estimate
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import FULL, Recompute, TrainingSettings
from qwen3vl_bridge.weights.rows import Dimensions, Part

MARGIN = 0.05  # of the memory is left free, in addition to the reserve
_LEAST_TOKENS = 2048  # of a context-parallel rank


def propose(
    dims: Dimensions,
    world: int,
    gpu: Gpu,
    training: TrainingSettings,
    *,
    fixed: Mapping[str, int] | None = None,
    vision_split: ModelSplit | None = None,
    most: int = 5,
) -> tuple[list[MemoryEstimate], MemoryEstimate]:
    """At most `most` splits over `world` GPUs that fit, in this module's order, each with another TP, PP or CP; and the
    one that needs least memory of all that were tried, for where nothing fits. Recomputation is chosen here.

    Args:
        world: includes separate vision ranks.
        fixed: sizes of `ModelSplit` that are given.
        vision_split: of separate vision ranks; None without them.

    Raises:
        ValueError: settings or sizes with which no split is possible; the message has the reason of the simplest.
    """
    limit = (1 - MARGIN) * gpu.memory_bytes
    splits = _splits(dims, world, gpu, training, fixed or {}, vision_split)
    proposals: dict[tuple[int, ...], MemoryEstimate] = {}  # by sizes without EP
    tried: list[MemoryEstimate] = []
    for _, group in itertools.groupby(splits, lambda split: _model_parallel(split, gpu)):
        fitting: list[tuple[tuple[int, ...], MemoryEstimate]] = []
        for split in group:
            for recomputed, proposal in enumerate(_estimates(dims, split, training, vision_split)):
                tried.append(proposal)
                if proposal.peak.total <= limit:
                    fitting.append(((recomputed, split.pp, split.tp, split.cp, split.ep), proposal))
                    break
        for (_, pp, tp, cp, _), proposal in sorted(fitting, key=lambda entry: entry[0]):
            proposals.setdefault((pp, tp, cp), proposal)
        if len(proposals) >= most:
            break
    found = (*list(proposals.values())[:most], min(tried, key=lambda proposal: proposal.peak.total))
    *fit, least = (estimate(dims, one.split, one.training, vision_split) for one in found)
    return fit, least


def _splits(
    dims: Dimensions,
    world: int,
    gpu: Gpu,
    training: TrainingSettings,
    fixed: Mapping[str, int],
    vision_split: ModelSplit | None,
) -> list[ModelSplit]:
    """Possible splits that are worth trying, fewest model-parallel ranks first: tensor parallelism within a machine,
    powers of two, stages that divide the layers, and context parallelism of rows that are long enough.
    """
    layers, experts = len(dims.indices["text_layers"]), dims["experts"]
    most_cp = max(training.seq_length // _LEAST_TOKENS, 1)
    if vision_split is not None:
        world, most_cp = world - vision_split.world, 1
        if world < 1:
            raise ValueError(f"there are {vision_split.world} vision ranks, expected fewer than all GPUs")
    powers = [2**power for power in range(world.bit_length())]
    tried = {
        "tp": [size for size in powers if size <= gpu.gpus_per_node],
        # Where stages do not divide the layers, the embedding and the loss count as a layer each.
        "pp": [n for n in range(1, min(layers, world) + 1) if not world % n and 0 in (layers % n, (layers + 2) % n)],
        "cp": [size for size in powers if size <= most_cp],
        "ep": [size for size in powers if size <= (experts or 1)],
    } | {name: [size] for name, size in fixed.items()}
    splits, reasons = list[ModelSplit](), list[str]()
    for tp, pp, cp, ep in itertools.product(*(tried[name] for name in ("tp", "pp", "cp", "ep"))):
        as_layers = bool(layers % pp)
        try:
            split = ModelSplit(
                world, tp=tp, pp=pp, cp=cp, ep=ep, etp=1 if experts else None, sequence_parallel=tp > 1,
                embedding_as_layer=as_layers, loss_as_layer=as_layers,
            )  # fmt: skip
            check_trainable(dims, split, training, vision_split)
        except ValueError as error:
            reasons.append(str(error))
        else:
            splits.append(split)
    if not splits:
        raise ValueError(f"no split over {world} GPUs is possible: {reasons[0]}")
    return sorted(splits, key=lambda split: _model_parallel(split, gpu))


def _model_parallel(split: ModelSplit, gpu: Gpu) -> tuple[int, int]:
    """Expert-parallel ranks, those within a machine all alike, and model-parallel ranks."""
    return max(split.ep, gpu.gpus_per_node), split.tp * split.pp * split.cp


def _estimates(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, vision_split: ModelSplit | None
) -> Iterator[MemoryEstimate]:
    """Of some stages, with each combination of recomputation that is tried, the least first."""
    modules = {"mlp"}
    if dims.indices["moe_layers"]:
        modules = {"moe_act", "layernorm"} if training.transformer_engine else {"moe"}
    text = [Recompute(), Recompute("selective", frozenset(modules)), FULL]
    vision = [Recompute()] if Part.VISION_MODEL in training.frozen_weights else [Recompute(), FULL]
    for recompute, vision_recompute in itertools.product(text, vision):
        apart = split.pp > 1 or split.ep == 1 or recompute == FULL or "moe" in recompute.modules
        overlaps = training.overlaps_experts and not apart  # which megatron-core refuses there
        settings = replace(training, recompute=recompute, vision_recompute=vision_recompute, overlaps_experts=overlaps)
        # The peak is among these: middle stages hold fewer microbatches of equally many layers.
        yield estimate(dims, split, settings, vision_split, stages={0, 1, split.pp - 1})
