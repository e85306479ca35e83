"""Registration in any import order, fast imports, and replacements for CUDA, fused kernels and log filters."""

import copy
import gc
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.upstream import import_hook, l2_norm
from qwen3vl_bridge.upstream.adam import Adam

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.tensor_parallel import random
from megatron.core.utils import local_multi_tensor_l2_norm
from torch.distributed import distributed_c10d

CHECK = """
import megatron.bridge.models.conversion.model_bridge as m, transformers
found = type(m.get_model_bridge(transformers.Qwen3VLForConditionalGeneration))
assert found.__module__ == "qwen3vl_bridge.models.qwen3_vl.bridge", found
import qwen3vl_bridge.models.qwen3_vl.provider, qwen3vl_bridge.models.qwen3_vl.model
assert qwen3vl_bridge.Qwen3VLModelProvider is qwen3vl_bridge.models.qwen3_vl.provider.Qwen3VLModelProvider
import sys
assert not any(name.split(".")[0] == "transformer_engine" for name in sys.modules), "the stand-in stayed"
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", [
    "import qwen3vl_bridge, megatron.bridge",
    "from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider",
    "import megatron.core.models.gpt; import qwen3vl_bridge, megatron.bridge",
])  # fmt: skip
def test_model_bridge_is_registered_in_any_import_order(first):
    done = run(first + CHECK)
    assert done.returncode == 0, done.stderr[-3000:]


def test_package_import_loads_no_heavy_module():
    heavy = ("torch", "megatron", "transformers", "numpy", "datasets")
    done = run(f"import sys, qwen3vl_bridge; print(sorted(set({heavy}) & sys.modules.keys()))")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_submodule_import_pauses_garbage_collector_and_restores_it(enabled, tmp_path, monkeypatch):
    inner, outer, failing = (f"probe_{name}_{enabled}" for name in ("inner", "outer", "failing"))
    seen = "import gc\nseen = gc.isenabled()\n"
    (tmp_path / f"{inner}.py").write_text(seen)
    (tmp_path / f"{outer}.py").write_text(f"from qwen3vl_bridge import {inner}\n{seen}")
    (tmp_path / f"{failing}.py").write_text("raise ValueError('as it is executed')")
    monkeypatch.setattr(qwen3vl_bridge, "__path__", [*qwen3vl_bridge.__path__, str(tmp_path)])
    before = gc.isenabled()
    switch = {True: gc.enable, False: gc.disable}
    switch[enabled]()
    try:
        module = importlib.import_module(f"qwen3vl_bridge.{outer}")
        after = gc.isenabled()
        with pytest.raises(ValueError, match="as it is executed"):
            importlib.import_module(f"qwen3vl_bridge.{failing}")
        after_an_error = gc.isenabled()
    finally:
        switch[before]()
    assert not module.seen and not getattr(module, inner).seen
    assert after == after_an_error == enabled


def test_cuda_rng_states_tracker_draws_from_cpu_generator(caplog):
    tracker = random.CudaRNGStatesTracker()
    tracker.add("dropout", 1)
    with tracker.fork("dropout"):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert "RNG state changed" not in caplog.text


TRAINING = """
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training import checkpointing, initialize
import importlib.util, sys
if importlib.util.find_spec("nvidia_resiliency_ext") is None:
    assert not any(name.startswith("nvidia_resiliency_ext") for name in sys.modules), "the stand-in stayed"
    assert not checkpointing.HAVE_RESIL and not checkpointing.HAVE_NVRX, "taken for installed"
    try:
        import megatron.bridge.training.inprocess_restart
    except ModuleNotFoundError as error:
        assert error.name == "nvidia_resiliency_ext", error
    else:
        raise AssertionError("restarts without the package")
initialize.compile_helpers()
from megatron.core.datasets import helpers
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import qwen3vl_bridge", "import megatron.core.datasets.utils, qwen3vl_bridge"])
def test_megatron_bridge_training_imports_without_nvidia_resiliency_ext(first):
    """The loop of Megatron-Bridge is imported like in a script, without nvidia_resiliency_ext and a Makefile."""
    done = run(f"{first}\n{TRAINING}")
    assert done.returncode == 0, done.stderr[-3000:]


NAME = "megatron.bridge.training.pretrain"
FAILS = f"""
import logging
from qwen3vl_bridge.upstream.library_logs import quiet
quiet()
adapters = logging.getLogger("megatron.bridge.peft.lora")
adapters.setLevel(logging.INFO)  # as Megatron-Bridge does when a run starts
adapters.info("Adding lora to: one of hundreds")
for error in (ValueError("set this"), SystemExit(0), KeyboardInterrupt(), RuntimeError("nobody knows")):
    try:
        raise error
    except BaseException:
        logging.getLogger("{NAME}").exception("it failed with %s", error)
        try:
            None._manager
        except Exception:
            logging.getLogger("{NAME}").exception("and its cleanup after %s", error)
"""


