"""Without CUDA the gloo groups of a process share one network device, and so one thread that waits for messages."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed import distributed_c10d

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is redirected"),
    pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc"),
]


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


def test_many_groups_of_two_ranks_have_one_thread_each(tmp_path):
    processes.spawn(_on_two_ranks, (str(tmp_path),), nprocs=2)


def _forked(answers) -> None:
    group = distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    group.allreduce([torch.ones(1)]).wait()
    answers.put(_loops())


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
