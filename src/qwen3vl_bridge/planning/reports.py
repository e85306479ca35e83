"""Estimates and proposals as tables, and as JSON for programs.

What lives here: text and columns. What may not: computing estimates.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.planning.encoder_sizing import Sized
from qwen3vl_bridge.planning.hardware import GB, GIB, HOST_BYTES, HOST_RESERVE
from qwen3vl_bridge.planning.memory.estimate import Estimate, StageEstimate
from qwen3vl_bridge.planning.proposals import AS_FAST, MARGIN, Proposal
from qwen3vl_bridge.planning.settings import Recompute, Training
from qwen3vl_bridge.planning.split import Split

_COLUMNS = 5  # of stages, in a terminal of 80 characters


def print_estimate(found: Estimate, memory: int) -> None:
    """Print one column per pipeline stage, or some if there are many; whether the worst one fits, and saving."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{words_of_ranks(found)}; {words_of_training(found.training)}; GiB on each rank")
    stages = _shown(found)
    table.add_column("")
    for stage in stages:
        table.add_column(_name(found, stage), justify="right")
    names = list(dict.fromkeys(name for stage in stages for name in stage.activations))
    rows: dict[str, list[float]] = {
        name: [getattr(stage.states, name) for stage in stages] for name in ("parameters", "gradients")
    }
    rows["optimizer"] = [stage.states.optimizer for stage in stages]
    rows["gathered layers"] = [stage.states.gathered for stage in stages]
    for name in names:
        rows[f"activations: {name}"] = [stage.activations.get(name, 0.0) for stage in stages]
    rows["temporary buffers"] = [stage.passing for stage in stages]
    rows["reserve"] = [stage.reserve for stage in stages]
    for name, values in rows.items():
        if any(values):
            table.add_row(name, *(f"{value / GIB:.2f}" for value in values))
    table.add_section()
    table.add_row("total", *(f"{stage.total / GIB:.1f}" for stage in stages), style="bold")
    if any(stage.states.unsharded for stage in stages):
        table.add_row("before sharding", *(f"{stage.states.unsharded / GIB:.1f}" for stage in stages))
    if any(stage.states.updating for stage in stages):
        table.add_row("optimizer's step", *(f"{stage.updating / GIB:.1f}" for stage in stages))
    if len(stages) > 1:
        table.add_row("microbatches held", *(_counts(stage.in_flight) for stage in stages))
    console = Console()
    console.print(table)
    console.print(verdict(found, memory), highlight=False)
    console.print(words_of_saving(found), highlight=False)


def _shown(found: Estimate) -> list[StageEstimate]:
    """All stages; if they are too many for a terminal, the first two, the last, and the one that needs most."""
    if len(found.stages) <= _COLUMNS:
        return list(found.stages)
    some = {-1, 0, 1, found.split.pp - 1, found.worst.stage}
    return [stage for stage in found.stages if stage.stage in some]


def _name(found: Estimate, stage: StageEstimate) -> str:
    if stage.stage < 0:
        return "vision ranks"
    if found.split.pp > 1:
        return f"stage {stage.stage}"
    return "language ranks" if found.dist else "every rank"


def _counts(in_flight: Sequence[int]) -> str:
    """Of a stage's chunks; for many, their sum."""
    return str(sum(in_flight)) if len(in_flight) < 3 else f"{sum(in_flight)} of {len(in_flight)} chunks"


def verdict(found: Estimate, memory: int) -> str:
    """Whether it fits, in one line."""
    worst = found.worst
    fits = "fits" if worst.total <= memory else "does not fit"
    where = f"stage {worst.stage}" if worst.stage >= 0 else "vision ranks"
    return f"{fits}: {worst.total / GIB:.1f} GiB on {where}, of {memory / GIB:.1f} GiB"


def words_of_saving(found: Estimate) -> str:
    """The host memory that saving a checkpoint takes, and whether the machine has it."""
    saving, room = found.saving, (1 - HOST_RESERVE) * HOST_BYTES
    needed = saving.written + saving.whole
    words = f"saving {'fits' if needed <= room else 'does not fit'}: {needed / GIB:.1f} GiB of host memory a rank"
    if saving.whole:
        words += f" ({saving.written / GIB:.1f} without checkpoint.dist_ckpt_optim_fully_reshardable)"
    return f"{words}, of {room / GIB:.0f} GiB where a machine has {HOST_BYTES // GB} GB for each GPU"


def print_no_fit(least: Estimate | None, training: Training, memory: int) -> None:
    """Print that nothing fits, what needs least, and what to change."""
    from rich.console import Console

    needed = ""
    if least is not None:
        way, room = f"{words_of(least.split)} ({words_of_training(least.training)})", (1 - MARGIN) * memory
        needed = f" into {room / GIB:.1f} GiB; {way} needs least, {least.worst.total / GIB:.1f} GiB"
    lora = "" if training.lora else "--kind peft (LoRA), "
    Console().print(f"nothing fits{needed}: use more GPUs, {lora}shorter rows, or --max-patches", style="red")


