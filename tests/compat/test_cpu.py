"""Without CUDA Megatron's modules use the CPU, gloo groups share a device, and torch is the same for everybody else."""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed import distributed_c10d

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is redirected")
linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")


@pytest.fixture(scope="module")
def clip_grads():
    from megatron.core.optimizer import clip_grads

    return clip_grads


def test_megatron_sees_the_cpu(clip_grads):
    theirs = clip_grads.torch
    assert theirs is not torch
    assert theirs.cuda.current_device() == torch.device("cpu")
    assert theirs.zeros(2, device="cuda").device.type == "cpu"
    assert theirs.tensor([1.0], device="cuda:3").device.type == "cpu"
    assert theirs.device("cuda", 1) == torch.device("cpu")
    assert isinstance(torch.device("cpu"), theirs.device)
    assert theirs.Tensor is torch.Tensor and theirs.nn is torch.nn
    assert not theirs.cuda.is_available()


def test_torch_is_untouched(clip_grads):
    assert torch.zeros(1).type() == "torch.FloatTensor"
    for attempt in (lambda: torch.zeros(1, device="cuda"), lambda: torch.zeros(1).cuda(), torch.cuda.current_device):
        with pytest.raises((RuntimeError, AssertionError)):
            attempt()


def test_methods_are_redirected_for_megatrons_code_only():
    module = type(sys)("megatron.pretended")
    exec("def kind(x): return x.type()\ndef move(x): return x.cuda()", vars(module))
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert module.kind(x) == "torch.cuda.BFloat16Tensor"
    assert module.move(x) is x


@pytest.mark.parametrize("name", ["param_and_grad_buffer", "fsdp.src.megatron_fsdp.param_and_grad_buffer"])
def test_nothing_is_under_way_when_a_block_of_collectives_is_left(name):
    from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
    from qwen3vl_bridge.training.process_groups import initialize

    initialize(Qwen3VLModelProvider(num_layers=3), seed=7)
    theirs = importlib.import_module(f"megatron.core.distributed.{name}")
    group, whole, part = torch.distributed.group.WORLD, torch.zeros(3), torch.arange(3.0)
    with theirs._coalescing_manager(group, async_ops=True) as found:
        torch.distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)
    assert found.works == []
    assert torch.equal(whole, part)
    with torch.distributed._coalescing_manager(group, async_ops=True) as found:  # everybody else's
        torch.distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)
    assert len(found.works) == 1
    found.wait()


@pytest.mark.parametrize("name", ["param_and_grad_buffer", "fsdp.src.megatron_fsdp.param_and_grad_buffer"])
def test_collectives_of_several_dtypes_in_one_block(name):
    """Gloo gathers the bytes of all as the first one's dtype, which gives other numbers; it refuses to reduce them."""
    from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
    from qwen3vl_bridge.training.process_groups import initialize

    initialize(Qwen3VLModelProvider(num_layers=3), seed=7)
    theirs = importlib.import_module(f"megatron.core.distributed.{name}")
    group, parts = (
        torch.distributed.group.WORLD,
        [torch.arange(3.0).bfloat16(), torch.arange(4.0), torch.ones(2).bfloat16()],
    )

    def gather(manager: Callable) -> list[torch.Tensor]:
        wholes = [torch.zeros_like(part) for part in parts]
        with manager(group):
            for whole, part in zip(wholes, parts, strict=True):
                torch.distributed.all_gather_into_tensor(whole, part, group=group)
        return wholes

    assert all(map(torch.equal, gather(theirs._coalescing_manager), parts))
    assert not all(map(torch.equal, gather(torch.distributed._coalescing_manager), parts))  # else ours is not needed
    reduced = [part.clone() for part in parts]
    with theirs._coalescing_manager(group):
        for one in reduced:
            torch.distributed.all_reduce(one, group=group)
    assert all(map(torch.equal, reduced, parts))
    with theirs._coalescing_manager(group):  # no collective at all
        pass


def test_random_state_is_forked_and_restored():
    from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
    from qwen3vl_bridge.training.process_groups import initialize

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    initialize(Qwen3VLModelProvider(num_layers=3), seed=7)
    assert parallel_state.get_tensor_model_parallel_world_size() == 1
    model_parallel_cuda_manual_seed(7)
    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(4)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(inside, torch.rand(4))


SAVE = """
import sys, torch, qwen3vl_bridge
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
from qwen3vl_bridge.training.process_groups import initialize
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
initialize(Qwen3VLModelProvider(num_layers=3), seed=7)
folder = sys.argv[1]
state = {"x": ShardedTensor.from_rank_offsets("x", torch.arange(6.0))}
request = dist_checkpointing.save(state, folder, async_sharded_save=True, async_strategy="mcore")
queue = AsyncCallsQueue(persistent=True)
queue.schedule_async_request(request)
queue.maybe_finalize_async_calls(blocking=True)
queue.close()
state = {"x": ShardedTensor.from_rank_offsets("x", torch.zeros(6))}
assert torch.equal(dist_checkpointing.load(state, folder)["x"], torch.arange(6.0))
"""


@pytest.mark.slow
def test_a_process_that_saves_in_the_background_uses_the_cpu(tmp_path):
    """Megatron-Bridge's `checkpoint.async_save` begins one. It is spawned, and had asked for a GPU; saving hung."""
    command = [sys.executable, "-W", "ignore", "-c", SAVE, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]


@linux
def test_it_is_installed_with_megatron():
    import megatron.core  # noqa: F401

    assert distributed_c10d.ProcessGroupGloo.__module__ == "qwen3vl_bridge.compat.cpu"


def _loops() -> int:
    time.sleep(0.5)  # a thread names itself when it begins
    tasks = os.listdir("/proc/self/task")
    return sum(open(f"/proc/self/task/{task}/comm").read().startswith("gloo_tcp_loop") for task in tasks)


def _on_two_ranks(rank: int, folder: str) -> None:
    from qwen3vl_bridge.compat.cpu import _share_gloo_device as share

    share(distributed_c10d)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    groups = [dist.new_group(ranks) for _ in range(10) for ranks in ([0, 1], [0], [1])]
    assert _loops() == 1
    # All at once, and in an order of its own for each rank: messages of one group are never another's.
    mine = [n for n, group in enumerate(groups) if group is not dist.GroupMember.NON_GROUP_MEMBER]
    values = {n: torch.full((1000,), float(n + rank)) for n in mine}
    works = [dist.all_reduce(values[n], group=groups[n], async_op=True) for n in (mine if rank else mine[::-1])]
    for work in works:
        work.wait()
    for n, value in values.items():
        assert (value == (2 * n + 1 if n % 3 == 0 else n + rank)).all()
    dist.destroy_process_group()

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a choice of the user's: torch makes the devices
    before = _loops()
    groups = [
        distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60)) for _ in range(2)
    ]
    assert _loops() == before + 2


@linux
def test_many_groups_of_two_ranks_have_one_thread_each(tmp_path):
    processes.spawn(_on_two_ranks, (str(tmp_path),), nprocs=2)


def _forked(answers) -> None:
    group = distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    group.allreduce([torch.ones(1)]).wait()
    answers.put(_loops())


@linux
def test_a_forked_process_has_a_device_of_its_own():
    import megatron.core  # noqa: F401

    group = distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    context = processes.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_forked, args=(answers,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and answers.get() == 1
    del group
