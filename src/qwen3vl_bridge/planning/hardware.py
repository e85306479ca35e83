"""GPUs: their memory and peak FLOP/s; and host memory per GPU.

Sources, NVIDIA's data sheets: A100 80GB (PB-10577), H100 (PB-11133), H200, HGX B200 and GB200 NVL72. Peaks are for
dense matrices in bfloat16, which is half of the data sheets' values with sparsity. Memory is what a process sees, which
is less than the name says: H200 139 GiB and B200 178 GiB, as `torch.cuda.get_device_properties` reports them
(https://github.com/pytorch/ao/pull/4002 has the B200's).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GIB, GB = 2**30, 10**9
# Host memory per GPU: as in NVIDIA's DGX A100 with GPUs of 40 GB, 1 TB for eight. Machines with the other GPUs are sold
# with at least as much.
HOST_BYTES = 128 * GB
# Assumed: the part of it that processes, including data-loading ones, and the file system's cache need.
HOST_RESERVE = 0.2


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    memory_bytes: int  # available to a process, including the CUDA context
    bf16_flops: float  # peak of its matrix units in bfloat16, dense, FLOP/s
    gpus_per_node: int  # of one machine
    major: int = 9  # of its compute capability


GPUS: Mapping[str, Gpu] = {
    "A100-40GB": Gpu(int(39.3 * GIB), 312e12, 8, 8),
    "A100": Gpu(int(79.1 * GIB), 312e12, 8, 8),
    "H100": Gpu(int(79.1 * GIB), 989e12, 8),
    "H200": Gpu(int(139.7 * GIB), 989e12, 8),
    "B200": Gpu(int(178.3 * GIB), 2250e12, 8, 10),
    "GB200": Gpu(int(184.0 * GIB), 2500e12, 4, 10),
}


def gpu_of(name: str) -> Gpu:
    """The GPU of a name, in any case; a ValueError lists the names."""
    gpu = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if gpu is None:
        raise ValueError(
            f"unknown GPU {name!r}, expected one of {', '.join(GPUS)}; `qwen3vl plan` takes another memory too, "
            "--gpu-memory"
        )
    return gpu


def host_bytes() -> int:
    """Memory in bytes of this machine, or of the container that this process is in."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A container's memory limit, in the second and the first version of control groups.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file
            room = min(room, int(Path(path).read_text()))
    return room