def test_quiet_keeps_traceback_of_failed_run_only_for_unexpected_errors():
    done = run(FAILS)
    assert done.returncode == 0 and "set this" not in done.stderr, done.stderr
    before, after = done.stderr.split("it failed with nobody knows")
    assert not before and "Traceback" in after and "RuntimeError: nobody knows" in after
    assert "and its cleanup after nobody knows" in after


SETTINGS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("decoupled", [True, False])
def test_replacement_adam_steps_equal_torch_adam_bit_exactly(decoupled):
    """Equal to the last bit, including a parameter without a gradient."""
    weights = [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    mine = Adam([dict(params=ours[:2]), dict(params=ours[2:], weight_decay=0.0)], adam_w_mode=decoupled, **SETTINGS)
    reference = kind([dict(params=theirs[:2]), dict(params=theirs[2:], weight_decay=0.0)], **SETTINGS)
    for step in range(20):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + i))
            other.grad = one.grad.clone()
        mine.step()
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_replacement_adam_state_has_format_of_fused_adam():
    """Steps are counted by group, every parameter has moments, and another instance resumes from the state."""
    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
    adam = Adam([dict(params=parameters[:2]), dict(params=[]), dict(params=parameters[2:])], **SETTINGS)
    parameters[0].grad = torch.ones(4)
    before = parameters[1].detach().clone()
    adam.step()
    assert [group.get("step") for group in adam.param_groups] == [1, None, 1]
    assert all(adam.state[p].keys() == {"exp_avg", "exp_avg_sq"} for p in parameters)
    assert torch.equal(parameters[1], before) and not adam.state[parameters[1]]["exp_avg"].any()
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    again = Adam([dict(params=copies[:2]), dict(params=[]), dict(params=copies[2:])], **SETTINGS)
    again.load_state_dict(copy.deepcopy(adam.state_dict()))
    copies[0].grad = parameters[0].grad = torch.full((4,), 0.5)
    adam.step()
    again.step()
    assert torch.equal(copies[0], parameters[0]) and again.param_groups[0]["step"] == 2


def test_replacement_adam_raises_if_arguments_are_unsupported():
    with pytest.raises(ValueError, match="capturable is True"):
        Adam([torch.nn.Parameter(torch.zeros(1))], capturable=True)
    with pytest.raises(TypeError, match="exp_avg_dtype"):
        Adam([torch.nn.Parameter(torch.zeros(1))], exp_avg_dtype=torch.bfloat16)


def test_megatron_core_without_fused_adam_uses_replacement_adam():
    if optimizer.Adam.__module__.startswith(("transformer_engine", "apex")):
        pytest.skip("a fused Adam is installed")
    assert optimizer.Adam is distrib_optimizer.Adam is Adam
    assert not optimizer.USING_PYTORCH_OPTIMIZER and distrib_optimizer.HAVE_APEX_OR_TE


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]), st.floats(-6, 6), st.integers(0, 9),
)  # fmt: skip
def test_l2_norm_equals_megatron_core_local_l2_norm(shapes, dtype, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [(torch.randn(shape, generator=generator) * 10**exponent).to(dtype) for shape in shapes]
    found, per_tensor = l2_norm.l2_norm(2048, torch.zeros(1), [tensors], False)
    expected, _ = local_multi_tensor_l2_norm(2048, torch.zeros(1), [tensors], False)
    assert per_tensor is None and found.shape == expected.shape == (1,) and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_l2_norm_of_nonfinite_tensor_is_nonfinite(value):
    found, _ = l2_norm.l2_norm(2048, torch.zeros(1), [[torch.ones(3), torch.tensor([1.0, value])]], False)
    assert not found.isfinite()


def test_l2_norm_replaces_local_but_not_fused_implementation():
    assert clip_grads.l2_norm_impl is l2_norm.l2_norm
    fused = SimpleNamespace(l2_norm_impl=torch.norm)
    l2_norm.stay_on_device(fused)
    assert fused.l2_norm_impl is torch.norm


linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is redirected")
BUFFERS = ("param_and_grad_buffer", "fsdp.src.megatron_fsdp.param_and_grad_buffer")


@without_cuda
def test_megatron_modules_without_cuda_create_cuda_tensors_on_cpu():
    theirs = clip_grads.torch
    assert theirs is not torch
    assert theirs.cuda.current_device() == torch.device("cpu")
    assert theirs.zeros(2, device="cuda").device.type == "cpu"
    assert theirs.tensor([1.0], device="cuda:3").device.type == "cpu"
    assert theirs.device("cuda", 1) == torch.device("cpu")
    assert isinstance(torch.device("cpu"), theirs.device)
    assert theirs.Tensor is torch.Tensor and theirs.nn is torch.nn
    assert not theirs.cuda.is_available()


@without_cuda
def test_cuda_calls_outside_megatron_modules_raise_without_cuda():
    assert torch.zeros(1).type() == "torch.FloatTensor"
    for attempt in (lambda: torch.zeros(1, device="cuda"), lambda: torch.zeros(1).cuda(), torch.cuda.current_device):
        with pytest.raises((RuntimeError, AssertionError)):
            attempt()


@without_cuda
def test_tensor_cuda_and_type_are_redirected_in_megatron_modules():
    module = type(sys)("megatron.pretended")
    exec("def kind(x): return x.type()\ndef move(x): return x.cuda()", vars(module))
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert module.kind(x) == "torch.cuda.BFloat16Tensor"
    assert module.move(x) is x


@without_cuda
@pytest.mark.parametrize("name", BUFFERS)
def test_megatron_coalescing_manager_on_gloo_completes_collectives_at_once(name):
    initialize(Qwen3VLModelProvider(num_layers=3), seed=7)
    theirs = importlib.import_module(f"megatron.core.distributed.{name}")
    group, whole, part = torch.distributed.group.WORLD, torch.zeros(3), torch.arange(3.0)
    with theirs._coalescing_manager(group, async_ops=True) as found:
        torch.distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)
    assert found.works == []
    assert torch.equal(whole, part)
    with torch.distributed._coalescing_manager(group, async_ops=True) as found:  # torch's own
        torch.distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)
    assert len(found.works) == 1
    found.wait()


