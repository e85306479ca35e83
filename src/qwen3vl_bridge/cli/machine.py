"""What a machine has that training and conversion need or can use."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class FoundGpu:
    """A GPU that torch sees.

    Attributes:
        name: its product name.
        memory: bytes.
        capability: CUDA compute capability.
    """

    name: str
    memory: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """The findings.

    Attributes:
        python: version.
        glibc: version of the C library; empty if it is another one.
        packages: versions of installed packages by name; None for those that are missing.
        cuda: version for which torch was built; None for none.
        nccl: version that comes with torch; None without CUDA.
        driver: whether NVIDIA's kernel driver is loaded.
        gpus: those that torch sees.
        cores: number that this process may use.
        memory, memory_free: bytes of the host, within the limit of its control group.
        shared_memory: free bytes of /dev/shm; None if it does not exist.
        disk_free: free bytes where results are written.
        open_files: soft and hard limit of open files of this process.
    """

    python: str
    glibc: str
    packages: Mapping[str, str | None]
    cuda: str | None
    nccl: str | None
    driver: bool
    gpus: tuple[FoundGpu, ...]
    cores: int
    memory: int
    memory_free: int
    shared_memory: int | None
    disk_free: int
    open_files: tuple[int, int]


def look(packages: Iterable[str], folder: Path) -> Machine:
    """Examine this machine.

    Args:
        packages: names of packages whose versions are read.
        folder: on the disk in question.

    Raises:
        OSError: the folder does not exist.
    """
    cuda, nccl, gpus = _cuda()
    memory, free = _memory()
    return Machine(
        python=platform.python_version(),
        glibc=platform.libc_ver()[1],
        packages={name: _version(name) for name in packages},
        cuda=cuda,
        nccl=nccl,
        driver=_DRIVER.exists(),
        gpus=gpus,
        cores=len(os.sched_getaffinity(0)),
        memory=memory,
        memory_free=free,
        shared_memory=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
        disk_free=shutil.disk_usage(folder).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
    )


def why_not(*modules: str) -> str | None:
    """Why modules cannot be imported, in one line; None if they can.

    A package may be installed and still fail: built for another torch, or without a library of the system.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken installation may raise anything
            return f"{module}: {type(error).__name__}: {str(error).partition(os.linesep)[0]}"
    return None


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _cuda() -> tuple[str | None, str | None, tuple[FoundGpu, ...]]:
    if why_not("torch") is not None:
        return None, None, ()
    import torch
    import torch.cuda.nccl

    if torch.version.cuda is None:
        return None, None, ()
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    return torch.version.cuda, nccl, tuple(FoundGpu(g.name, g.total_memory, f"{g.major}.{g.minor}") for g in gpus)


def _memory() -> tuple[int, int]:
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    amounts = {name: int(rest.split()[0]) * 1024 for name, rest in lines}
    whole, free = amounts["MemTotal"], amounts["MemAvailable"]
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        whole = min(whole, int(_CGROUP_LIMIT.read_text()))
    return whole, min(whole, free)
