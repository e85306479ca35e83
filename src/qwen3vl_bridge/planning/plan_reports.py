"""Estimates and proposals as tables and sentences, and as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.models.divisibility import Replicas
from qwen3vl_bridge.planning.estimate import MemoryEstimate
from qwen3vl_bridge.planning.hardware import GB, GIB, HOST_BYTES, HOST_RESERVE
from qwen3vl_bridge.planning.proposals import MARGIN
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import TrainingSettings

_MARGIN = f"{100 * MARGIN:g} %"
_COLUMNS = 5  # of stages, in a terminal of 80 characters
_STATES = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "gathered layers": "gathered",
}  # fmt: skip


def print_estimate(estimate: MemoryEstimate, memory: int) -> None:
    """Print a table of pipeline stages, whether the estimate fits a GPU's memory, and the host memory that saving
    takes. Of many stages some are printed, among them the first, the last and the peak.
    """
    from rich.console import Console
    from rich.table import Table

    split, peak, stages = estimate.split, estimate.peak, list(estimate.stages)
    if len(stages) > _COLUMNS:
        stages = [stage for stage in stages if stage.stage in {-1, 0, 1, split.pp - 1, peak.stage}]
    table = Table(title=f"{describe_ranks(estimate)}; {describe_training(estimate.training)}; GiB on each rank")
    table.add_column("")
    alone = "language ranks" if estimate.vision_split else "every rank"
    for stage in stages:
        header = "vision ranks" if stage.stage < 0 else f"stage {stage.stage}" if split.pp > 1 else alone
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
    add("before sharding", [stage.states.unsharded for stage in stages], 1)
    add("optimizer's step", [stage.updating * bool(stage.states.updating) for stage in stages], 1)
    if len(stages) > 1:
        held = (f"{sum(n)}" + f" of {len(n)} chunks" * (len(n) > 2) for n in (stage.in_flight for stage in stages))
        table.add_row("microbatches held", *held)
    console = Console()
    console.print(table)
    console.print(describe_fit(estimate, memory), highlight=False)
    console.print(describe_saving(estimate), highlight=False)


def describe_fit(estimate: MemoryEstimate, memory: int) -> str:
    """Whether an estimate fits a GPU's memory, and whether with the margin that proposals leave."""
    peak = estimate.peak
    ranks = f"stage {peak.stage}" if peak.stage >= 0 else "vision ranks"
    fits = "fits" if peak.total <= (1 - MARGIN) * memory else f"fits with less than {_MARGIN} to spare"
    fits = fits if peak.total <= memory else "does not fit"
    return f"{fits}: {peak.total / GIB:.1f} GiB on {ranks}, of {memory / GIB:.1f} GiB"


def _room(memory: int) -> str:
    """What proposals have to fit into."""
    return f"{(1 - MARGIN) * memory / GIB:.1f} of {memory / GIB:.1f} GiB ({_MARGIN} left free)"


def describe_saving(estimate: MemoryEstimate) -> str:
    """The host memory that saving takes, and whether a machine has it."""
    saving, room = estimate.saving, (1 - HOST_RESERVE) * HOST_BYTES
    fits = "fits" if saving.host_total <= room else "does not fit"
    words = f"saving {fits}: {saving.host_total / GIB:.1f} GiB of host memory a rank"
    if saving.host_gathered:
        words += f" ({saving.host_written / GIB:.1f} without checkpoint.dist_ckpt_optim_fully_reshardable)"
    return f"{words}, of {room / GIB:.0f} GiB where a machine has {HOST_BYTES // GB} GB for each GPU"


