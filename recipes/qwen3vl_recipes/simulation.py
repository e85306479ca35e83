"""`qwen3vl train --simulate-gpu`: simulate one rank of a run at its real sizes on a fake GPU."""

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

from qwen3vl_bridge.core.files import user_cache
from qwen3vl_bridge.planning.estimate import FIXED_RESERVE
from qwen3vl_bridge.planning.hardware import GIB, find_gpu, host_bytes
from qwen3vl_bridge.simulation import fake_gpu
from qwen3vl_bridge.terminal import show

from qwen3vl_recipes import dry_run

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.estimate import MemoryEstimate, StageEstimate
    from qwen3vl_bridge.simulation.one_rank import Simulation

    from megatron.bridge.training.config import ConfigContainer

_FAILED = 1
_FOLDER = "simulation-"
_LINES = 16  # number of rows in the table of the code lines that allocate memory


def enter(gpu: str, arguments: Sequence[str]) -> None:
    """Restart this process with the same command on a fake GPU. In the restarted process, return at once.

    Args:
        gpu: kind of GPU.
        arguments: arguments of `qwen3vl train`.

    Raises:
        ValueError: the fake GPU cannot be built on this machine.
    """
    if "FAKE_GPU_LOG" in os.environ:
        if (folder := Path(os.environ["FAKE_GPU_LOG"]).parent).name.startswith(_FOLDER):  # created below
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return
    kind = find_gpu(gpu)
    try:
        built = fake_gpu.build(user_cache() / "fake_gpu")
    except fake_gpu.FakeGPUError as error:
        raise ValueError(str(error)) from error
    log = Path(tempfile.mkdtemp(prefix=_FOLDER)) / "log"
    variables = fake_gpu.environment(built, log, kind.memory_bytes / GIB, kind.major)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "qwen3vl_bridge", "train", *arguments], variables)


def run(cfg: ConfigContainer, *, rank: int, gpus: int, gpu: str, as_json: bool, verbose: bool) -> int:
    """Simulate a rank, and print its memory and kernel launches.

    Return the exit status: 1 if the run would fail or leave too little memory free, otherwise 0.
    """
    from qwen3vl_bridge.models.common import delta_rule
    from qwen3vl_bridge.planning.from_config import estimate_run
    from qwen3vl_bridge.simulation.one_rank import has_data, simulate_rank
    from qwen3vl_bridge.upstream.library_logs import without_prints

    log = Path(os.environ["FAKE_GPU_LOG"])
    if not verbose:
        logging.getLogger("qwen3vl_bridge").setLevel(logging.WARNING)  # losses of a simulation have no meaning
    with contextlib.redirect_stdout(sys.stderr) if verbose else without_prints():
        complete = dry_run.finalize_copy(cfg, gpus)
        logging.getLogger(delta_rule.__name__).setLevel(logging.ERROR)  # the simulated run would repeat them
        try:
            plan = estimate_run(complete, gpus)
        except ValueError as error:
            plan = None
            show(f"memory cannot be estimated for comparison: {error}", error=True)
        rows_are_full = not has_data(cfg)
        _show_needs(cfg)
        seen = simulate_rank(cfg, rank=rank, world=gpus, log=log)
    layers = complete.model.transformer_impl
    stage = None if plan is None else find_stage(plan, rank, replicas_last=complete.dist.use_tp_pp_dp_mapping)
    planned = None if stage is None else stage.allocated
    free = find_gpu(gpu).memory_bytes - seen.reserved
    if as_json:
        sizes = dict(peak=seen.peak, reserved=seen.reserved, free=free, planned=planned, rows_are_full=rows_are_full)
        show(json.dumps(dataclasses.asdict(seen) | dict(layers=layers) | sizes, indent=2))
    else:
        _print(seen, planned, layers, free, rows_are_full=rows_are_full)
    return _FAILED if seen.error or free < FIXED_RESERVE else 0


def _show_needs(cfg: ConfigContainer) -> None:
    """Print how much host memory and time simulations of similar recipes have taken."""
    model = cfg.model
    memory, time = 2, "a minute"
    if getattr(
        model, "linear_attention_freq", None
    ):  # linear attention in torch launches kernels for each chunk of tokens
        memory, time = (10, "20 minutes") if model.num_moe_experts else (5, "two minutes")
    if model.num_moe_experts and model.fp8:
        memory = max(memory, 9)
    if model.init_model_with_meta_device:
        memory = 11
    room = host_bytes() / GIB
    show(
        f"similar simulations took up to {memory} GiB of host memory and about {time} on an idle machine; this "
        f"machine has {room:.0f} GiB{': TOO LITTLE, it may be killed' if room < memory else ''}",
        error=True,
    )
    show("building the model ...", error=True)


def find_stage(plan: MemoryEstimate, rank: int, *, replicas_last: bool = False) -> StageEstimate:
    """Return the planner's estimate for the pipeline stage of a rank.

    In megatron-core, the ranks of a pipeline stage have consecutive numbers. With `use_tp_pp_dp_mapping`
    (`replicas_last`), the ranks of a data-parallel replica have consecutive numbers instead.
    """
    layout = plan.layout
    stage = rank // (layout.tp * layout.cp) % layout.pp if replicas_last else rank // (layout.world // layout.pp)
    return next(each for each in plan.stages if each.stage == stage)


def _print(seen: Simulation, planned: float | None, layers: str, free: int, *, rows_are_full: bool) -> None:
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
        held = Table("GiB", "tensors", "allocated by", title="memory at the peak of a step")
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
    if seen.syncs:
        waits = Table("number", "CUDA function", title="host-device synchronizations in a step")
        waits.add_column("line", overflow="fold")
        for number, name, line in seen.syncs:
            waits.add_row(f"{number:,}", name, line)
        console.print(waits)
    if planned is not None and not seen.error:
        compared = f": {seen.peak / planned:.3f}" if rows_are_full else "; planned for rows full of images"
        console.print(f"planned {planned / GIB:.2f} GiB without reserve, allocated {seen.peak / GIB:.2f}{compared}")
    memory = (seen.reserved + free) / GIB
    console.print(f"reserved at most {seen.reserved / GIB:.2f} of {memory:.1f} GiB: {free / GIB:.2f} are free")
    if seen.error:
        console.print(f"the run would fail: {seen.error}", markup=False)
    elif free < FIXED_RESERVE:
        console.print(
            f"the run would probably fail: CUDA's context, NCCL and others need {FIXED_RESERVE / GIB:.0f} GiB, "
            "which a simulation does not allocate. Set dataset.max_patches, recompute (model.recompute_granularity), "
            "increase model parallelism, or use GPUs with more memory"
        )


def _amount(name: str, amount: int) -> str:
    if name == "gemm":
        return f"{amount / 1e12:.1f} TFLOP"
    return f"{amount / GIB:.2f} GiB" if amount else ""
