"""Record of each allocation by torch's CUDA allocator.

Called: `torch.cuda.memory._record_memory_history` and `_snapshot`, which torch documents under these names. Read: the
name of `torch.autograd.graph._engine_run_backward` in recorded stacks. Delete this module when they are public and
events name their pass, forward or backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def record_allocations() -> None:
    """Record memory allocations from now on, each with its Python stack. Earlier records are dropped."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=10**6)


def stop_recording() -> list[dict[str, Any]]:
    """Stop recording and return the events of the first GPU in order."""
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    return trace


def is_in_backward_pass(frames: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if a recorded stack is of a backward pass. Each frame is a mapping with the entry "name"."""
    return any("_engine_run_backward" in frame["name"] for frame in frames)