@without_cuda
@pytest.mark.parametrize("name", BUFFERS)
def test_megatron_coalescing_manager_on_gloo_handles_several_dtypes(name):
    """Without our manager gloo gathers all bytes with the first dtype, and rejects the reduction."""
    initialize(Qwen3VLModelProvider(num_layers=3), seed=7)
    theirs, group = importlib.import_module(f"megatron.core.distributed.{name}"), torch.distributed.group.WORLD
    parts = [torch.arange(3.0).bfloat16(), torch.arange(4.0), torch.ones(2).bfloat16()]

    def gather(manager: Callable) -> list[torch.Tensor]:
        wholes = [torch.zeros_like(part) for part in parts]
        with manager(group):
            for whole, part in zip(wholes, parts, strict=True):
                torch.distributed.all_gather_into_tensor(whole, part, group=group)
        return wholes

    assert all(map(torch.equal, gather(theirs._coalescing_manager), parts))
    assert not all(
        map(torch.equal, gather(torch.distributed._coalescing_manager), parts)
    )  # otherwise ours is not needed
    reduced = [part.clone() for part in parts]
    with theirs._coalescing_manager(group):
        for one in reduced:
            torch.distributed.all_reduce(one, group=group)
    assert all(map(torch.equal, reduced, parts))
    with theirs._coalescing_manager(group):  # no collective at all
        pass


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


@without_cuda
@pytest.mark.slow
def test_async_save_without_gpu_writes_loadable_checkpoint(tmp_path):
    """Megatron-Bridge's `checkpoint.async_save` spawns a process; without our redirection it needs a GPU and hangs."""
    command = [sys.executable, "-W", "ignore", "-c", SAVE, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]


def _loops() -> int:
    time.sleep(0.5)  # a thread sets its name when it starts
    tasks = os.listdir("/proc/self/task")
    return sum(open(f"/proc/self/task/{task}/comm").read().startswith("gloo_tcp_loop") for task in tasks)


def _on_two_ranks(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    groups = [dist.new_group(ranks) for _ in range(10) for ranks in ([0, 1], [0], [1])]
    assert _loops() == 1
    # All at once, in a different order on each rank: messages of groups must not mix.
    mine = [n for n, group in enumerate(groups) if group is not dist.GroupMember.NON_GROUP_MEMBER]
    values = {n: torch.full((1000,), float(n + rank)) for n in mine}
    works = [dist.all_reduce(values[n], group=groups[n], async_op=True) for n in (mine if rank else mine[::-1])]
    for work in works:
        work.wait()
    for n, value in values.items():
        assert (value == (2 * n + 1 if n % 3 == 0 else n + rank)).all()
    dist.destroy_process_group()

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # set by the user: torch creates the devices
    before = _loops()
    groups = [
        distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60)) for _ in range(2)
    ]
    assert _loops() == before + 2


@pytest.mark.slow
@without_cuda
@linux
def test_gloo_process_groups_share_one_thread(tmp_path):
    processes.spawn(_on_two_ranks, (str(tmp_path),), nprocs=2)


def _forked(answers) -> None:
    group = distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    group.allreduce([torch.ones(1)]).wait()
    answers.put(_loops())


@without_cuda
@linux
def test_gloo_group_in_forked_process_starts_new_thread():
    group = distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    context = processes.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_forked, args=(answers,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and answers.get() == 1
    del group


def test_import_stand_ins_restore_previously_imported_modules(monkeypatch):
    stub = ModuleType("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", stub)
    with import_hook._stand_ins("transformer_engine", "transformer_engine.pytorch"):
        assert sys.modules["transformer_engine"] is not stub
    assert sys.modules["transformer_engine"] is stub and "transformer_engine.pytorch" not in sys.modules
