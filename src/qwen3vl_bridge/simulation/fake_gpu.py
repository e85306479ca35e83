"""Build the libraries of the fake GPU, start programs with them, and read their logs.

With the fake GPU an unchanged CUDA build of torch finds one H100, or a GPU of another compute capability. It computes
nothing: results of kernels are garbage, and cuDNN does not initialize. Allocations have their real size, and Triton and
inductor compile for it. Kernels, GEMMs, collectives, copies and host-device synchronizations are logged.
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
# GEMMs and other linear algebra, such as cublasSdot or cublasGemmEx. The first argument is a handle.
_ALGEBRA = re.compile(r"cublas([SDCZ](?!et)|I[sdcz])[a-z].*|cublas[A-Z][a-z]+Ex")
_TORCH = ("torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg")


class FakeGPUError(RuntimeError):
    """Raised if the fake GPU cannot be built; the message says what is missing."""


def build(folder: str | os.PathLike[str]) -> Path:
    """Build the libraries of the fake GPU in a subfolder of `folder`, unless they exist there.

    Returns:
        The subfolder, for `environment`. Its name is a hash of the sources and of the installed torch.

    Raises:
        FakeGPUError: gcc, nm, the CUDA build of torch or CUDA's runtime headers are missing.
    """
    site = Path(sysconfig.get_path("purelib"))
    libraries = [path for name in _TORCH if (path := site / f"torch/lib/lib{name}.so").exists()]
    if (engine := importlib.util.find_spec("transformer_engine")) is not None and engine.origin:
        installed = Path(engine.origin).parent  # may be outside of torch's site-packages
        libraries += sorted([*installed.rglob("*.so"), *installed.parent.glob("transformer_engine_torch*.so")])
    if not (site / "torch/lib/libtorch_cuda.so").exists():
        raise FakeGPUError("torch is installed without CUDA, expected a build with CUDA for the fake GPU: install one")
    if missing := [program for program in ("gcc", "nm") if shutil.which(program) is None]:
        raise FakeGPUError(f"{' and '.join(missing)} not found: the fake GPU is built from C. Install a C compiler")
    sources = [Path(__file__), *sorted(SOURCES.iterdir())]
    contents = [path.read_bytes() for path in sources] + [
        f"{path} {path.stat().st_size}".encode() for path in libraries
    ]
    built = Path(folder).resolve() / hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    if (built / "libfakegpu.so").exists():
        return built

    built.parent.mkdir(parents=True, exist_ok=True)
    staging = built.with_name(f"{built.name}.{os.getpid()}")
    staging.mkdir()
    headers = [f"-I{path}" for path in _headers(site)]
    runtime = [str(SOURCES / name) for name in ("log.c", "memory.c", "runtime.c", "libraries.c")]
    _gcc(staging, *headers, "-o", "defined.so", *runtime)
    wanted = {name for path in libraries for name in _symbols(path, "--undefined-only") if name.startswith(_PREFIXES)}
    generated = sorted(wanted - _symbols(staging / "defined.so", "--defined-only"))
    lines = ["int other_product(const char *, void *);", *map(_stub, generated)]
    (staging / "generated.c").write_text("\n".join(lines))
    _gcc(staging, *headers, "-o", "libfakegpu.so", *runtime, "generated.c")
    _gcc(staging, "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", str(SOURCES / "driver.c"))
    _gcc(staging, "-Wl,-soname,libnvidia-ml.so.1", "-o", "libnvidia-ml.so.1", str(SOURCES / "nvml.c"))
    (staging / "libcuda.so").symlink_to("libcuda.so.1")
    try:
        staging.rename(built)
    except OSError:  # another process was faster
        shutil.rmtree(staging)
    return built


def _stub(name: str) -> str:
    """Return the C code of a CUDA function: it logs a GEMM if `name` is the name of a GEMM, and else does nothing."""
    if _ALGEBRA.fullmatch(name):
        return f'int {name}(void *handle) {{ return other_product("{name}", handle); }}'
    return f"long {name}(void) {{ return 0; }}"


def _headers(site: Path) -> list[Path]:
    """Return the folders of CUDA's runtime headers. torch's packages lack `crt/`; Triton and CUDA toolkits have it."""
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
    """Return the environment variables of this process plus those that start a program with the fake GPU.

    Args:
        log: prefix of the log files; each process writes `<log>.<process id>`. None to log nothing.
        gib: GPU memory in GiB.
        major: major version of the compute capability: 9 for Hopper, 10 for Blackwell.
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
        kind: "kernel" (of a library), "triton", "gemm", "nccl", "copy", "memset", "malloc", "free", "sync" (a
            host-device synchronization), "record" and "wait_event" (of CUDA events), or "mark".
        name: mangled name of a kernel; function, dtype, m, n, k and batch size of a GEMM; the collective; "host to
            device" and the like; the synchronizing function; the text of a mark.
        amount: bytes; FLOPs of a GEMM; handle of a CUDA event.
        stream: handle of the stream, 0 for the default stream.
    """

    kind: str
    name: str
    amount: int
    stream: int


def read_log(log: Path) -> list[Event]:
    """Return the events in all log files with the prefix `log`, one process after the other."""
    return [event for path in sorted(log.parent.glob(f"{log.name}.*")) for event in _events(path)]


def _events(path: Path) -> Iterator[Event]:
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):  # the process is still writing it
            return
        kind, stream, amount, name = line[:-1].split("\t", 3)
        yield Event(kind, name, int(amount), int(stream))


def mark(text: str) -> None:
    """Write a marker to the fake GPU's log. `between` returns the events between two markers."""
    ctypes.CDLL(None).fake_gpu_mark(text.encode())


@contextmanager
def on_sync(function: Callable[[bytes], None]) -> Iterator[None]:
    """Call a function at each host-device synchronization inside the `with` block.

    It is called while the line that synchronizes is on the stack. The process must run on the fake GPU.

    Args:
        function: function to call with the name of the CUDA function that synchronizes.
    """
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(function)  # adds no Python frame
    library = ctypes.CDLL(None)
    library.fake_gpu_on_sync(callback)
    try:
        yield
    finally:
        library.fake_gpu_on_sync(None)


def between(events: list[Event], start: str, end: str) -> list[Event]:
    """Return the events between the marks `start` and `end`."""
    marks = {event.name: i for i, event in enumerate(events) if event.kind == "mark"}
    return events[marks[start] + 1 : marks[end]]