def print_proposals(proposals: Sequence[MemoryEstimate], memory: int) -> None:
    """Print one line per proposal, in their order."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"what fits into {_room(memory)}, fewest model-parallel ranks first")
    for name in ("split", "sharding and recomputation"):
        table.add_column(name, overflow="fold")
    table.add_column("GiB", justify="right")
    for estimate in proposals:
        peaks = [estimate.peak]
        if estimate.vision_split:
            vision, *language = estimate.stages
            peaks = [vision, max(language, key=lambda stage: stage.total)]
        table.add_row(
            describe_ranks(estimate),
            describe_training(estimate.training),
            " and ".join(f"{peak.total / GIB:.1f}" for peak in peaks),
        )
    Console().print(table)


def print_no_fit(least: MemoryEstimate, memory: int) -> None:
    """Print that nothing fits, what needs least, and what to change."""
    from rich.console import Console

    training = least.training
    options = ["use more GPUs"]
    if not training.sharding.is_fsdp and least.vision_split is None:
        options.append("--fsdp (Megatron-FSDP)")
    if not training.lora:
        options.append("--kind peft (LoRA)")
    Console().print(
        f"nothing fits into {_room(memory)}; {describe_ranks(least)} "
        f"({describe_training(training)}) needs least, {least.peak.total / GIB:.1f} GiB: {', '.join(options)}, shorter "
        "rows, or --max-patches",
        style="red",
    )


def describe_first(proposals: Sequence[MemoryEstimate], memory: int, run: MemoryEstimate) -> str:
    """The first of the proposals for a run's rows, GPUs and sharding, in one line."""
    if not proposals:
        return f"no split fits into {_room(memory)}"
    first = proposals[0]
    turned_off = run.training.overlaps_experts and not first.training.overlaps_experts
    without = ", without overlap_moe_expert_parallel_comm" if turned_off else ""
    return (
        f"the split with fewest model-parallel ranks that fits is {describe_ranks(first)} "
        f"({describe_training(first.training)}; {first.peak.total / GIB:.0f} GiB){without}"
    )


def describe_split(split: ModelSplit) -> str:
    """The sizes that are not 1."""
    sizes = {"TP": split.tp, "PP": split.pp, "VPP": split.vpp or 1, "CP": split.cp, "EP": split.ep, "DP": split.dp}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if split.sequence_parallel:
        parts.insert(1, "SP")
    if split.expert_tp > 1 and split.etp is not None:
        parts.append(f"ETP {split.expert_tp}")
    return ", ".join(parts) or "one GPU"


def describe_ranks(estimate: MemoryEstimate) -> str:
    """The sizes of all ranks."""
    return describe_splits(estimate.split, estimate.vision_split)


def describe_splits(split: ModelSplit, vision: ModelSplit | None) -> str:
    """The sizes of the language model's ranks, and of separate vision ranks if there are any."""
    if vision is None:
        return describe_split(split)
    shared = f" (TP {vision.tp})" if vision.tp > 1 else ""
    return f"{vision.world} vision{shared} + {describe_split(split)}"


def describe_training(training: TrainingSettings) -> str:
    """Sharding, multi-token prediction, experts' communication and recomputation."""
    parts = [training.sharding.value, *["trains MTP"] * training.trains_mtp]
    parts += ["experts' all-to-all under computation"] * training.overlaps_experts
    for tower, recompute in (("language", training.recompute), ("vision", training.vision_recompute)):
        if recompute.modules:
            parts.append(f"{tower} recomputes {', '.join(sorted(recompute.modules))}")
        elif recompute.granularity:
            parts.append(f"{tower} recomputes {recompute.num_layers} ({recompute.method})")
    return ", ".join(parts)


def dump_estimate(estimate: MemoryEstimate, memory: int) -> dict[str, Any]:
    """An estimate for JSON, in bytes; `memory` is that of a GPU."""
    peak, split = estimate.peak, estimate.split
    stages = [
        {"stage": stage.stage, "layers": stage.layers}
        | {name: getattr(stage.states, name) for name in (*_STATES.values(), "unsharded", "updating")}
        | {"activations": {module: round(nbytes) for module, nbytes in stage.activations.items()}}
        | {"microbatches_in_flight": list(stage.in_flight)}
        | {name: round(getattr(stage, name)) for name in ("temporary", "reserve", "total")}
        | {"host_while_saving": stage.states.host_total}
        for stage in estimate.stages
    ]
    dump = {
        "split": _as_json(split) | {"dp": split.dp, "etp": split.expert_tp},
        "training": _as_json(estimate.training),
        "memory": memory,
        "fits": peak.total <= memory,
        "free": round(memory - peak.total),
        "peak_stage": peak.stage,
        "total": round(peak.total),
        "stages": stages,
    }
    if vision := estimate.vision_split:  # the fields of `cfg.model.dist_train`
        dump["dist_train"] = {
            "use_dist_train": True,
            "vision_world_size": vision.world,
            "language_world_size": split.world,
            "vision_tensor_model_parallel_size": vision.tp,
            "vision_pipeline_model_parallel_size": 1,
            "vision_context_parallel_size": 1,
            "vision_to_llm_dp_ratio": Replicas(vision.dp, split.dp).ratio,  # an integer there, so None below 1
        }
    return dump


def _as_json(value: Any) -> Any:
    """Dataclasses as dicts, sets as lists and enumerations by their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted(map(_as_json, value))
    return getattr(value, "value", value)
