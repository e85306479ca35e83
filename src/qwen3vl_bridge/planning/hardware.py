"""Memory and peak FLOP/s of GPUs, and host memory per GPU.

Sources: NVIDIA's data sheets for A100 80GB (PB-10577), H100 (PB-11133), H200, HGX B200 and GB200 NVL72. Peaks are for
dense bfloat16 matrices, half of the values with sparsity. Memory is the value that `torch.cuda.get_device_properties`
reports, which is less than the nominal size: 139 GiB for H200 and 178 GiB for B200
(https://github.com/pytorch/ao/pull/4002 for the B200).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GIB, GB = 2**30, 10**9
# Host memory per GPU: NVIDIA's DGX A100 with GPUs of 40 GB has 1 TB for eight. Machines with other GPUs have more.
HOST_BYTES = 128 * GB
# Assumed fraction of host memory that processes, data-loading workers and the file cache need.
HOST_RESERVE = 0.2


@dataclass(frozen=True)
class Gpu:
    """Memory, peak FLOP/s and node size of one GPU model, such as H100."""

    memory_bytes: int  # memory that a process can use, including the CUDA context
    bf16_flops: float  # peak for dense bfloat16 matrices, FLOP/s
    gpus_per_node: int
    major: int = 9  # major version of the compute capability


GPUS: Mapping[str, Gpu] = {
    "A100-40GB": Gpu(int(39.3 * GIB), 312e12, 8, 8),
    "A100": Gpu(int(79.1 * GIB), 312e12, 8, 8),
    "H100": Gpu(int(79.1 * GIB), 989e12, 8),
    "H200": Gpu(int(139.7 * GIB), 989e12, 8),
    "B200": Gpu(int(178.3 * GIB), 2250e12, 8, 10),
    "GB200": Gpu(int(184.0 * GIB), 2500e12, 4, 10),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU named `name`, ignoring case.

    Raises:
        ValueError: The name is unknown; the message lists the known ones.
    """
    gpu = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if gpu is None:
        raise ValueError(
            f"unknown GPU {name!r}, expected one of {', '.join(GPUS)}; for another use --gpu-memory of `qwen3vl plan`"
        )
    return gpu


def host_bytes() -> int:
    """Return the host memory in bytes: of the machine, or the memory limit of its container if that is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Memory limits of containers in cgroups v2 and v1.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            memory = min(memory, int(Path(path).read_text()))
    return memory
