"""`qwen3vl train --rehearse`: one rank of a run at its real sizes, on a fake GPU."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge.io.files import user_cache
from qwen3vl_bridge.planning.estimate import FIXED_RESERVE
from qwen3vl_bridge.planning.hardware import GIB, gpu_of
from qwen3vl_bridge.rehearsal import fake_gpu
from qwen3vl_bridge.terminal import show

from qwen3vl_recipes import dry_run

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.estimate import MemoryEstimate, StageEstimate
    from qwen3vl_bridge.rehearsal.one_rank import Rehearsal

    from megatron.bridge.training.config import ConfigContainer

_FAILED = 1
_FOLDER = "rehearsal-"
_LINES = 16  # of code that hold memory, most first


def enter(gpu: str, arguments: Sequence[str]) -> None:
    """Start this command again in a process with a fake GPU, in place of this one; return if it is that process.

    Raises:
        ValueError: the fake GPU cannot be built here.
    """
    if "FAKE_GPU_LOG" in os.environ:
        if (folder := Path(os.environ["FAKE_GPU_LOG"]).parent).name.startswith(_FOLDER):  # and none of a caller's
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return
    kind = gpu_of(gpu)
    try:
        built = fake_gpu.build(user_cache() / "fake_gpu")
    except fake_gpu.FakeGPUError as error:
        raise ValueError(str(error)) from error
    log = Path(tempfile.mkdtemp(prefix=_FOLDER)) / "log"
    variables = fake_gpu.environment(built, log, kind.memory_bytes / GIB, kind.major)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "qwen3vl_bridge", "train", *arguments], variables)


def run(cfg: ConfigContainer, *, rank: int, gpus: int, gpu: str, as_json: bool, verbose: bool) -> int:
    """Rehearse a rank and print what was seen; 1 if the run would fail, or leave less memory free than is assumed."""
    from qwen3vl_bridge.compat.library_logs import without_prints
    from qwen3vl_bridge.models.qwen3_5 import delta_rule
    from qwen3vl_bridge.planning.from_config import plan_of
    from qwen3vl_bridge.rehearsal.one_rank import has_data, rehearse

    log = Path(os.environ["FAKE_GPU_LOG"])
    if not verbose:
        logging.getLogger("qwen3vl_bridge").setLevel(logging.WARNING)  # losses and the like are garbage
    with contextlib.redirect_stdout(sys.stderr) if verbose else without_prints():
        complete = dry_run.finalised(cfg, gpus)
        logging.getLogger(delta_rule.__name__).setLevel(logging.ERROR)  # the run would say the same again
        try:
            plan = plan_of(complete, gpus)
        except ValueError as error:
            plan = None
            show(f"no plan to compare with: {error}", error=True)
        rows_are_full = not has_data(cfg)
        seen = rehearse(cfg, rank=rank, world=gpus, log=log)
    layers = complete.model.transformer_impl
    stage = None if plan is None else stage_of(plan, rank, replicas_last=complete.dist.use_tp_pp_dp_mapping)
    planned = None if stage is None else stage.allocated
    free = gpu_of(gpu).memory_bytes - seen.reserved
    if as_json:
        sizes = dict(peak=seen.peak, reserved=seen.reserved, free=free, planned=planned, rows_are_full=rows_are_full)
        show(json.dumps(dataclasses.asdict(seen) | dict(layers=layers) | sizes, indent=2))
    else:
        _print(seen, planned, layers, free, rows_are_full=rows_are_full)
    return _FAILED if seen.error or free < FIXED_RESERVE else 0


def stage_of(plan: MemoryEstimate, rank: int, *, replicas_last: bool = False) -> StageEstimate:
    """What the planner estimates for a rank.

    megatron-core numbers the ranks of a pipeline stage consecutively, or with `use_tp_pp_dp_mapping` (`replicas_last`)
    those of a replica, among them the ranks of one of its stages.
    """
    split = plan.split
    stage = rank // (split.tp * split.cp) % split.pp if replicas_last else rank // (split.world // split.pp)
    return next(each for each in plan.stages if each.stage == stage)


def _print(seen: Rehearsal, planned: float | None, layers: str, free: int, *, rows_are_full: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"rank {seen.rank} of {seen.world}, {layers} layers; a microbatch: {seen.row or 'none'}")
    if layers == "local" and importlib.util.find_spec("transformer_engine") is None:
        console.print("in a container with Transformer Engine, its layers run instead of the local ones")
    phases = Table("phase", title="GiB of GPU memory")
    for name in ("allocated after it", "at most", "reserved at most"):
        phases.add_column(name, justify="right")
    for phase in seen.phases:
        phases.add_row(phase.name, *(f"{n / GIB:.2f}" for n in (phase.allocated, phase.peak, phase.reserved)))
    console.print(phases)
    if seen.held:
        held = Table("GiB", "tensors", "allocated by", title="what holds memory at the most of a step")
        for nbytes, tensors, line in seen.held[:_LINES]:
            if nbytes >= GIB / 100:
                held.add_row(f"{nbytes / GIB:.2f}", f"{tensors or ''}", line)
        console.print(held)
    if seen.launches:
        launches = Table("a step", "number", "amount")
        for name, (number, amount) in seen.launches.items():
            launches.add_row(name, f"{number:,}", _amount(name, amount))
        for name, (number, nbytes) in seen.collectives.items():
            launches.add_row(name, f"{number:,}", _amount(name, nbytes))
        console.print(launches)
    if seen.waits:
        waits = Table("number", "CUDA function", title="the host's waits in a step")
        waits.add_column("line", overflow="fold")
        for number, name, line in seen.waits:
            waits.add_row(f"{number:,}", name, line)
        console.print(waits)
    if planned is not None and not seen.error:
        compared = f": {seen.peak / planned:.3f}" if rows_are_full else "; the plan is of rows full of images"
        console.print(f"planned {planned / GIB:.2f} GiB without reserve, allocated {seen.peak / GIB:.2f}{compared}")
    memory = (seen.reserved + free) / GIB
    console.print(f"reserved at most {seen.reserved / GIB:.2f} of {memory:.1f} GiB: {free / GIB:.2f} are free")
    if seen.error:
        console.print(f"the run would fail: {seen.error}", markup=False)
    elif free < FIXED_RESERVE:
        console.print(
            f"the run would probably fail: {FIXED_RESERVE / GIB:.0f} GiB are assumed for CUDA's context, NCCL and what "
            "else a rehearsal does not see. Set dataset.max_patches, recompute (model.recompute_granularity), split "
            "the model over more GPUs, or use larger ones"
        )


def _amount(name: str, amount: int) -> str:
    if name == "gemm":
        return f"{amount / 1e12:.1f} TFLOP"
    return f"{amount / GIB:.2f} GiB" if amount else ""
