"""The fake GPU: builds the libraries of `fake_gpu/`, starts programs with them, and reads what they log.

Under it an unchanged CUDA build of torch finds one H100, or a GPU of another compute capability, that computes nothing:
allocations have their real size, Triton and inductor compile for it, and kernels, matrix products, collectives, copies
and waits of the host are written to a log. What is read from a kernel's result is garbage; cuDNN cannot be created.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "fake_gpu"
_PREFIXES = ("__cuda", "cuda", "cublas", "cusolver", "cusparse", "nccl")
# Of linear algebra: a letter for the type comes first, or Ex last. Their first argument is a handle.
_ALGEBRA = re.compile(r"cublas([SDCZ](?!et)|I[sdcz])[a-z].*|cublas[A-Z][a-z]+Ex")
_TORCH = ("torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg")


class FakeGPUError(RuntimeError):
    """The fake GPU cannot be built here; the message says what is missing."""


def build(folder: str | os.PathLike[str]) -> Path:
    """Build the libraries in a folder of their own, unless they are there.

    Returns:
        The folder for `environment`: `folder / <digest of sources and torch>`.

    Raises:
        FakeGPUError: without gcc, nm, the CUDA build of torch or CUDA's runtime headers.
    """
    site = Path(sysconfig.get_path("purelib"))
    libraries = [path for name in _TORCH if (path := site / f"torch/lib/lib{name}.so").exists()]
    if (engine := importlib.util.find_spec("transformer_engine")) is not None and engine.origin:
        installed = Path(engine.origin).parent  # which need not be beside torch
        libraries += sorted([*installed.rglob("*.so"), *installed.parent.glob("transformer_engine_torch*.so")])
    if not (site / "torch/lib/libtorch_cuda.so").exists():
        raise FakeGPUError("torch is installed without CUDA: the fake GPU needs its CUDA build")
    if missing := [program for program in ("gcc", "nm") if shutil.which(program) is None]:
        raise FakeGPUError(f"{' and '.join(missing)} not found: the fake GPU is built from C")
    sources = [Path(__file__), *sorted(SOURCES.iterdir())]
    key = [path.read_bytes() for path in sources] + [f"{path} {path.stat().st_size}".encode() for path in libraries]
    built = Path(folder).resolve() / hashlib.sha256(b"\0".join(key)).hexdigest()[:16]
    if (built / "libfakegpu.so").exists():
        return built

    built.parent.mkdir(parents=True, exist_ok=True)
    aside = built.with_name(f"{built.name}.{os.getpid()}")
    aside.mkdir()
    headers = [f"-I{path}" for path in _headers(site)]
    runtime = [str(SOURCES / name) for name in ("log.c", "memory.c", "runtime.c", "libraries.c")]
    _gcc(aside, *headers, "-o", "defined.so", *runtime)
    wanted = {name for path in libraries for name in _symbols(path, "--undefined-only") if name.startswith(_PREFIXES)}
    generated = sorted(wanted - _symbols(aside / "defined.so", "--defined-only"))
    lines = ["int other_product(const char *, void *);", *map(_generated, generated)]
    (aside / "generated.c").write_text("\n".join(lines))
    _gcc(aside, *headers, "-o", "libfakegpu.so", *runtime, "generated.c")
    _gcc(aside, "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", str(SOURCES / "driver.c"))
    _gcc(aside, "-Wl,-soname,libnvidia-ml.so.1", "-o", "libnvidia-ml.so.1", str(SOURCES / "nvml.c"))
    (aside / "libcuda.so").symlink_to("libcuda.so.1")
    try:
        aside.rename(built)
    except OSError:  # another process was faster
        shutil.rmtree(aside)
    return built


def _generated(name: str) -> str:
    if _ALGEBRA.fullmatch(name):
        return f'int {name}(void *handle) {{ return other_product("{name}", handle); }}'
    return f"long {name}(void) {{ return 0; }}"


def _headers(site: Path) -> list[Path]:
    """Folders of CUDA's runtime headers; torch's own packages lack `crt/`, which Triton's and a toolkit have."""
    runtime = [path for path in sorted(site.glob("nvidia/*/include")) if (path / "cuda_runtime_api.h").exists()]
    others = [site / "triton/backends/nvidia/include", *sorted(Path("/usr/local").glob("cuda*/include"))]
    complete = [path for path in [*runtime, *others] if (path / "crt" / "host_defines.h").exists()]
    if not complete or not (runtime or (complete[0] / "cuda_runtime_api.h").exists()):
        raise FakeGPUError("crt/host_defines.h not found: install Triton, a CUDA toolkit or nvidia-cuda-crt")
    return [*runtime[:1], complete[0]]


