"""`qwen3vl doctor`: what this machine has, what will be used, and what is missing and how to get it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.terminal import BAD_INPUT, show, show_anything

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_PACKAGE, _UNFIT = "qwen3vl-bridge", 1
GIB = 2**30
# Purpose of optional packages.
_OPTIONAL = {
    "transformer-engine": "its layers and kernels on GPUs",
    "flash-attn": "one of Transformer Engine's attention backends",
    "megatron-energon": "reading WebDatasets",
    "av": "decoding video files",
    "nvidia-resiliency-ext": "asynchronous saves (checkpoint.async_strategy=nvrx), and restarts within a process",
}
# Where the C library is older, pip installs 0.4.1, with which megatron-core cannot be imported.
_NEEDS_GLIBC = {"nvidia-resiliency-ext": "2.39"}
# Only for GPUs, and built against the installed torch.
_BUILT = ("transformer-engine", "flash-attn")
_MODULES = {
    "conversion": ("torch", "safetensors", "qwen3vl_bridge.checkpoint.commands"),
    "training": ("qwen3vl_bridge.training.config", "qwen3vl_bridge.training.step", "qwen3vl_recipes.cli"),
}
# Minimum values: batches of images go through shared memory, and every worker, rank and process group of a machine has
# open files and sockets.
_SHARED_MEMORY, _OPEN_FILES = GIB, 4096


@dataclass(frozen=True)
class FoundGpu:
    """A GPU that torch sees; memory in bytes, the capability is CUDA's."""

    name: str
    memory: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """What a machine has; sizes in bytes.

    Attributes:
        glibc: version of the C library; empty if it is another one.
        packages: versions of installed packages by name; None for those that are missing.
        cuda: version for which torch was built; None for none.
        nccl: version that comes with torch; None without CUDA.
        driver: whether NVIDIA's kernel driver is loaded.
        cores: number that this process may use.
        memory, memory_free: of the host, within the limit of its control group.
        shared_memory: free part of /dev/shm; None if it does not exist.
        disk_free: where results are written.
        open_files: soft and hard limit of this process.
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


@dataclass(frozen=True)
class Package:
    """A package; `expected` are its allowed versions, empty for any, and `get` is a command that installs it."""

    name: str
    found: str | None
    expected: str
    needed: bool
    fits: bool
    purpose: str
    get: str


@dataclass(frozen=True)
class Missing:
    """A problem: what was found and expected, how to solve it, and whether training or conversion is impossible."""

    what: str
    get: str
    fatal: bool


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Examine this machine and report; exit status 1 if training or conversion cannot work here, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show what this machine has, what will be used, what is missing and how to get it. Imports "
        "Megatron-Bridge, which takes a while. The exit status is 1 if training or conversion cannot work.",
    )
    parser.add_argument("--path", type=Path, default=Path(), metavar="FOLDER",
                        help="report the free space of this folder's disk (default: the current folder)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    options = parser.parse_args(arguments)
    show_anything()
    try:
        found = examine(options.path)
    except (OSError, importlib.metadata.PackageNotFoundError) as error:  # the latter: found by a path, not installed
        show(f"error: {error}", error=True)
        return BAD_INPUT
    if options.json:
        show(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0 if all(found["works"].values()) else _UNFIT


def examine(folder: Path) -> dict[str, Any]:
    """The output of `--json`."""
    from packaging.requirements import Requirement

    own = importlib.metadata.metadata(_PACKAGE)
    wanted = [Requirement(text) for text in own.get_all("Requires-Dist") or ()]
    looked = look({*(one.name for one in wanted), *_OPTIONAL}, folder)
    known = packages(wanted, looked)
    if why_not("transformers") is None:
        from qwen3vl_bridge.compat.library_logs import quiet

        quiet()
    broken = {work: why_not(*modules) for work, modules in _MODULES.items()}
    missing = _missing(known, looked, own["Requires-Python"])
    advice = "see the message; `pip check` names packages that disagree"
    for work, why in broken.items():
        if why is not None:
            missing.append(Missing(f"{work} cannot be imported: {why}", advice, fatal=True))
    stops = any(one.fatal for one in missing)
    return {
        "machine": dataclasses.asdict(looked) | {"packages": [dataclasses.asdict(one) for one in known]},
        "used": None if broken["training"] else _used(looked),
        "missing": [dataclasses.asdict(one) for one in missing],
        "works": {"conversion": broken["conversion"] is None, "training": not stops},
    }


def look(packages: Iterable[str], folder: Path) -> Machine:
    """This machine, with the versions of some packages and the disk of a folder.

    Raises:
        OSError: the folder does not exist.
    """
    cuda, nccl, gpus = _cuda()
    memory, free = _memory()
    shm = Path("/dev/shm")
    return Machine(
        python=platform.python_version(),
        glibc=platform.libc_ver()[1],
        packages={name: _version(name) for name in packages},
        cuda=cuda,
        nccl=nccl,
        driver=Path("/proc/driver/nvidia/version").exists(),
        gpus=gpus,
        cores=len(os.sched_getaffinity(0)),
        memory=memory,
        memory_free=free,
        shared_memory=shutil.disk_usage(shm).free if shm.is_dir() else None,
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
        whole = min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return whole, min(whole, free)


def packages(wanted: Sequence[Requirement], machine: Machine) -> list[Package]:
    """Required and optional packages, of requirements as declared by this package, including extras."""
    from packaging.version import Version

    listed = []
    for requirement in wanted:
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if needed or requirement.name in _OPTIONAL:
            listed.append((requirement.name, str(requirement).partition(";")[0].strip(), requirement.specifier, needed))
    declared = {name for name, *_ in listed}
    listed += [(name, name, None, False) for name in _OPTIONAL if name not in declared]
    result = []
    for name, text, versions, needed in listed:
        version = machine.packages[name]
        fits = version is not None and (versions is None or versions.contains(version, prereleases=True))
        how = "--no-build-isolation " if name in _BUILT else ""
        get = f"pip install {how}'{text}'"
        if (glibc := _NEEDS_GLIBC.get(name)) and not (machine.glibc and Version(machine.glibc) >= Version(glibc)):
            get = f"nothing on this system: it needs glibc {glibc}, here is {machine.glibc or 'another C library'}"
        result.append(Package(name, version, str(versions or ""), needed, fits, _OPTIONAL.get(name, ""), get))
    return result


def _missing(known: Sequence[Package], machine: Machine, pythons: str) -> list[Missing]:
    from packaging.specifiers import SpecifierSet

    missing = []
    if not SpecifierSet(pythons).contains(machine.python, prereleases=True):
        missing.append(Missing(f"Python is {machine.python}, expected {pythons}", f"a Python {pythons}", fatal=True))
    for package in known:
        if not package.fits and (machine.gpus or package.name not in _BUILT):
            words = (
                f"{package.name} is {package.found or 'not installed'}, expected {package.expected or 'any version'}"
            )
            words += f" (for {package.purpose})" if package.purpose else ""
            missing.append(Missing(words, package.get, fatal=package.needed))
    if machine.driver and machine.cuda is None:
        words = "an NVIDIA driver is installed, but torch is built without CUDA: everything will run on the CPU"
        missing.append(Missing(words, "install a torch built for CUDA", fatal=False))
    elif machine.cuda is not None and not machine.gpus:
        words = f"torch is built for CUDA {machine.cuda} but sees no GPU: everything will run on the CPU"
        get = "install NVIDIA's driver, use `docker run --gpus all`, or correct CUDA_VISIBLE_DEVICES"
        missing.append(Missing(words, get, fatal=False))
    if (shared := machine.shared_memory) is not None and shared < _SHARED_MEMORY:
        words = f"/dev/shm has {shared / GIB:.2f} GiB free; data workers pass images through it"
        missing.append(Missing(words, "`docker run --shm-size=16g`, or dataset.num_workers=0", fatal=False))
    if machine.open_files[0] < _OPEN_FILES:
        words = f"{machine.open_files[0]} open files are allowed, which is few for many ranks and data workers"
        missing.append(Missing(words, f"`ulimit -n {max(machine.open_files[1], _OPEN_FILES)}`", fatal=False))
    return missing


def _used(machine: Machine) -> dict[str, str]:
    """What training will use here, from the defaults of the code that chooses."""
    from qwen3vl_bridge.models.settings import default_transformer_impl

    import torch

    spec, cuda = default_transformer_impl(), torch.cuda.is_available()
    engine = f"Transformer Engine {machine.packages['transformer-engine']}"
    flash = machine.packages["flash-attn"]
    kernels = (
        f"flash-attn {flash}, or attention of cuDNN or of Transformer Engine"
        if flash
        else "attention of cuDNN or of Transformer Engine"
    )
    whole = spec == "transformer_engine"
    return {
        "device": f"{len(machine.gpus)} x {machine.gpus[0].name}" if cuda else f"CPU, {machine.cores} cores",
        "layer spec": f"transformer_engine: {engine}" if whole else "local: modules of torch and megatron-core",
        "attention": f"{engine}, which chooses {kernels}" if whole else "torch's own kernels",
        "collectives": f"NCCL {machine.nccl}" if cuda else "gloo",
        "loop": "Megatron-Bridge's",
        "conversion": "the CPU; processes of torchrun share the work",
    }


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, machine = Console(), found["machine"]
    table = Table(title=f"{_PACKAGE} {importlib.metadata.version(_PACKAGE)}, Python {machine['python']}")
    for name in ("package", "found", "allowed", ""):
        table.add_column(name, overflow="fold")
    for one in machine["packages"]:
        state = "" if one["fits"] else "needed" if one["needed"] else f"for {one['purpose']}"
        style = None if one["fits"] else "red" if one["needed"] else "yellow"
        table.add_row(one["name"], one["found"] or "not installed", one["expected"] or "any", state, style=style)
    console.print(table)
    lines = {
        "GPUs": "; ".join(f"{one['name']}, {one['memory'] / GIB:.1f} GiB" for one in machine["gpus"]) or "none",
        "CUDA, NCCL": f"{machine['cuda'] or 'none'}, {machine['nccl'] or 'none'}",
        "host": f"{machine['cores']} cores, {machine['memory'] / GIB:.1f} GiB, {machine['memory_free'] / GIB:.1f} free",
        "/dev/shm": "none" if machine["shared_memory"] is None else f"{machine['shared_memory'] / GIB:.1f} GiB free",
        "disk": f"{machine['disk_free'] / GIB:.1f} GiB free",
        "open files": "{} of {}".format(*machine["open_files"]),
    }
    for name, text in (lines | (found["used"] or {})).items():
        if name == "device":
            show("\nUsed:")
        show(f"{name:12} {text}")
    if found["missing"]:
        show("\nMissing:")
    for one in found["missing"]:
        style = "red" if one["fatal"] else None
        console.print(f"- {one['what']}\n  {one['get']}", style=style, highlight=False, markup=False)
    works = found["works"]
    show("\n" + "; ".join(f"{work} {'works' if can else 'cannot work'}" for work, can in works.items()))
