"""Show estimates and proposals as tables, sentences and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.config.divisibility import Replicas
from qwen3vl_bridge.planning.estimate import MemoryEstimate
from qwen3vl_bridge.planning.hardware import GB, GIB, HOST_BYTES, HOST_RESERVE
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.proposals import MARGIN
from qwen3vl_bridge.planning.training_settings import TrainingSettings

_MARGIN = f"{100 * MARGIN:g} %"
_COLUMNS = 5  # stages in a terminal of 80 characters
_STATES = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "gathered layers": "gathered",
}  # fmt: skip


def print_estimate(estimate: MemoryEstimate, memory: int) -> None:
    """Print the memory of each pipeline stage as a table, and whether GPU and host memory are large enough.

    If there are many stages, only the first two, the last and the peak stage are printed.
    """
    from rich.console import Console
    from rich.table import Table

    layout, peak, stages = estimate.layout, estimate.peak, list(estimate.stages)
    if len(stages) > _COLUMNS:
        stages = [stage for stage in stages if stage.stage in {-1, 0, 1, layout.pp - 1, peak.stage}]
    table = Table(title=f"{describe_parallelism(estimate)}; {describe_training(estimate.training)}; GiB on each rank")
    table.add_column("")
    only_stage = "language ranks" if estimate.vision_layout else "every rank"
    for stage in stages:
        header = "vision ranks" if stage.stage < 0 else f"stage {stage.stage}" if layout.pp > 1 else only_stage
        table.add_column(header, justify="right")

    def add(name: str, values: Sequence[float], digits: int = 2, style: str | None = None) -> None:
        if any(values):
            table.add_row(name, *(f"{value / GIB:.{digits}f}" for value in values), style=style)

    for name, attribute in _STATES.items():
        add(name, [getattr(stage.states, attribute) for stage in stages])
    for module in dict.fromkeys(module for stage in stages for module in stage.activations):
        add(f"activations: {module}", [stage.activations.get(module, 0.0) for stage in stages])
    add("temporary buffers", [stage.temporary for stage in stages])
    add("reserve", [stage.reserve for stage in stages])
    table.add_section()
    add("total", [stage.total for stage in stages], 1, "bold")
    add("before sharding", [stage.states.before_sharding for stage in stages], 1)
    add("optimizer step", [stage.optimizer_step * bool(stage.states.optimizer_temporary) for stage in stages], 1)
    if len(stages) > 1:
        held = (f"{sum(n)}" + f" of {len(n)} chunks" * (len(n) > 2) for n in (stage.in_flight for stage in stages))
        table.add_row("microbatches in flight", *held)
    console = Console()
    console.print(table)
    console.print(describe_fit(estimate, memory), highlight=False)
    console.print(describe_saving(estimate), highlight=False)


def describe_fit(estimate: MemoryEstimate, memory: int, *, is_certain: bool = True) -> str:
    """Return a sentence that says whether an estimate fits into GPU memory, with or without the margin `MARGIN`.

    If it does not fit, `is_certain` chooses between "does not fit" and "may not fit".
    """
    peak = estimate.peak
    ranks = f"stage {peak.stage}" if peak.stage >= 0 else "vision ranks"
    fits = "fits" if peak.total <= (1 - MARGIN) * memory else f"fits with less than {_MARGIN} to spare"
    if peak.total > memory:
        fits = "does not fit" if is_certain else "may not fit"
    return f"{fits}: {peak.total / GIB:.1f} GiB on {ranks}, of {memory / GIB:.1f} GiB"


def _describe_limit(memory: int) -> str:
    return f"{(1 - MARGIN) * memory / GIB:.1f} of {memory / GIB:.1f} GiB ({_MARGIN} left free)"


def describe_saving(estimate: MemoryEstimate) -> str:
    """Return a sentence with the host memory needed to save a checkpoint, and whether `HOST_BYTES` per GPU suffice."""
    saving, room = estimate.peak_while_saving, (1 - HOST_RESERVE) * HOST_BYTES
    fits = "fits" if saving.host_total <= room else "does not fit"
    text = f"saving {fits}: {saving.host_total / GIB:.1f} GiB of host memory per rank"
    if saving.host_gathered:
        text += f" ({saving.host_written / GIB:.1f} without checkpoint.dist_ckpt_optim_fully_reshardable)"
    return f"{text}, of {room / GIB:.0f} GiB on a machine with {HOST_BYTES // GB} GB per GPU"


def print_proposals(proposals: Sequence[MemoryEstimate], memory: int) -> None:
    """Print the proposed parallel layouts as a table, with the peak memory of each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"fits into {_describe_limit(memory)}; fewest model-parallel ranks first, EP across nodes last")
    for name in ("parallel layout", "sharding and recomputation"):
        table.add_column(name, overflow="fold")
    table.add_column("GiB", justify="right")
    for estimate in proposals:
        peaks = [estimate.peak]
        if estimate.vision_layout:
            vision, *language = estimate.stages
            peaks = [vision, max(language, key=lambda stage: stage.total)]
        table.add_row(
            describe_parallelism(estimate),
            describe_training(estimate.training),
            " and ".join(f"{peak.total / GIB:.1f}" for peak in peaks),
        )
    Console().print(table)