def _gcc(folder: Path, *arguments: str) -> None:
    command = ["gcc", "-O1", "-w", "-fPIC", "-shared", *arguments, "-ldl", "-lpthread"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise FakeGPUError(f"gcc could not build the fake GPU: {done.stderr[-2000:]}")


def _symbols(library: Path, which: str) -> set[str]:
    lines = subprocess.run(["nm", "-D", which, library], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line}


def environment(built: Path, log: Path | None = None, gib: float = 80.0, major: int = 9) -> dict[str, str]:
    """The variables that start a program with the fake GPU, over those of this process.

    Args:
        log: prefix of the log; each process writes `<log>.<its id>`. Without it nothing is logged.
        gib: size of the GPU's memory in GiB.
        major: its compute capability: 9 for Hopper, 10 for Blackwell.
    """
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "FAKE_GPU_LOG")
    }
    libraries = (
        f"{built}{os.pathsep}{os.environ['LD_LIBRARY_PATH']}" if os.environ.get("LD_LIBRARY_PATH") else str(built)
    )
    ours = {
        "LD_PRELOAD": str(built / "libfakegpu.so"),
        "LD_LIBRARY_PATH": libraries,
        "TRITON_LIBCUDA_PATH": str(built),
        "FAKE_GPU_GIB": str(gib),
        "FAKE_GPU_MAJOR": str(major),
    }
    return inherited | ours | ({"FAKE_GPU_LOG": str(log)} if log else {})


@dataclass(frozen=True)
class Event:
    """One line of a log.

    Attributes:
        kind: "kernel" (of a library), "triton", "gemm", "nccl", "copy", "memset", "malloc", "free", "wait" (the host
            waits), "record" and "wait_event" (of a stream), or "mark".
        name: the kernel's mangled name; the product's function, type, m, n, k and number of matrices; the collective;
            "host to device" and the like; the function that waits; the mark's text.
        amount: bytes; of a product floating-point operations; of an event its handle.
        stream: the stream's handle, 0 for the default stream.
    """

    kind: str
    name: str
    amount: int
    stream: int


def read_log(log: Path) -> list[Event]:
    """The events of all processes that wrote a log of this prefix, in their order."""
    return [event for path in sorted(log.parent.glob(f"{log.name}.*")) for event in _events(path)]


def _events(path: Path) -> Iterator[Event]:
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):  # the process is still writing it
            return
        kind, stream, amount, name = line[:-1].split("\t", 3)
        yield Event(kind, name, int(amount), int(stream))


def mark(text: str) -> None:
    """In a process with the fake GPU: write a line of one's own to the log, for `between`."""
    ctypes.CDLL(None).fake_gpu_mark(text.encode())


@contextmanager
def on_wait(function: Callable[[bytes], None]) -> Iterator[None]:
    """In a process with the fake GPU: call a function where the host waits in the block, below the line that waits.

    Args:
        function: takes the name of the CUDA function that waits.
    """
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(function)  # no frame of this module comes between
    library = ctypes.CDLL(None)
    library.fake_gpu_on_wait(callback)
    try:
        yield
    finally:
        library.fake_gpu_on_wait(None)


def between(events: list[Event], start: str, end: str) -> list[Event]:
    """The events after the mark `start` and before the mark `end`."""
    marks = {event.name: i for i, event in enumerate(events) if event.kind == "mark"}
    return events[marks[start] + 1 : marks[end]]
