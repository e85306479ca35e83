"""Propose parallel layouts over a number of GPUs that fit into memory.

Layouts with the fewest model-parallel ranks (TP * PP * CP) come first, because more ranks are then data-parallel. Among
equals, layouts with the least recomputation come first, then those with the fewest pipeline and tensor-parallel ranks.
For given TP, PP and CP only one EP size is proposed: the smallest of those that need the least recomputation. Layouts
with EP across nodes come last.

Interleaved stages and expert tensor parallelism are not tried; `estimate` supports both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from qwen3vl_bridge.planning.estimate import MemoryEstimate, check_trainable, estimate
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.training_settings import FULL, Recompute, TrainingSettings
from qwen3vl_bridge.weights.rows import Component, Dimensions

MARGIN = 0.05  # fraction of the memory that is left free, in addition to the reserve
_MIN_TOKENS_PER_CP_RANK = 2048


def propose(
    dims: Dimensions,
    world: int,
    gpu: Gpu,
    training: TrainingSettings,
    *,
    fixed: Mapping[str, int] | None = None,
    vision_layout: ParallelLayout | None = None,
    max_proposals: int = 5,
) -> tuple[list[MemoryEstimate], MemoryEstimate]:
    """Return estimates of the parallel layouts that fit, and the estimate of the layout that needs least memory.

    No two proposals have the same TP, PP and CP. Recomputation is chosen here; its settings in `training` are ignored.

    Args:
        world: number of GPUs, including separate vision ranks.
        fixed: parallel sizes that are not searched but given, by field name of `ParallelLayout`.
        vision_layout: layout of separate vision ranks; None if there are none.

    Raises:
        ValueError: No layout is possible; the message gives the reason for the first layout that was tried.
    """
    limit = (1 - MARGIN) * gpu.memory_bytes
    layouts = _possible_layouts(dims, world, gpu, training, fixed or {}, vision_layout)
    proposals: dict[tuple[int, ...], MemoryEstimate] = {}  # by (pp, tp, cp)
    tried: list[MemoryEstimate] = []
    for _, group in itertools.groupby(layouts, lambda layout: _order(layout, gpu)):
        fitting: list[tuple[tuple[int, ...], MemoryEstimate]] = []
        for layout in group:
            for recomputed, proposal in enumerate(_estimates(dims, layout, training, vision_layout)):
                tried.append(proposal)
                if proposal.peak.total <= limit:
                    fitting.append(((recomputed, layout.pp, layout.tp, layout.cp, layout.ep), proposal))
                    break
        for (_, pp, tp, cp, _), proposal in sorted(fitting, key=lambda entry: entry[0]):
            proposals.setdefault((pp, tp, cp), proposal)
        if len(proposals) >= max_proposals:
            break
    chosen = (*list(proposals.values())[:max_proposals], min(tried, key=lambda proposal: proposal.peak.total))
    # Only some stages were estimated above.
    *fit, smallest = (estimate(dims, one.layout, one.training, vision_layout) for one in chosen)
    return fit, smallest


def _possible_layouts(
    dims: Dimensions,
    world: int,
    gpu: Gpu,
    training: TrainingSettings,
    fixed: Mapping[str, int],
    vision_layout: ParallelLayout | None,
) -> list[ParallelLayout]:
    """Return the possible layouts that are worth trying, fewest model-parallel ranks first.

    Sizes are powers of two, except PP, which divides the layers. TP stays within a node. CP needs long rows.
    """
    layers, experts = len(dims.indices["text_layers"]), dims["experts"]
    max_cp = max(training.seq_length // _MIN_TOKENS_PER_CP_RANK, 1)
    if vision_layout is not None:
        world, max_cp = world - vision_layout.world, 1
        if world < 1:
            raise ValueError(f"there are {vision_layout.world} vision ranks, expected fewer than all GPUs")
    powers = [2**power for power in range(world.bit_length())]
    sizes = {
        "tp": [size for size in powers if size <= gpu.gpus_per_node],
        # If PP does not divide the layers, the embedding and the loss count as a layer each.
        "pp": [n for n in range(1, min(layers, world) + 1) if not world % n and 0 in (layers % n, (layers + 2) % n)],
        "cp": [size for size in powers if size <= max_cp],
        "ep": [size for size in powers if size <= (experts or 1)],
    } | {name: [size] for name, size in fixed.items()}
    layouts, reasons = list[ParallelLayout](), list[str]()
    for tp, pp, cp, ep in itertools.product(*(sizes[name] for name in ("tp", "pp", "cp", "ep"))):
        uneven = bool(layers % pp)
        try:
            layout = ParallelLayout(
                world, tp=tp, pp=pp, cp=cp, ep=ep, etp=1 if experts else None, sequence_parallel=tp > 1,
                embedding_as_layer=uneven, loss_as_layer=uneven,
            )  # fmt: skip
            check_trainable(dims, layout, training, vision_layout)
        except ValueError as error:
            reasons.append(str(error))
        else:
            layouts.append(layout)
    if not layouts:
        raise ValueError(f"no parallel layout of {world} GPUs is possible: {reasons[0]}")
    return sorted(layouts, key=lambda layout: _order(layout, gpu))


def _order(layout: ParallelLayout, gpu: Gpu) -> tuple[int, int]:
    """Return the sort key of a layout: its EP size, and the number of ranks of a model replica (TP x PP x CP).

    EP sizes up to the number of GPUs of a node are treated as equal.
    """
    return max(layout.ep, gpu.gpus_per_node), layout.tp * layout.pp * layout.cp


def _estimates(
    dims: Dimensions, layout: ParallelLayout, training: TrainingSettings, vision_layout: ParallelLayout | None
) -> Iterator[MemoryEstimate]:
    """Yield the estimates of a layout with no, selective and full recomputation, in this order."""
    modules = {"mlp"}
    if dims.indices["moe_layers"]:
        # Gated residuals have no norms to recompute.
        engine = {"moe_act"} if dims.sizes.get("streams") else {"moe_act", "layernorm"}
        modules = engine if training.transformer_engine else {"moe"}
    text = [Recompute(), Recompute("selective", frozenset(modules)), FULL]
    vision = [Recompute()] if Component.VISION_MODEL in training.frozen_weights else [Recompute(), FULL]
    for recompute, vision_recompute in itertools.product(text, vision):
        # megatron-core supports overlapping the expert all-to-all in none of these cases.
        no_overlap = layout.pp > 1 or layout.ep == 1 or recompute == FULL or "moe" in recompute.modules
        settings = replace(
            training,
            recompute=recompute,
            vision_recompute=vision_recompute,
            overlaps_experts=training.overlaps_experts and not no_overlap,
        )
        # One of these stages has the peak: middle stages hold fewer microbatches than stage 1, of equally many layers.
        yield estimate(dims, layout, settings, vision_layout, stages={0, 1, layout.pp - 1})
