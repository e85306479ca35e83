"""Names that are replaced in Megatron's modules without CUDA."""

import re

import pytest
import torch

from tests.upstream.contracts import Contract

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is redirected"),
]
CONTRACT = Contract("cpu")
CORE = "megatron.core"


def test_cuda_rng_tracker_calls_functions_that_we_replace():
    module = f"{CORE}.tensor_parallel.random"
    CONTRACT.declares(module, "_get_cuda_rng_state", "device", "clone", "graph_safe")
    CONTRACT.declares(module, "_set_cuda_rng_state", "new_state", "device", "graph_safe")
    CONTRACT.mentions(module, "CudaRNGStatesTracker.fork", "_get_cuda_rng_state", "_set_cuda_rng_state")
    CONTRACT.takes(f"{CORE}.jit", "disable_jit_fuser")


@pytest.mark.parametrize(
    "module", ["distributed.param_and_grad_buffer", "distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"]
)
def test_coalescing_manager_of_gradient_buffers_has_expected_parameters(module):
    CONTRACT.takes("torch.distributed.distributed_c10d", "_coalescing_manager", "group", "device", "async_ops")
    CONTRACT.find("torch.distributed.distributed_c10d", "_world.pg_coalesce_state")
    CONTRACT.find(f"{CORE}.{module}", "_coalescing_manager")


def test_process_group_gloo_is_built_from_options_or_timeout():
    """The class is written in C++: it has no signatures, but documents its constructors."""
    module = "torch.distributed.distributed_c10d"
    creates = "_create_gloo_process_group"  # since torch 2.15
    creates = creates if hasattr(torch.distributed.distributed_c10d, creates) else "_new_process_group_helper"
    CONTRACT.mentions(module, creates, "ProcessGroupGloo", "timeout")
    theirs = CONTRACT.find("torch._C._distributed_c10d", "ProcessGroupGloo", type)
    described = theirs.__init__.__doc__ or ""
    for arguments in (("store", "rank", "size", "options"), ("store", "rank", "size", "timeout")):
        if not re.search(", ".join(rf"{name}: [^)]*?" for name in arguments), described):
            CONTRACT.fail(module, f"ProcessGroupGloo is not built from ({', '.join(arguments)}): {described}")
    CONTRACT.find("torch._C._distributed_c10d", "ProcessGroupGloo.create_default_device")
    options = CONTRACT.find("torch._C._distributed_c10d", "ProcessGroupGloo._Options")()
    for name in ("_devices", "_threads", "_timeout"):
        if not hasattr(options, name):
            CONTRACT.fail(module, f"ProcessGroupGloo._Options has no {name}")


def test_persistent_async_caller_loop_has_expected_parameters():
    CONTRACT.declares(
        f"{CORE}.dist_checkpointing.strategies.async_utils", "PersistentAsyncCaller.async_loop",
        "rank", "queue", "preload_q", "comp_q", "log_level", "cpu_priority", "io_priority",
    )  # fmt: skip


def test_megatron_fsdp_adapter_imports_device_mesh():
    CONTRACT.find(f"{CORE}.distributed.fsdp.mcore_fsdp_adapter", "DeviceMesh")
    CONTRACT.find("torch.distributed.device_mesh", "DeviceMesh.from_group")


def test_initialize_megatron_checks_that_cuda_is_available():
    CONTRACT.mentions("megatron.bridge.training.initialize", "initialize_megatron", "torch.cuda.is_available")
    module = "megatron.bridge.training.flex_dispatcher_backend"
    CONTRACT.declares(module, "validate_flex_dispatcher_backend", "model_config")
    CONTRACT.mentions("megatron.bridge.training.config", "ConfigContainer.validate", "validate_flex_dispatcher_backend")
