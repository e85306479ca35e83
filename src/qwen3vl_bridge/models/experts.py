"""Experts of local layers: one product for all experts of a rank, where megatron-core has one for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from qwen3vl_bridge.batch.device_transfer import sent

import torch
import torch.nn.functional as F
from megatron.core.distributed import distributed_data_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

# Of torch's grouped product on CUDA: a row's bytes are a multiple, and the generation of GPUs that computes it right.
# Older ones have no kernel; a Blackwell's writes garbage as the gradient of an expert without tokens (issue 172439 of
# pytorch/pytorch).
ALIGNMENT, HOPPER = 16, 9
LINEARS = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}


class _Forward:
    """`GroupedExperts.forward`: of an object its own, of the class megatron-core's, by which ModelOpt knows it."""

    def __get__(self, experts: Any, _: type) -> Any:
        return SequentialMLP.forward if experts is None else experts.grouped_forward


class GroupedExperts(SequentialMLP):
    """megatron-core's experts, with their parameters and checkpoints.

    They are computed one after the other, as there, if anything acts on a single one: an adapter, a quantiser, a hook.
    That has to be so on all ranks, because gradients are reduced in the order in which they are computed.
    """

    forward = _Forward()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = _RegisteredFromLast(self.local_experts)
        for name in LINEARS:
            weights = [linear.weight for linear in self._linears(name)]
            for weight, place in zip(weights, torch.stack([weight.data for weight in weights]), strict=True):
                weight.data = place

    def grouped_forward(self, x: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> tuple[Tensor, None]:
        """Of tokens [t, h] sorted by expert and their scores [t]: scored outputs [t, h], and no bias."""
        self._wait_for_weights()
        if not self._can_group(x, tokens_per_expert):
            return SequentialMLP.forward(self, x, tokens_per_expert, permuted_probs)
        ends = sent(tokens_per_expert.cumsum(0).int(), x.device)
        linears = {name: _GroupedLinear([one.weight for one in self._linears(name)], ends) for name in LINEARS}
        activation = self.local_experts[0].activation_func
        expert = SimpleNamespace(config=self.config, activation_func=activation, **linears)
        return MLP.forward(expert, x.contiguous(), per_token_scale=permuted_probs)

    def _linears(self, name: str) -> list[Any]:
        return [getattr(expert, name) for expert in self.local_experts]

    def _wait_for_weights(self) -> None:
        """Call the hooks of `overlap_param_gather` in the order in which the next weights are gathered, from the last
        expert on: each starts the next.
        """
        for expert in reversed([*self.local_experts]):
            for linear in (getattr(expert, name) for name in LINEARS):
                for hook in filter(_waits_for_weights, linear._forward_pre_hooks.values()):
                    hook(linear, ())

    def _can_group(self, x: Tensor, tokens_per_expert: Tensor) -> bool:
        """Whether torch has a grouped product for such tokens, and each linear layer is a product and nothing else."""
        if self.num_local_experts == 1 or self.config.moe_apply_probs_on_input:
            return False
        # A dispatcher that leaves counts on the GPU may have more rows, which the product leaves unwritten.
        if tokens_per_expert.is_cuda:
            return False
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
            return False
        if x.is_cuda and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] != HOPPER):
            return False
        return all(
            type(linear) is plain
            and linear.bias is None
            and not linear.gradient_accumulation_fusion  # into `main_grad`, by APEX' products of single weights
            and linear.weight.dtype == x.dtype
            and not any(size * x.element_size() % ALIGNMENT for size in linear.weight.shape)
            and not _has_hooks(linear)
            for name, plain in LINEARS.items()
            for linear in self._linears(name)
        ) and not any(map(_has_hooks, self.local_experts))


class _RegisteredFromLast(nn.ModuleList):
    """In the order of its indices, while parameters are found from the last module to the first.

    megatron-core's buffers begin with the last parameter that is found, so that weights lie in the experts' order.
    """

    def __init__(self, modules: nn.ModuleList) -> None:
        super().__init__()
        for index in reversed(range(len(modules))):
            self.add_module(str(index), modules[index])

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        return nn.ModuleList([*self][index]) if isinstance(index, slice) else super().__getitem__(index)


def _waits_for_weights(hook: Any) -> bool:
    return hook.__module__ == distributed_data_parallel.__name__


def _has_hooks(module: nn.Module) -> bool:
    """Other than those that wait for weights, which need no call of the module."""
    before = all(map(_waits_for_weights, module._forward_pre_hooks.values()))
    return not before or bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


class _GroupedLinear(nn.Module):
    """The linear layers of all experts, called like one: a module, as `MLP` requires, of no parameters of its own."""

    def __init__(self, weights: list[Tensor], ends: Tensor) -> None:
        super().__init__()
        self.weights, self.ends = weights, ends

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return GroupedProduct.apply(x, self.ends, *self.weights), None


class GroupedProduct(torch.autograd.Function):
    """y_t = W_e x_t, and its gradients, where e is the expert of token t.

    Tokens [t, k] are sorted by expert and weights are [n, k] each; `ends` [E], int32, is where an expert's tokens end.
    Without tokens nothing is launched, in the same graph.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """[t, k] -> [t, n]."""
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None, ends, *weights)
        return F.grouped_mm(x, together(weights).mT, offs=ends) if len(x) else x.new_empty(0, weights[0].size(0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Those of weights are views of one tensor."""
        x, ends, *weights = ctx.saved_tensors
        of_x, _, *of_weights = ctx.needs_input_grad
        if not len(gradient):
            return gradient.new_empty(0, weights[0].size(1)), None, *map(torch.zeros_like, weights)
        gradient = gradient.contiguous()
        dx = F.grouped_mm(gradient, together(weights), offs=ends) if of_x else None
        dw = F.grouped_mm(gradient.mT, x, offs=ends) if any(of_weights) else [None] * len(weights)
        return dx, None, *dw


def together(weights: Sequence[Tensor]) -> Tensor:
    """Matrices [n, k] as one tensor [E, n, k]: a view if they lie in memory at equal distances, else a copy."""
    first, second = weights[0].data_ptr(), weights[1].data_ptr()
    distance, of_an_element = second - first, weights[0].element_size()
    in_order = distance >= weights[0].nbytes and distance % ALIGNMENT == 0
    if in_order and all(
        weight.is_contiguous()
        and weight.data_ptr() == first + number * distance
        and weight.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
        for number, weight in enumerate(weights)
    ):
        stride = (distance // of_an_element, *weights[0].stride())
        return weights[0].detach().as_strided((len(weights), *weights[0].shape), stride)
    return torch.stack(tuple(weights)).detach()
