"""`qwen3vl doctor`: check the hardware and packages of this machine, and say how to get missing requirements."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.planning.hardware import GIB, host_bytes
from qwen3vl_bridge.terminal import CommandParser, run, show

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_PACKAGE, _CANNOT_WORK = "qwen3vl-bridge", 1
# Purpose of optional packages.
_OPTIONAL = {
    "transformer-engine": "its layers and kernels on GPUs",
    "flash-attn": "one of Transformer Engine's attention backends",
    "megatron-energon": "reading WebDatasets",
    "av": "decoding video files",
    "nvidia-resiliency-ext": "asynchronous saves (checkpoint.async_strategy=nvrx), and restarts within a process",
}
# With an older C library pip installs version 0.4.1, which breaks the import of megatron-core.
_NEEDS_GLIBC = {"nvidia-resiliency-ext": "2.39"}
# These need a GPU and are compiled for the installed torch.
_COMPILED = ("transformer-engine", "flash-attn")
_MODULES = {
    "conversion": ("torch", "safetensors", "qwen3vl_bridge.checkpoint.commands"),
    "training": ("qwen3vl_bridge.training.config", "qwen3vl_bridge.training.step", "qwen3vl_recipes.cli"),
}
# Minimum values. Data workers pass images through shared memory. Every worker, rank and process group has open files.
_SHARED_MEMORY, _OPEN_FILES = GIB, 4096


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Print a report on this machine; return 1 if training or conversion cannot work, 2 for invalid input, else 0."""
    parser = CommandParser(
        prog=prog,
        description="Check this machine: packages and hardware, the backends that training will use, the functions of "
        "other libraries that this package replaces, and missing requirements with their solution. Imports "
        "Megatron-Bridge, which takes a while. The exit code is 1 if training or conversion cannot work.",
    )
    parser.add_argument("--path", type=Path, default=Path(), metavar="FOLDER",
                        help="report the free space of this folder's disk (default: the current folder)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    options = parser.parse_args(arguments)
    # PackageNotFoundError: this package is on the search path, but not installed.
    return run(lambda: _examine_and_show(options), OSError, importlib.metadata.PackageNotFoundError)


def _examine_and_show(options: argparse.Namespace) -> int:
    found = examine(options.path, (lambda _: None) if options.json else show)
    if options.json:
        show(json.dumps(found, indent=2))
    else:
        _print_result(found)
    return 0 if all(found["works"].values()) else _CANNOT_WORK


def examine(folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Examine this machine, and return the report that `--json` prints. Sizes are in bytes.

    Args:
        folder: a folder on the disk to check.
        tell: called with a text as soon as a section of the report is known, fast sections first.
    """
    from packaging.requirements import Requirement

    own, glibc = importlib.metadata.metadata(_PACKAGE), platform.libc_ver()[1]
    machine: dict[str, Any] = {"python": platform.python_version(), "glibc": glibc}
    machine["disk_free"] = shutil.disk_usage(folder).free
    machine["packages"] = packages([Requirement(text) for text in own.get_all("Requires-Dist") or ()], glibc)
    tell(_describe_packages(machine))
    machine |= find_hardware()
    tell(_describe_hardware(machine))
    if import_error("transformers") is None:
        from qwen3vl_bridge.upstream.library_logs import quiet

        quiet()
    show("\nimporting Megatron-Bridge, as a run does ...", error=True)
    broken = {work: import_error(*modules) for work, modules in _MODULES.items()}
    missing = list_missing(machine, own["Requires-Python"])
    advice = "see the message; `pip check` names packages that disagree"
    for work, why in broken.items():
        if why is not None:
            missing.append({"what": f"{work} cannot be imported: {why}", "get": advice, "fatal": True})
    return {
        "machine": machine,
        "used": None if broken["training"] else _used(machine),
        "replaced": None if broken["training"] else _replaced(),
        "missing": missing,
        "works": {"conversion": broken["conversion"] is None, "training": not any(one["fatal"] for one in missing)},
    }


def find_hardware() -> dict[str, Any]:
    """Return the hardware and limits of this machine; None for missing items. Imports torch to find GPUs."""
    cuda, nccl, gpus = None, None, []
    if import_error("torch") is None:
        import torch
        import torch.cuda.nccl

        if (cuda := torch.version.cuda) is not None:
            if torch.distributed.is_nccl_available():
                nccl = ".".join(map(str, torch.cuda.nccl.version()))
            found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
            gpus = [{"name": g.name, "memory": g.total_memory, "capability": f"{g.major}.{g.minor}"} for g in found]
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    amounts = {name: int(rest.split()[0]) * 1024 for name, rest in lines}
    memory, shm = host_bytes(), Path("/dev/shm")
    return {
        "cuda": cuda,
        "nccl": nccl,
        "driver": Path("/proc/driver/nvidia/version").exists(),
        "gpus": gpus,
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "memory_free": min(memory, amounts["MemAvailable"]),
        "shared_memory": shutil.disk_usage(shm).free if shm.is_dir() else None,
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    }


def import_error(*modules: str) -> str | None:
    """Return a line of text that says why modules cannot be imported; None if they can be.

    An installed package may fail to import, such as if it is compiled for another torch.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken installation can raise any exception
            return f"{module}: {type(error).__name__}: {str(error).partition(os.linesep)[0]}"
    return None


def version_of(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def packages(
    wanted: Sequence[Requirement], glibc: str, installed: Callable[[str], str | None] = version_of
) -> list[dict[str, Any]]:
    """Return required and optional packages: versions found and expected, purpose, and the command to install each.

    Args:
        wanted: the requirements that this package declares, including extras.
        glibc: version of the C library, empty if it is another library.
        installed: function from the name of a package to its version, or None if it is not installed.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    declared, result = {requirement.name for requirement in wanted}, []
    for requirement in (*wanted, *(Requirement(name) for name in _OPTIONAL if name not in declared)):
        name, versions, text = requirement.name, requirement.specifier, str(requirement).partition(";")[0].strip()
        needed = name in declared and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        if not needed and name not in _OPTIONAL:
            continue
        found = installed(name)
        get = f"pip install {'--no-build-isolation ' * (name in _COMPILED)}'{text}'"
        if (least := _NEEDS_GLIBC.get(name)) and not (glibc and Version(glibc) >= Version(least)):
            get = f"cannot be installed: it needs glibc {least}, this system has {glibc or 'another C library'}"
        result.append({
            "name": name, "found": found, "expected": str(versions), "needed": needed,
            "fits": found is not None and versions.contains(found, prereleases=True),
            "purpose": _OPTIONAL.get(name, ""), "get": get,
        })  # fmt: skip
    return result


def list_missing(machine: dict[str, Any], pythons: str) -> list[dict[str, Any]]:
    """Return the problems of a machine: what was found and expected, how to fix it, and whether it is fatal.

    Args:
        machine: entry "machine" of the report that `examine` returns.
        pythons: allowed versions of Python, such as ">=3.12".
    """
    from packaging.specifiers import SpecifierSet

    missing: list[dict[str, Any]] = []

    def add(what: str, get: str, *, fatal: bool = False) -> None:
        missing.append({"what": what, "get": get, "fatal": fatal})

    if not SpecifierSet(pythons).contains(machine["python"], prereleases=True):
        add(f"Python is {machine['python']}, expected {pythons}", f"install Python {pythons}", fatal=True)
    for one in machine["packages"]:
        if not one["fits"] and (machine["gpus"] or one["name"] not in _COMPILED):
            words = f"{one['name']} is {one['found'] or 'not installed'}, expected {one['expected'] or 'any version'}"
            add(words + f" (for {one['purpose']})" * bool(one["purpose"]), one["get"], fatal=one["needed"])
    if machine["driver"] and machine["cuda"] is None:
        words = "an NVIDIA driver is installed, but torch is built without CUDA: everything will run on the CPU"
        add(words, "install a torch built for CUDA")
    elif machine["cuda"] is not None and not machine["gpus"]:
        words = f"torch is built for CUDA {machine['cuda']} but sees no GPU: everything will run on the CPU"
        add(words, "install NVIDIA's driver, use `docker run --gpus all`, or correct CUDA_VISIBLE_DEVICES")
    if (shared := machine["shared_memory"]) is not None and shared < _SHARED_MEMORY:
        words = f"/dev/shm has {shared / GIB:.2f} GiB free; data workers pass images through it"
        add(words, "`docker run --shm-size=16g`, or dataset.num_workers=0")
    soft, hard = machine["open_files"]
    if soft < _OPEN_FILES:
        words = f"{soft} open files are allowed, which may be too few for many ranks and data workers"
        add(words, f"`ulimit -n {max(hard, _OPEN_FILES)}`")
    return missing


def _used(machine: dict[str, Any]) -> dict[str, str]:
    """Return the device, layer spec, kernels and collectives that training will use."""
    from qwen3vl_bridge.config.fields import default_transformer_impl

    import torch

    spec, cuda = default_transformer_impl(), torch.cuda.is_available()
    engine, flash = f"Transformer Engine {version_of('transformer-engine')}", version_of("flash-attn")
    kernels = f"flash-attn {flash}, or " * (flash is not None) + "attention of cuDNN or of Transformer Engine"
    uses_te, gpus = spec == "transformer_engine", machine["gpus"]
    return {
        "device": f"{len(gpus)} x {gpus[0]['name']}" if cuda else f"CPU, {machine['cores']} cores",
        "layer spec": f"transformer_engine: {engine}" if uses_te else "local: modules of torch and megatron-core",
        "attention": f"{engine}, which chooses {kernels}" if uses_te else "torch's own kernels",
        "collectives": f"NCCL {machine['nccl']}" if cuda else "gloo",
    }


def _replaced() -> list[dict[str, str]]:
    """Return the names in other libraries that this package has replaced, each with the condition for replacing it."""
    from qwen3vl_bridge.upstream.replacements import replaced

    return [{"name": one.name, "when": one.when} for one in sorted(replaced(), key=lambda one: (one.when, one.name))]


def _describe_replaced(replaced: list[dict[str, str]]) -> str:
    """Return the replaced functions as text, grouped by the condition under which they are replaced.

    All Megatron modules with a replaced `torch` or `dist` share one line: without CUDA, there are hundreds of them.
    """
    lines = dict[str, list[str]]()
    for one in replaced:
        module, _, name = one["name"].rpartition(".")
        shared = module.startswith("megatron.") and name in ("torch", "dist")
        line = f"{name} in every module of Megatron" if shared else one["name"]
        if line not in (names := lines.setdefault(one["when"], [])):
            names.append(line)
    return "".join(f"\n{when}:" + "".join(f"\n  {name}" for name in names) for when, names in lines.items())


def _describe_packages(machine: dict[str, Any]) -> str:
    lines = [f"{_PACKAGE} {importlib.metadata.version(_PACKAGE)}, Python {machine['python']}\n"]
    for one in machine["packages"]:
        state = "" if one["fits"] else "  needed" if one["needed"] else f"  for {one['purpose']}"
        words = f"{one['found'] or 'not installed':16} allowed: {one['expected'] or 'any'}"
        lines.append(f"{one['name']:24} {words}{state}")
    return "\n".join(lines)


def _describe_hardware(machine: dict[str, Any]) -> str:
    lines = {
        "GPUs": "; ".join(f"{one['name']}, {one['memory'] / GIB:.1f} GiB" for one in machine["gpus"]) or "none",
        "CUDA, NCCL": f"{machine['cuda'] or 'none'}, {machine['nccl'] or 'none'}",
        "host": f"{machine['cores']} cores, {machine['memory'] / GIB:.1f} GiB, {machine['memory_free'] / GIB:.1f} free",
        "/dev/shm": "none" if machine["shared_memory"] is None else f"{machine['shared_memory'] / GIB:.1f} GiB free",
        "disk": f"{machine['disk_free'] / GIB:.1f} GiB free",
        "open files": "{} of {}".format(*machine["open_files"]),
    }
    return "".join(f"\n{name:12} {text}" for name, text in lines.items())


def _print_result(found: dict[str, Any]) -> None:
    if found["used"]:
        show("\nUsed:" + "".join(f"\n{name:12} {text}" for name, text in found["used"].items()))
    if found["replaced"]:
        show("\nReplaced functions of other libraries:" + _describe_replaced(found["replaced"]))
    if found["missing"]:
        show("\nMissing:\n" + "\n".join(f"- {one['what']}\n  {one['get']}" for one in found["missing"]))
    works = found["works"]
    show("\n" + "; ".join(f"{work} {'works' if can else 'cannot work'}" for work, can in works.items()))
