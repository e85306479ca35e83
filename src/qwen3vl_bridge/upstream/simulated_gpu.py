"""Replacements in a process that simulates one rank of a run on a fake GPU, which computes no values.

Replaced in torch and Megatron: process groups and collectives, because the other ranks do not exist; gradient norms,
kernel tuning and queries of the driver, because nothing is computed; the token counts of experts, which become equal;
the exchange of shapes between pipeline stages; and grouped matrix products, to log their FLOPs. None of them has an
extension point. Nothing is put back: the process ends after the simulation.

Used: the tuner of `torch._inductor`, the backend "fake" of `torch.testing._internal`, and `torch.utils._pytree`.
Delete the functions for steps that torch or Megatron can run without values, such as on meta tensors.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.optimizer import optimizer
from megatron.core.pipeline_parallel import utils
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import token_dispatcher
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
from torch.utils._pytree import tree_leaves

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast", "reduce", "isend", "irecv", "send", "recv"),
)


def join_fake_ranks(rank: int, world: int, note: Callable[[str, int], None]) -> None:
    """Initialize torch.distributed with torch's backend "fake", in which all ranks except this one do not exist.

    Args:
        rank: the rank of this process.
        world: number of ranks.
        note: function to call with the name of each collective of GPU tensors, and the bytes of its largest tensor.
    """
    os.environ |= dict(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT="1")
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    new_group = dist.new_group

    def fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **more: Any):
        return new_group(ranks, timeout, "fake", None, **more)

    def noted(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            sizes = [x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_cuda]
            if sizes:
                note(function.__name__, max(sizes))
            if function.__name__ == "all_to_all_single" and not args[1].numel():
                return None  # the backend fills outputs from the input, and cannot do so without elements
            return function(*args, **kwargs)

        return run

    ours = {new_group: fake_group} | {
        function: noted(function) for function in (getattr(dist, name) for name in COLLECTIVES)
    }
    # No other rank sends objects or their sizes, so this rank keeps its own objects.
    ours[dist.broadcast_object_list] = lambda *_, **__: None  # noqa: TID251  only its name
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in ours:
                replace(module, name, ours[value], When.SIMULATION)


def take_no_values() -> None:
    """Replace functions that depend on computed values or query a GPU driver by functions that do neither."""
    norm = optimizer.get_grad_norm_fp32
    # A norm is a root, which is complex if the garbage that is read is negative.
    replace(optimizer, "get_grad_norm_fp32", lambda *args, **kwargs: abs(norm(*args, **kwargs)), When.SIMULATION)
    replace(CachingAutotuner, "benchmark_all_configs", _rank_in_order, When.SIMULATION)
    # It asks the driver for the CPU cores near the GPU.
    replace(utils, "set_ideal_affinity_for_current_gpu", lambda: None, When.SIMULATION)
    # It asks the other ranks where their shards begin, which only checkpoints need.
    replace(param_and_grad_buffer, "validate_uneven_dtensor", lambda *_: None, When.SIMULATION)


def _rank_in_order(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> dict[Any, float]:
    """Return the index of each configuration of a kernel as its "time", so that the first one is chosen.

    To time the configurations, the original function copies tensors to the host and back.
    """
    return {launcher: float(number) for number, launcher in enumerate(tuner.launchers)}


def balance_routing() -> None:
    """Route the same number of tokens to every expert. The router's kernels run, but compute no result."""
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, gather = dispatcher.preprocess, token_dispatcher.gather_from_sequence_parallel_region

    def balanced(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        """Count tokens on the host, and copy the counts to the GPU, where megatron-core expects them."""
        tokens, experts = routing_map.shape
        topk = self.config.moe_router_topk
        chosen = torch.zeros(tokens, experts, dtype=torch.bool)
        chosen.scatter_(1, torch.arange(tokens * topk).view(tokens, topk) % experts, True)
        counts = preprocess(self, chosen)
        for name in ("input_splits", "output_splits", "output_splits_tp", "num_global_tokens_per_local_expert"):
            if isinstance(splits := getattr(self, name, None), torch.Tensor):
                setattr(self, name, splits.cuda())
        return counts.cuda()

    def gathered(x: torch.Tensor, group: Any = None, **more: Any) -> torch.Tensor:
        return gather(x, group=group, **more) if x.is_cuda else x.repeat(dist.get_world_size(group))

    replace(dispatcher, "preprocess", balanced, When.SIMULATION)
    replace(token_dispatcher, "gather_from_sequence_parallel_region", gathered, When.SIMULATION)


def receive_shape(shape: tuple[int, int, int]) -> None:
    """Let pipeline stages receive tensors of this shape with `variable_seq_lengths`, instead of asking each other."""

    def known_shapes(*_: Any, **__: Any) -> tuple[list[int], list[int]]:
        """Return the shape of a tensor from the previous stage and from the next. Unused if no tensor is received."""
        return list(shape), list(shape)

    replace(P2PCommunicator, "_communicate_shapes", known_shapes, When.SIMULATION)


def mark_grouped_products(begin: Callable[[int], None], end: Callable[[], None]) -> None:
    """Call `begin` with the FLOPs of a product before each grouped matrix product of experts, and `end` after it.

    The log lacks the FLOPs if the product is a single kernel: only the kernel reads how many tokens each expert has.
    """

    def marked(function: Callable, flops: Callable[..., int]) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin(flops(*args))
            result = function(*args, **kwargs)
            end()
            return result

        return run

    replace(F, "grouped_mm", marked(F.grouped_mm, flops_of_grouped_mm), When.SIMULATION)
    if importlib.util.find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.cpp_extensions import gemm

        ours = marked(gemm.tex.te_general_grouped_gemm, flops_of_grouped_gemm)
        replace(gemm.tex, "te_general_grouped_gemm", ours, When.SIMULATION)


def flops_of_grouped_mm(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the FLOPs of `torch.nn.functional.grouped_mm`.

    It multiplies tokens [tokens, k] and weights [experts, k, n], or [m, tokens] and [tokens, n] for each expert.
    """
    return 2 * a.numel() * b.size(-1)


def flops_of_grouped_gemm(a: list[torch.Tensor], transpose_a: bool, b: list[torch.Tensor], transpose_b: bool, *_: Any):
    """Return the FLOPs of Transformer Engine's `te_general_grouped_gemm`.

    Matrices in `a` are [m, k] if `transpose_a`, else [k, m]. Matrices in `b` are [k, n] if `transpose_b`, else [n, k].
    """
    return sum(2 * one.numel() * other.size(1 if transpose_b else 0) for one, other in zip(a, b, strict=True))
