"""What a simulated rank replaces in torch and Megatron."""

import importlib.util
import inspect

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("simulated_gpu")
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


def test_torch_distributed_functions_that_we_replace_exist():
    found = list(inspect.signature(CONTRACT.find("torch.distributed", "new_group")).parameters)[:4]
    if found != ["ranks", "timeout", "backend", "pg_options"]:
        CONTRACT.fail(
            "torch.distributed", f"new_group takes {', '.join(found)} first, expected ranks, timeout, backend"
        )
    CONTRACT.find("torch.testing._internal.distributed.fake_pg", "FakeStore")
    CONTRACT.find("torch.utils._pytree", "tree_leaves")
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
        *("all_to_all", "all_to_all_single", "broadcast", "reduce", "isend", "irecv", "send", "recv"),
        "broadcast_object_list",
    ):
        CONTRACT.find("torch.distributed", name)


def test_functions_whose_values_we_replace_have_expected_parameters():
    CONTRACT.takes(
        "megatron.core.optimizer.optimizer", "get_grad_norm_fp32",
        "grads_for_norm", "norm_type", "grad_stats_parallel_group",
    )  # fmt: skip
    CONTRACT.takes("megatron.core.pipeline_parallel.utils", "set_ideal_affinity_for_current_gpu")
    CONTRACT.takes(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer", "validate_uneven_dtensor", "dtensor"
    )
    tuner = "torch._inductor.runtime.triton_heuristics"
    CONTRACT.takes(tuner, "CachingAutotuner.benchmark_all_configs", "self", "*args", "**kwargs")
    CONTRACT.mentions(tuner, "CachingAutotuner.benchmark_all_configs", "launchers")


def test_alltoall_token_dispatcher_preprocess_sets_expected_attributes():
    CONTRACT.takes(DISPATCHER, "MoEAlltoAllTokenDispatcher.preprocess", "self", "routing_map")
    CONTRACT.mentions(
        DISPATCHER, "MoEAlltoAllTokenDispatcher.preprocess", "gather_from_sequence_parallel_region",
        *("input_splits", "output_splits", "output_splits_tp", "num_global_tokens_per_local_expert"),
    )  # fmt: skip
    CONTRACT.takes(
        DISPATCHER,
        "gather_from_sequence_parallel_region",
        *("input_", "tensor_parallel_output_grad", "group", "output_split_sizes", "use_global_buffer"),
    )


def test_torch_grouped_mm_takes_two_matrices_first():
    found = list(inspect.signature(CONTRACT.find("torch.nn.functional", "grouped_mm")).parameters)[:2]
    if found != ["mat_a", "mat_b"]:
        CONTRACT.fail("torch.nn.functional", f"grouped_mm takes {', '.join(found)} first, expected mat_a, mat_b")


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is missing")
def test_transformer_engine_grouped_gemm_exists():
    """It is written in C++ and has no signature."""
    module = "transformer_engine.pytorch.cpp_extensions.gemm"
    CONTRACT.find(module, "tex.te_general_grouped_gemm")
    CONTRACT.mentions(module, "general_grouped_gemm", "tex.te_general_grouped_gemm")
