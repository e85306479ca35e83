"""What a module of the tests that runs on ranks begins and ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen3vl_bridge.logs import quiet

import torch
import torch.distributed as dist


def begin() -> None:
    """Say little, and leave the cores to the other ranks."""
    quiet()
    torch.set_num_threads(1)


def leave(found: Any = None, output: str | Path | None = None, *, writer: int = 0) -> None:
    """Leave together; one rank writes what was found.

    Args:
        found: by this rank.
        output: where to; None to write nothing.
        writer: the rank that writes.
    """
    if output is not None and dist.get_rank() == writer:
        torch.save(found, output)
    dist.barrier()
    dist.destroy_process_group()
