"""GPUs: their memory, peak FLOP/s and interconnects.

What lives here: the vendor's numbers, each once. What may not: measured speeds, models.

Sources, NVIDIA's data sheets: A100 80GB (PB-10577), H100 (PB-11133), H200, HGX B200 and GB200 NVL72. Peaks are for
dense matrices in bfloat16, which is half of the data sheets' values with sparsity. Memory is what a process sees, which
is less than the name says: H200 139 GiB and B200 178 GiB, as `torch.cuda.get_device_properties` reports them
(https://github.com/pytorch/ao/pull/4002 has the B200's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB, GB = 2**30, 10**9
# Host memory per GPU: as in NVIDIA's DGX A100 with GPUs of 40 GB, 1 TB for eight. Machines with the other GPUs are sold
# with at least as much.
HOST_BYTES = 128 * GB
# Assumed: the part of it that processes, including data-loading ones, and the file system's cache need.
HOST_RESERVE = 0.2


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_bytes: available to a process, including the CUDA context.
        bf16_flops: peak of its matrix units in bfloat16, dense, FLOP/s.
        gpus_per_node: GPUs of one machine.
        nvlink_gpus: GPUs connected by NVLink.
        nvlink_bytes: bytes per second and direction, from each GPU to those connected by NVLink.
        network_bytes: bytes per second and direction, from each GPU to the others: one adapter each.
    """

    memory_bytes: int
    bf16_flops: float
    gpus_per_node: int
    nvlink_gpus: int
    nvlink_bytes: float
    network_bytes: float


GPUS: Mapping[str, Gpu] = {
    "A100-40GB": Gpu(int(39.3 * GIB), 312e12, 8, 8, 300e9, 25e9),
    "A100": Gpu(int(79.1 * GIB), 312e12, 8, 8, 300e9, 25e9),
    "H100": Gpu(int(79.1 * GIB), 989e12, 8, 8, 450e9, 50e9),
    "H200": Gpu(int(139.7 * GIB), 989e12, 8, 8, 450e9, 50e9),
    "B200": Gpu(int(178.3 * GIB), 2250e12, 8, 8, 900e9, 50e9),
    "GB200": Gpu(int(184.0 * GIB), 2500e12, 4, 72, 900e9, 50e9),
}


def gpu_of(name: str) -> Gpu:
    """The GPU of a name, in any case.

    Raises:
        ValueError: it is not in the table; the message lists the names.
    """
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise ValueError(f"unknown GPU {name!r}, expected one of {', '.join(GPUS)}; or give the memory instead")
    return found