def print_proposals(found: Sequence[Proposal], memory: int) -> None:
    """Print one line per proposal, the best first."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"what fits into {memory / GIB:.1f} GiB, the cheapest first")
    for name in ("split", "memory and recomputation"):
        table.add_column(name, overflow="fold")
    table.add_column("GiB", justify="right")
    table.add_column("relative time", justify="right")
    table.add_column("why", overflow="fold")
    for one in found:
        table.add_row(
            words_of(one.estimate.split),
            words_of_training(one.estimate.training),
            f"{one.estimate.worst.total / GIB:.1f}",
            f"{one.seconds_per_row / found[0].seconds_per_row:.2f}",
            one.reason,
        )
    console.print(table)
    console.print(
        "Times are rough estimates, not measurements. Some recipes are split differently; docs/recipes.md says which "
        "and why."
    )


def words_beside(own: Proposal, found: Sequence[Proposal]) -> str:
    """How a split's rough time compares with that of the planner's first proposal."""
    if not found:
        return "the planner finds no split that fits with 5 % to spare"
    first = found[0]
    times = own.seconds_per_row / first.seconds_per_row
    if times < AS_FAST:
        return "the planner finds nothing faster for these GPUs and rows"
    held = f"{first.estimate.worst.total / GIB:.0f} GiB"
    return (
        f"the planner's fastest split is {words_of(first.estimate.split)} "
        f"({words_of_training(first.estimate.training)}; {held}); this one is estimated to take {times:.2f} times as "
        "long; docs/recipes.md says why recipes differ"
    )


def words_of(split: Split) -> str:
    """The sizes that are not 1."""
    sizes = {"TP": split.tp, "PP": split.pp, "VPP": split.vpp or 1, "CP": split.cp, "EP": split.ep, "DP": split.dp}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if split.sequence_parallel:
        parts.insert(1, "SP")
    if split.expert_tp > 1 and split.etp is not None:
        parts.append(f"ETP {split.expert_tp}")
    return ", ".join(parts) or "one GPU"


def words_of_ranks(found: Estimate) -> str:
    """The sizes of all ranks: the vision tower's, where it has its own, and the language model's."""
    if found.dist is None:
        return words_of(found.split)
    shared = f" (TP {found.dist.tp})" if found.dist.tp > 1 else ""
    return f"{found.dist.world} vision{shared} + {words_of(found.split)}"


def words_of_pace(found: Sized) -> str:
    """Whether the vision tower keeps up with the language model, and how many ranks it would need."""
    return (
        f"the vision tower {'keeps up' if found.keeps_up else 'does not keep up'}: it takes "
        f"{found.vision / max(found.language):.0%} of the slowest stage's time; {found.needed:.1f} vision ranks are "
        f"needed, there are {found.split.vision.world}"
    )


def words_of_training(training: Training) -> str:
    """Sharding, multi-token prediction and recomputation."""
    parts = [training.sharding.value, *["trains MTP"] * training.trains_mtp]
    for tower, recompute in (("language", training.recompute), ("vision", training.vision_recompute)):
        if recompute.granularity:
            parts.append(f"{tower} recomputes {_recomputed(recompute)}")
    return ", ".join(parts)


def _recomputed(recompute: Recompute) -> str:
    return ", ".join(sorted(recompute.modules)) if recompute.modules else f"{recompute.num_layers} ({recompute.method})"


def as_json(value: Any) -> str:
    """The result of `dump` as JSON."""
    return json.dumps(value, indent=2)


def dump_estimate(found: Estimate, memory: int) -> dict[str, Any]:
    """An estimate for programs, in bytes."""
    return {
        "split": _fields(found.split) | {"dp": found.split.dp, "etp": found.split.expert_tp},
        "training": _fields(found.training),
        "memory": memory,
        "fits": found.worst.total <= memory,
        "worst_stage": found.worst.stage,
        "total": round(found.worst.total),
        "stages": [stage.as_dict() for stage in found.stages],
    }


def dump_proposals(found: Sequence[Proposal], memory: int) -> list[dict[str, Any]]:
    """Proposals for programs."""
    return [
        dump_estimate(one.estimate, memory)
        | {"free": round(one.free), "seconds_per_row": one.seconds_per_row, "overhead": one.time.overhead}
        for one in found
    ]


def _fields(found: Split | Training) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, (frozenset, set)):
            return sorted(map(plain, value))
        return getattr(value, "value", value)

    return plain(found)
