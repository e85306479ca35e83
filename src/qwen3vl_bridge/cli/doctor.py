"""`qwen3vl doctor`: what this machine has, what will be used, and what is missing and how to get it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.terminal import BAD_INPUT, show, show_anything

if TYPE_CHECKING:
    from qwen3vl_bridge.cli.machine import Machine

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
class Package:
    """A required or optional package.

    Attributes:
        name: of its distribution.
        found: version, or None.
        expected: allowed versions; empty for any.
        needed: required for training.
        fits: it is installed, in an allowed version.
        purpose: of an optional package.
        get: a command that installs it.
    """

    name: str
    found: str | None
    expected: str
    needed: bool
    fits: bool
    purpose: str
    get: str


@dataclass(frozen=True)
class Missing:
    """A problem.

    Attributes:
        what: what was found, what was expected, and the consequence.
        get: how to solve it.
        fatal: training or conversion is impossible with it.
    """

    what: str
    get: str
    fatal: bool


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Examine this machine and report.

    Args:
        arguments: as on the command line; None for those of the process.
        prog: the program's name, for messages; None for that of the process.

    Returns:
        Exit status: 0, 1 if training or conversion cannot work here, 2 for bad input.
    """
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
    from qwen3vl_bridge.cli import machine

    from packaging.requirements import Requirement

    own = importlib.metadata.metadata(_PACKAGE)
    wanted = [Requirement(text) for text in own.get_all("Requires-Dist") or ()]
    looked = machine.look({*(one.name for one in wanted), *_OPTIONAL}, folder)
    known = packages(wanted, looked)
    if machine.why_not("transformers") is None:
        from qwen3vl_bridge.compat.library_logs import quiet

        quiet()
    broken = {work: machine.why_not(*modules) for work, modules in _MODULES.items()}
    missing = _missing(known, looked, own["Requires-Python"])
    missing += [_broken(work, why) for work, why in broken.items() if why is not None]
    stops = any(one.fatal for one in missing)
    return {
        "machine": dataclasses.asdict(looked) | {"packages": [dataclasses.asdict(one) for one in known]},
        "used": None if broken["training"] else _used(looked),
        "missing": [dataclasses.asdict(one) for one in missing],
        "works": {"conversion": broken["conversion"] is None, "training": not stops},
    }


def packages(wanted: Sequence[Requirement], found: Machine) -> list[Package]:
    """Required packages, and optional ones.

    Args:
        wanted: requirements as declared by the package, including extras.
        found: the machine.
    """
    from packaging.version import Version

    listed = []
    for one in wanted:
        needed = one.marker is None or one.marker.evaluate({"extra": ""})
        if needed or one.name in _OPTIONAL:
            listed.append((one.name, str(one).partition(";")[0].strip(), one.specifier, needed))
    declared = {name for name, *_ in listed}
    listed += [(name, name, None, False) for name in _OPTIONAL if name not in declared]
    result = []
    for name, text, versions, needed in listed:
        version = found.packages[name]
        fits = version is not None and (versions is None or versions.contains(version, prereleases=True))
        how = "--no-build-isolation " if name in _BUILT else ""
        get = f"pip install {how}'{text}'"
        if (glibc := _NEEDS_GLIBC.get(name)) and not (found.glibc and Version(found.glibc) >= Version(glibc)):
            get = f"nothing on this system: it needs glibc {glibc}, here is {found.glibc or 'another C library'}"
        result.append(Package(name, version, str(versions or ""), needed, fits, _OPTIONAL.get(name, ""), get))
    return result


def _missing(known: Sequence[Package], found: Machine, pythons: str) -> list[Missing]:
    from packaging.specifiers import SpecifierSet

    result = []
    if not SpecifierSet(pythons).contains(found.python, prereleases=True):
        result.append(Missing(f"Python is {found.python}, expected {pythons}", f"a Python {pythons}", fatal=True))
    for one in known:
        if not one.fits and (found.gpus or one.name not in _BUILT):
            words = f"{one.name} is {one.found or 'not installed'}, expected {one.expected or 'any version'}"
            words += f" (for {one.purpose})" if one.purpose else ""
            result.append(Missing(words, one.get, fatal=one.needed))
    if found.driver and found.cuda is None:
        words = "an NVIDIA driver is installed, but torch is built without CUDA: everything will run on the CPU"
        result.append(Missing(words, "install a torch built for CUDA", fatal=False))
    elif found.cuda is not None and not found.gpus:
        words = f"torch is built for CUDA {found.cuda} but sees no GPU: everything will run on the CPU"
        get = "install NVIDIA's driver, use `docker run --gpus all`, or correct CUDA_VISIBLE_DEVICES"
        result.append(Missing(words, get, fatal=False))
    if (shared := found.shared_memory) is not None and shared < _SHARED_MEMORY:
        words = f"/dev/shm has {shared / GIB:.2f} GiB free; data workers pass images through it"
        result.append(Missing(words, "`docker run --shm-size=16g`, or dataset.num_workers=0", fatal=False))
    if found.open_files[0] < _OPEN_FILES:
        words = f"{found.open_files[0]} open files are allowed, which is few for many ranks and data workers"
        result.append(Missing(words, f"`ulimit -n {max(found.open_files[1], _OPEN_FILES)}`", fatal=False))
    return result


def _broken(work: str, why: str) -> Missing:
    get = "see the message; `pip check` names packages that disagree"
    return Missing(f"{work} cannot be imported: {why}", get, fatal=True)


def _used(found: Machine) -> dict[str, str]:
    """What training will use here, from the defaults of the code that chooses."""
    from qwen3vl_bridge.models.settings import default_transformer_impl

    import torch

    spec, cuda = default_transformer_impl(), torch.cuda.is_available()
    engine = f"Transformer Engine {found.packages['transformer-engine']}"
    flash = found.packages["flash-attn"]
    kernels = (
        f"flash-attn {flash}, or attention of cuDNN or of Transformer Engine"
        if flash
        else "attention of cuDNN or of Transformer Engine"
    )
    whole = spec == "transformer_engine"
    return {
        "device": f"{len(found.gpus)} x {found.gpus[0].name}" if cuda else f"CPU, {found.cores} cores",
        "layer spec": f"transformer_engine: {engine}" if whole else "local: modules of torch and megatron-core",
        "attention": f"{engine}, which chooses {kernels}" if whole else "torch's own kernels",
        "collectives": f"NCCL {found.nccl}" if cuda else "gloo",
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