def print_no_fit(least: MemoryEstimate, memory: int) -> None:
    """Print that no parallel layout fits, the layout that needs least memory (`least`), and ways to reduce memory."""
    from rich.console import Console

    training = least.training
    options = ["use more GPUs"]
    if not training.sharding.is_fsdp and least.vision_layout is None:
        options.append("--fsdp (Megatron-FSDP)")
    if not training.lora:
        options.append("--kind peft (LoRA)")
    Console().print(
        f"nothing fits into {_describe_limit(memory)}; {describe_parallelism(least)} "
        f"({describe_training(training)}) needs least, {least.peak.total / GIB:.1f} GiB: {', '.join(options)}, shorter "
        "rows, or --max-patches",
        style="red",
    )


def describe_first(proposals: Sequence[MemoryEstimate], memory: int, run: MemoryEstimate) -> str:
    """Return a line of text that names the first proposal for a run, or that says that no parallel layout fits."""
    if not proposals:
        return f"no parallel layout fits into {_describe_limit(memory)}"
    first = proposals[0]
    turned_off = run.training.overlaps_experts and not first.training.overlaps_experts
    without = ", without overlap_moe_expert_parallel_comm" if turned_off else ""
    return (
        f"the first parallel layout that fits is {describe_parallelism(first)} "
        f"({describe_training(first.training)}; {first.peak.total / GIB:.0f} GiB){without}"
    )


def describe_layout(layout: ParallelLayout) -> str:
    """Return the parallel sizes greater than 1 as text, such as "TP 2, SP, DP 4"."""
    sizes = {"TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp or 1, "CP": layout.cp, "EP": layout.ep}
    sizes["DP"] = layout.dp
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if layout.sequence_parallel:
        parts.insert(1, "SP")
    if layout.expert_tp > 1 and layout.etp is not None:
        parts.append(f"ETP {layout.expert_tp}")
    return ", ".join(parts) or "one GPU"


def describe_parallelism(estimate: MemoryEstimate) -> str:
    """Return the parallel sizes of an estimate as text, including its separate vision ranks if there are any."""
    return describe_layouts(estimate.layout, estimate.vision_layout)


def describe_layouts(layout: ParallelLayout, vision: ParallelLayout | None) -> str:
    """Return the parallel sizes of the language model as text, preceded by separate vision ranks if there are any."""
    if vision is None:
        return describe_layout(layout)
    vision_tp = f" (TP {vision.tp})" if vision.tp > 1 else ""
    return f"{vision.world} vision{vision_tp} + {describe_layout(layout)}"


def describe_training(training: TrainingSettings) -> str:
    """Return the settings that memory depends on, except the parallel layout, as a line of text."""
    parts = [training.sharding.value, *["trains MTP"] * training.trains_mtp]
    parts += ["n-gram table in FP8"] * training.fp8_ngram_table
    parts += ["overlaps the expert all-to-all"] * training.overlaps_experts
    for tower, recompute in (("language", training.recompute), ("vision", training.vision_recompute)):
        if recompute.modules:
            parts.append(f"{tower} recomputes {', '.join(sorted(recompute.modules))}")
        elif recompute.granularity:
            parts.append(f"{tower} recomputes {recompute.num_layers} ({recompute.method})")
    return ", ".join(parts)


def dump_estimate(estimate: MemoryEstimate, memory: int) -> dict[str, Any]:
    """Return an estimate as a dictionary to be written as JSON. All memory is in bytes.

    Args:
        memory: memory of one GPU, in bytes.
    """
    peak, layout = estimate.peak, estimate.layout
    stages = [
        {"stage": stage.stage, "layers": stage.layers}
        | {name: getattr(stage.states, name) for name in (*_STATES.values(), "before_sharding", "optimizer_temporary")}
        | {"activations": {module: round(nbytes) for module, nbytes in stage.activations.items()}}
        | {"microbatches_in_flight": list(stage.in_flight)}
        | {name: round(getattr(stage, name)) for name in ("temporary", "reserve", "total")}
        | {"host_while_saving": stage.states.host_total}
        for stage in estimate.stages
    ]
    dump = {
        "parallel_layout": _as_json(layout) | {"dp": layout.dp, "etp": layout.expert_tp},
        "training": _as_json(estimate.training),
        "memory": memory,
        "fits": peak.total <= memory,
        "free": round(memory - peak.total),
        "peak_stage": peak.stage,
        "total": round(peak.total),
        "stages": stages,
    }
    if vision := estimate.vision_layout:  # the fields of `cfg.model.dist_train`
        dump["dist_train"] = {
            "use_dist_train": True,
            "vision_world_size": vision.world,
            "language_world_size": layout.world,
            "vision_tensor_model_parallel_size": vision.tp,
            "vision_pipeline_model_parallel_size": 1,
            "vision_context_parallel_size": 1,
            "vision_to_llm_dp_ratio": Replicas(vision.dp, layout.dp).ratio,  # an integer setting; None if it is below 1
        }
    return dump


def _as_json(value: Any) -> Any:
    """Convert a value for JSON: dataclasses to dicts, frozensets to sorted lists, enum members to their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted(map(_as_json, value))
    return getattr(value, "value", value)
