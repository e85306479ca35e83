"""Initialization of process groups; our code calls no collectives in groups of one rank."""

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import qwen3vl_bridge
from qwen3vl_bridge.training import process_groups
from qwen3vl_bridge.training.callbacks import build_callbacks
from qwen3vl_bridge.training.config import GuardConfig
from qwen3vl_bridge.training.weight_loading import load_model

import pytest
import torch
import torch.distributed as dist

from tests.helpers.batches import make_batch, make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import of_all_ranks
from tests.helpers.steps import followed, set_up, step_with_callbacks, train_step
from tests.helpers.sync_counter import PACKAGES
from tests.parity.conftest import make_pair
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology
from tests.training.running import replicate

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "barrier", "all_to_all", "all_to_all_single", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast_object_list", "gather_object"),
)
Sent = Counter[tuple[str, str, str, int]]


@contextmanager
def collectives_sent() -> Iterator[Sent]:
    """Count calls of collectives in the block, by package, file, collective and number of ranks."""
    found: Sent = Counter()
    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, _watched(name, getattr(dist, name), found)))
        yield found


def _watched(name: str, collective: Callable, found: Sent) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while (path := frame.f_code.co_filename).endswith("/upstream/cpu.py") or "/torch/" in path:
            frame = frame.f_back
        owner = next((owner for owner, folder in PACKAGES.items() if folder in path), "others")
        group = inspect.signature(collective).bind(*args, **kwargs).arguments.get("group")
        found[owner, path.rpartition("/")[2], name, dist.get_world_size(group)] += 1
        return collective(*args, **kwargs)

    return call


def sent_by_ranks(folder: Path) -> list[Sent]:
    split = Split(folder, Topology(2), balance=0.01, logger__log_interval=1)
    run = split.run
    run.stream = split.batches("mixed", "packed")
    run.cfg.guard = GuardConfig(on_nan="skip", on_spike="skip")
    vars(run.optimizer).pop("get_grad_norm", None)  # calls by `set_up` already, and by the callbacks again
    with collectives_sent() as found, followed(run, build_callbacks(run.cfg)):
        step_with_callbacks(run)
        found.clear()
        step_with_callbacks(run)
        counted = Counter(found)
    return of_all_ranks(counted)


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(device))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: found.append(backend))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return found


def test_load_model_sets_cuda_device_before_process_group(calls, monkeypatch, untied_folder):
    """The device is set before anything is created on a GPU; otherwise all ranks of a node use the first GPU."""
    process_groups.shutdown()  # groups of other tests
    for name, value in dict(WORLD_SIZE="2", RANK="1", LOCAL_RANK="1").items():
        monkeypatch.setenv(name, value)

    def meet(backend):
        calls.append(backend)
        raise ConnectionError("the others")

    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    with pytest.raises(ConnectionError, match="the others"):
        load_model(untied_folder)
    assert calls == [1, "nccl"]


def test_init_distributed_in_single_process_sets_no_cuda_device(calls):
    process_groups.init_distributed()
    assert calls == ["nccl"]


@pytest.fixture
def sent():
    with collectives_sent() as found:
        yield found


def packages_that_sent(sent) -> set[str]:
    print(dict(sent))
    return {owner for owner, *_ in sent}


def test_step_on_one_rank_calls_no_collectives_in_our_code(inputs, sent):
    """The step has a guard, gradient norms and logged metrics."""
    run = set_up(replicate(inputs.config(None, logger__log_interval=1)))
    run.cfg.guard = GuardConfig(on_nan="skip", on_spike="skip")
    with followed(run, build_callbacks(run.cfg)):
        train_step(run)
        sent.clear()
        train_step(run)
    found = packages_that_sent(sent)
    assert "megatron-core" in found and "ours" not in found  # collectives of megatron-core are seen


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_moe_forward_and_backward_on_one_rank_call_no_collectives_in_our_code(family, folders, sent):
    pair = make_pair(folders[family, "moe"], moe_aux_loss_coeff=0.01)
    inputs = make_batch(make_samples("mixed", pair.config, seed=8), pair.config, packed=True).local()
    sent.clear()
    (pair.megatron(inputs=inputs) * inputs.loss_mask).sum().backward()
    assert "ours" not in packages_that_sent(sent)


@pytest.mark.slow
def test_our_code_calls_no_collectives_in_groups_of_one_rank(moe_folder):
    for found in results_of_ranks(sent_by_ranks, 2, moe_folder, timeout=200):
        print(found)
        ours = {ranks for (owner, *_, ranks), times in found.items() if owner == "ours"}
        theirs = {ranks for (owner, *_, ranks), times in found.items() if owner != "ours"}
        assert ours == {2} and 1 in theirs  # both kinds are seen


def test_collective_tests_replace_every_collective_that_our_code_calls():
    """Collectives are called as attributes of torch.distributed, which the test replaces; none is imported by name."""
    with_group = {
        name
        for name, function in vars(torch.distributed).items()
        if type(function) is FunctionType and "group" in inspect.signature(function).parameters
    } - {
        "get_backend",
        "get_rank",
        "get_process_group_ranks",
        "get_world_size",
        "get_global_rank",
        "get_group_rank",
        "destroy_process_group",
    }
    called, imported, modules = set(), set(), ("dist", "distributed")
    for file in Path(qwen3vl_bridge.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in modules:
                called.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
                imported |= {one.name for one in node.names}
    assert {"all_reduce", "all_gather_into_tensor"} <= called & with_group <= set(COLLECTIVES)
    assert not imported & with_group
