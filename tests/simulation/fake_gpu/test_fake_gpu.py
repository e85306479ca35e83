"""The fake GPU logs kernels, GEMMs, copies, synchronizations, collectives and memory."""

import subprocess
import sys

import pytest

# Lines that synchronize (True): reading a value, copies of pageable memory. Others stay on the GPU or use pinned
# memory.
SYNCS = {
    "x.sum().item()": True, "bool((x > 0).any())": True, "x.cpu()": True, "host.to('cuda')": True,
    "torch.tensor([1.0, 2.0], device='cuda')": True, "torch.cuda.synchronize()": True,
    "pinned.to('cuda', non_blocking=True)": False, "x.to(torch.bfloat16).add_(1).softmax(-1)": False, "x[index]": False,
    "torch.zeros(8, device='cuda').copy_(x[0], non_blocking=True)": False, "torch.arange(8, device='cuda')": False,
}  # fmt: skip

KERNEL = """
import triton, triton.language as tl

@triton.jit
def double_all(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
"""

PROGRAM = """
import os
import torch.distributed as dist

folder, *lines = sys.argv[1:]
result["device"] = [torch.cuda.get_device_name(), *torch.cuda.get_device_capability()]
random = torch.randn(1000)
result["copies are real"] = torch.equal(random.cuda().cpu(), random)

mark("products")
x, w = torch.empty(32, 64, device="cuda"), torch.empty(64, 128, device="cuda")
side = torch.cuda.Stream()
x @ w
x.bfloat16() @ w.bfloat16()
torch.bmm(x.half()[None].expand(4, -1, -1), w.half()[None].expand(4, -1, -1))
with torch.cuda.stream(side):
    torch.nn.functional.linear(x.bfloat16(), w.T.bfloat16(), w[0].bfloat16())
mark("end of products")
result["side"] = side.cuda_stream
mark("other products")
torch.dot(x[0], x[1])
doubles = torch.ones(2, 4, 4, dtype=torch.float64, device="cuda")
torch.bmm(doubles, doubles)
torch.linalg.solve_triangular(doubles, doubles, upper=True)
mark("end of other products")

x, index = torch.ones(8, 8, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
host, pinned = torch.ones(8), torch.ones(8).pin_memory()
for line in lines:
    mark(line)
    exec(line)
    mark("end of " + line)

def read(x):
    return x.item()

syncing = result["syncing"] = []
with on_sync(lambda _: syncing.append(sys._getframe(1).f_code.co_name)):
    x + 1
    read(x[0, 0])
read(x[0, 0])

sys.path.insert(0, folder)
from double import double_all
mark("triton")
kernel = double_all[(1,)](torch.ones(100, device="cuda"), 100, BLOCK=128)
mark("end of triton")
result["target"] = kernel.metadata.target.arch

dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
x = torch.ones(256, dtype=torch.bfloat16, device="cuda")
dist.all_reduce(x)
mark("collectives")
dist.all_reduce(x)
dist.broadcast(x, 0)
mark("end of collectives")
dist.destroy_process_group()

if os.fork() == 0:
    mark("child")
    os._exit(0)
os.wait()
"""

MEMORY = """
result["capability"] = torch.cuda.get_device_capability()
before = torch.cuda.mem_get_info()[0]
x = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
result["taken"] = before - torch.cuda.mem_get_info()[0]
y = torch.empty_like(x)
del y
result["allocated"] = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
try:
    torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    result["error"] = str(error)
"""


@pytest.fixture(scope="module")
def run(on_fake_gpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    (folder / "double.py").write_text(KERNEL)
    return on_fake_gpu(PROGRAM, str(folder), *SYNCS)


@pytest.mark.slow
def test_fake_gpu_reports_h100_and_copies_real_values(run):
    assert run.result["device"] == ["NVIDIA H100 80GB HBM3", 9, 0]
    assert run.result["copies are real"]


def test_fake_gpu_logs_gemms_with_sizes_and_streams(run):
    events = run.between("products", "end of products")
    products = [event for event in events if event.kind == "gemm"]
    flops = 2 * 32 * 64 * 128
    assert [event.name.split(" ", 1)[1] for event in products] == [
        "float32 128 32 64 1", "bfloat16 128 32 64 1", "float16 128 32 64 4", "bfloat16 128 32 64 1",
    ]  # fmt: skip
    assert [event.amount for event in products] == [flops, flops, 4 * flops, flops]
    assert [event.stream for event in products] == [0, 0, 0, run.result["side"]]
    casts = [event for event in events if event.kind == "kernel" and event.stream == run.result["side"]]
    assert len(casts) == 3 and all("bfloat16_copy_kernel" in event.name for event in casts)
    assert all(event.kind != "sync" for event in events)


def test_fake_gpu_logs_cublas_calls_of_dot_bmm_and_triangular_solve(run):
    events = run.between("other products", "end of other products")
    names = [event.name.split()[0] for event in events if event.kind == "gemm"]
    assert names == ["cublasSdot_v2", "cublasDgemmStridedBatched", "cublasDtrsmBatched"]


@pytest.mark.parametrize("line", SYNCS)
def test_fake_gpu_logs_sync_only_for_synchronizing_lines(run, line):
    assert any(event.kind == "sync" for event in run.between(line, f"end of {line}")) == SYNCS[line]


def test_on_sync_callback_runs_on_stack_of_synchronizing_line(run):
    assert run.result["syncing"] == ["read"]


def test_fake_gpu_compiles_triton_kernel_and_logs_its_name(run):
    assert run.result["target"] == 90
    events = run.between("triton", "end of triton")
    assert [event.name for event in events if event.kind == "triton"] == ["double_all"]


def test_fake_gpu_logs_nccl_collectives_with_bytes(run):
    events = run.between("collectives", "end of collectives")
    sent = [(event.name, event.amount) for event in events if event.kind == "nccl"]
    assert sent == [("AllReduce", 512), ("Broadcast", 512)]


def test_fake_gpu_logs_marker_of_forked_process_once(run):
    assert [event.name for event in run.events if event.kind == "mark"].count("child") == 1


@pytest.mark.parametrize("segments", ["True", pytest.param("False", marks=pytest.mark.slow)])
def test_fake_gpu_allocations_have_real_sizes_and_can_run_out_of_memory(on_fake_gpu, segments):
    """Also tests a different compute capability than Hopper's."""
    variables = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments}", "FAKE_GPU_MAJOR": "10"}
    run = on_fake_gpu(MEMORY, gib=8, **variables)
    assert run.result["capability"] == [10, 0]
    assert 3 << 30 <= run.result["taken"] <= (3 << 30) + (20 << 20)  # torch maps segments of 20 MiB
    assert run.result["allocated"] == [3 << 30, 6 << 30]
    assert "Tried to allocate 6.00 GiB" in run.result["error"]


def test_fake_gpu_build_raises_if_gcc_is_missing():
    program = "from qwen3vl_bridge.simulation import fake_gpu\nfake_gpu.build('never')"
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode and "gcc and nm not found: the fake GPU is built from C" in done.stderr
