"""A machine's host memory: a run that would run out of it at the first save is refused."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge.planning.from_config import plan_of
from qwen3vl_bridge.planning.hardware import GIB

import torch
from megatron.bridge.utils.common_utils import get_world_size_safe

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

# Files with a container's limit, in the second and the first version of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_bytes() -> int:
    """Memory in bytes of this machine, or of the container that this process is in."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file
            found = min(found, int(path.read_text()))
    return found


def check_host_memory(cfg: ConfigContainer) -> None:
    """Refuse a run on GPUs whose hosts lack the memory that ranks need to save the optimizer by parameters.

    A run that the planner does not support is not checked.

    Args:
        cfg: of the run, finalised.

    Raises:
        ValueError: too little memory.
    """
    settings = cfg.checkpoint
    gathers = (
        settings.dist_ckpt_optim_fully_reshardable and settings.save_optim and settings.ckpt_format == "torch_dist"
    )
    if not (settings.save and gathers and torch.cuda.is_available()):
        return
    world = get_world_size_safe()
    try:
        saving = plan_of(cfg, world).saving
    except ValueError:
        return
    ranks, found = min(world, torch.cuda.device_count()), host_bytes()
    needed = saving.host_total
    if saving.host_gathered and ranks * needed > found:
        raise ValueError(
            f"saving a checkpoint takes {needed / GIB:.1f} GiB of host memory on each of {ranks} ranks, and this "
            f"machine has {found / GIB:.1f} GiB: expected checkpoint.dist_ckpt_optim_fully_reshardable False, with "
            f"which it takes {saving.host_written / GIB:.1f} GiB a rank, and the run can be resumed only with the same "
            "TP, PP and EP"
        )
