"""Layers with experts: the router and its balancing losses, the layer, metrics, and grouped experts of the local spec.

megatron-core's TopKRouter excludes padding from the routing map by the `padding_mask` that the model passes.

Legend of shapes: t tokens, E experts, h hidden size, n outputs and k inputs of a linear layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from qwen3vl_bridge.core.collectives import sum_in_group
from qwen3vl_bridge.core.device_transfer import copy_to_device
from qwen3vl_bridge.upstream.module_hooks import forward_pre_hooks, has_later_hooks
from qwen3vl_bridge.upstream.moe_dispatcher import drop_routed_tensors
from qwen3vl_bridge.upstream.moe_router import BalancingRouter

import torch
import torch.nn.functional as F
from megatron.core.distributed import distributed_data_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class BalancedRouter(BalancingRouter):
    """megatron-core's router with auxiliary losses that weight all real tokens equally in every parallel layout.

    The balancing loss is E / (N^2 k) * sum_e f_e P_e for N real tokens that select k of E experts each. Expert e is
    selected f_e times, and P_e is the sum of its scores. A rank has only the scores of its own tokens, so the losses of
    all ranks add up to the full loss. The loss is averaged over microbatches: weighted by their tokens if losses are
    divided by the tokens of the global batch (`calculate_per_token_loss`), and equally if megatron-core divides by the
    number of microbatches.

    Source of the loss: Fedus et al., Switch Transformers, equation 4; over all ranks, Qiu et al. (arXiv 2501.11873).
    """

    def balance_microbatch(self, probs: Tensor, scores: Tensor, routing_map: Tensor) -> Tensor:
        """Return `probs` with the balancing loss of a microbatch attached: the backward pass adds its gradient."""
        if not self.get_aux_loss_coeff("aux_loss"):
            return probs
        selected = sum_in_group(routing_map.sum(0), self.tp_cp_group)
        return self._attach_loss("aux_loss", probs, scores, selected, selected, self.tp_cp_group)

    def balance_global_batch(self, probs: Tensor, scores: Tensor, routing_map: Tensor) -> Tensor:
        """Return `probs` with a balancing loss attached, over all ranks and the step's microbatches up to this one."""
        if not self.get_aux_loss_coeff("global_aux_loss"):
            return probs
        selected = sum_in_group(routing_map.sum(0), self.tp_dp_cp_group)
        self.global_tokens_per_expert += selected
        self.ga_steps += 1
        mean = self.global_tokens_per_expert / self.ga_steps
        return self._attach_loss("global_aux_loss", probs, scores, selected, mean, self.tp_dp_cp_group)

    def _attach_loss(
        self, kind: str, probs: Tensor, scores: Tensor, selected: Tensor, frequency: Tensor, group: ProcessGroup
    ) -> Tensor:
        """Return `probs` with a balancing loss attached. Without real tokens the loss and its gradient are 0.

        Args:
            kind: megatron-core's name of the loss.
            probs: [tokens, experts], the router's output.
            scores: [tokens, experts] of this rank, zero for padding.
            selected: [experts], how often real tokens of all ranks of `group` select each expert.
            frequency: [experts], the f_e of the loss.
            group: ranks whose tokens are balanced together.
        """
        coefficient, tokens = self.get_aux_loss_coeff(kind), (selected.sum() / self.topk).clamp(min=1)
        loss = switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=frequency,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            # Transformer Engine's kernel needs the number of tokens on the host (before 2.18), and at least one token.
            fused=False,
        )
        # If losses are divided by microbatches, gradients are also averaged over data-parallel ranks. The losses of all
        # ranks of `group` add up to a single loss, so each is multiplied by the number of data-parallel ranks in it.
        replicas = 1 if self.calculate_per_token_loss else group.size() / self.tp_cp_group.size()
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient * replicas,  # divisor of the logged value
            loss * replicas,
            kind.replace("aux_loss", "load_balancing_loss"),  # name in logs
            group,
            needs_dp_avg=kind == "aux_loss",
            # megatron-core multiplies by the number of ranks that share a microbatch, as if tokens were a rank's own.
            valid_token_count=tokens / self.tp_cp_group.size(),
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return logits [tokens, experts] with the z loss attached. The mask [tokens] is True for padding.

        Without `calculate_per_token_loss`, the loss is the mean over all real tokens of a microbatch. megatron-core
        would use the mean of the means of ranks, which depends on where padding is.
        """
        coefficient, ranks = self.config.moe_z_loss_coeff, self.tp_cp_group.size()
        trains = coefficient is not None and self.training and torch.is_grad_enabled()
        if not trains or self.calculate_per_token_loss or padding_mask is None or ranks == 1:
            return super().apply_z_loss(logits, padding_mask=padding_mask)
        is_real = ~padding_mask
        tokens = sum_in_group(is_real.sum(), self.tp_cp_group).clamp(min=1)
        loss = (logits.logsumexp(-1).square() * is_real).sum() / tokens  # this rank's part of the mean
        index, size = metrics_index(self), metrics_size(self.config)
        get_moe_metrics_tracker().record("z_loss", loss * ranks, index + 1, size, avg_group=self.tp_dp_cp_group)
        return MoEAuxLossAutoScaler.apply(logits, loss * coefficient)


def metrics_size(config: TransformerConfig) -> int:
    """Return the number of values per loss in megatron-core's MoE metrics: one per layer, including MTP layers."""
    return config.num_layers + (config.mtp_num_layers or 0)


def metrics_index(router: TopKRouter) -> int:
    """Return the index of a router's value in megatron-core's tracker of MoE metrics."""
    return router.layer_number - 1 + (router.config.num_layers if router.is_mtp_layer else 0)


# Configuration of the model that last used megatron-core's tracker. Each process has only one tracker.
_tracked_config: weakref.ref[TransformerConfig] | None = None


def reset_stale_moe_metrics(config: TransformerConfig) -> None:
    """Empty megatron-core's tracker of MoE metrics if it was created for a model with another number of layers.

    A process that alternates between models with different numbers of layers (an actor and a critic) empties the
    tracker at each change.
    """
    global _tracked_config
    if _tracked_config is not None and _tracked_config() is config:
        return
    if any(len(entry.values) != metrics_size(config) for entry in get_moe_metrics_tracker().metrics.values()):
        destroy_moe_metrics_tracker()
    _tracked_config = weakref.ref(config)


class MemoryEfficientMoELayer(MoELayer):
    """An MoE layer that drops the dispatcher's routed tensors at the end of its forward pass.

    megatron-core keeps these tensors until the next forward pass. Under full recomputation they keep the finished graph
    of each layer alive, with the layer's input and its gradient. Delete this class when megatron-core drops them
    (docs/upstream/moe_graphs.md).
    """

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Return the output of MoELayer, and drop the dispatcher's routed tensors."""
        output = super().postprocess(output, shared_expert_output)
        drop_routed_tensors(self.token_dispatcher)
        return output


# Limits of torch's grouped matrix product on CUDA: rows must be multiples of this many bytes, and only Hopper GPUs
# compute it correctly. Older GPUs have no kernel. On Blackwell the gradient of an expert without tokens is
# uninitialized memory (pytorch/pytorch issue 172439).
ALIGNMENT, HOPPER = 16, 9
EXPERT_LINEARS = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}


class _Forward:
    """Descriptor of `forward`: returns `grouped_forward` for an instance, and megatron-core's function for the class.

    ModelOpt recognizes the experts by the function of the class.
    """

    def __get__(self, experts: Any, _: type) -> Any:
        return SequentialMLP.forward if experts is None else experts.grouped_forward


class GroupedExperts(SequentialMLP):
    """megatron-core's local experts, computed with one grouped matrix product per linear layer.

    Parameters and checkpoints are megatron-core's. Experts are computed one by one, as in megatron-core, if a module of
    a single expert must be called: for an adapter, a quantizer or a hook. Either all ranks or none must compute experts
    one by one, because gradients are reduced in the order in which they are computed.
    """

    forward = _Forward()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = _ReverseRegisteredList(self.local_experts)
        for name in EXPERT_LINEARS:
            weights = [linear.weight for linear in self._linears(name)]
            for weight, view in zip(weights, torch.stack([weight.data for weight in weights]), strict=True):
                weight.data = view

    def grouped_forward(self, x: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> tuple[Tensor, None]:
        """Return the outputs [tokens, h] of experts for tokens [tokens, h] sorted by expert, and None for the bias.

        Outputs are scaled by `permuted_probs` [tokens].
        """
        self._wait_for_weights()
        if not self._can_group(x, tokens_per_expert):
            return SequentialMLP.forward(self, x, tokens_per_expert, permuted_probs)
        ends = copy_to_device(tokens_per_expert.cumsum(0).int(), x.device)
        linears = {
            name: _GroupedLinear([linear.weight for linear in self._linears(name)], ends) for name in EXPERT_LINEARS
        }
        activation = self.local_experts[0].activation_func
        expert = SimpleNamespace(config=self.config, activation_func=activation, **linears)
        return MLP.forward(expert, x.contiguous(), per_token_scale=permuted_probs)

    def _linears(self, name: str) -> list[Any]:
        return [getattr(expert, name) for expert in self.local_experts]

    def _wait_for_weights(self) -> None:
        """Wait until the weights of all experts are gathered: call the hooks that `overlap_param_gather` registered.

        Hooks are called in the order in which the weights are gathered.
        """
        for expert in reversed([*self.local_experts]):
            for linear in (getattr(expert, name) for name in EXPERT_LINEARS):
                for hook in filter(_waits_for_weights, forward_pre_hooks(linear)):
                    hook(linear, ())

    def _can_group(self, x: Tensor, tokens_per_expert: Tensor) -> bool:
        """Return True if torch has a grouped GEMM for these tokens, and all linear layers are plain matrix products."""
        if self.num_local_experts == 1 or self.config.moe_apply_probs_on_input:
            return False
        # A dispatcher that keeps counts on the GPU may have more rows, which the product would leave uninitialized.
        if tokens_per_expert.is_cuda:
            return False
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
            return False
        if x.is_cuda and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] != HOPPER):
            return False
        return all(
            type(linear) is plain
            and linear.bias is None
            and not linear.gradient_accumulation_fusion  # Apex adds products of single weights to `main_grad`
            and linear.weight.dtype == x.dtype
            and not any(size * x.element_size() % ALIGNMENT for size in linear.weight.shape)
            and not _has_hooks(linear)
            for name, plain in EXPERT_LINEARS.items()
            for linear in self._linears(name)
        ) and not any(map(_has_hooks, self.local_experts))


class _ReverseRegisteredList(nn.ModuleList):
    """A module list that registers its modules, and so their parameters, in reverse order.

    Iteration and indices are in the original order. megatron-core's gradient buffers begin with the last parameter, so
    they contain the weights in the order of experts.
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
    """Return True if a module has hooks other than those that wait for weights."""
    return has_later_hooks(module) or not all(map(_waits_for_weights, forward_pre_hooks(module)))


class _GroupedLinear(nn.Module):
    """The linear layers of all experts as one module, as `MLP` requires. It registers no parameters."""

    def __init__(self, weights: list[Tensor], ends: Tensor) -> None:
        super().__init__()
        self.weights, self.ends = weights, ends

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return GroupedProduct.apply(x, self.ends, *self.weights), None


class GroupedProduct(torch.autograd.Function):
    """Autograd function for y_t = W_e x_t, where e is the expert of token t.

    Tokens x [tokens, k] are sorted by expert, each weight is [n, k], and `ends` [experts] int32 are the indices after
    each expert's last token. Without tokens no kernel is launched, but the autograd graph is the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """Return the products [tokens, n] of tokens [tokens, k] with the weights of their experts."""
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None, ends, *weights)
        return F.grouped_mm(x, stack_weights(weights).mT, offs=ends) if len(x) else x.new_empty(0, weights[0].size(0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of the weights. Weight gradients are views of one tensor."""
        x, ends, *weights = ctx.saved_tensors
        needs_dx, _, *needs_dw = ctx.needs_input_grad
        if not len(gradient):
            return gradient.new_empty(0, weights[0].size(1)), None, *map(torch.zeros_like, weights)
        gradient = gradient.contiguous()
        dx = F.grouped_mm(gradient, stack_weights(weights), offs=ends) if needs_dx else None
        dw = F.grouped_mm(gradient.mT, x, offs=ends) if any(needs_dw) else [None] * len(weights)
        return dx, None, *dw


def stack_weights(weights: Sequence[Tensor]) -> Tensor:
    """Return m matrices [n, k] as one tensor [m, n, k].

    The tensor is a view of the matrices if they are equally spaced in memory. Otherwise it is a copy.
    """
    first, second = weights[0].data_ptr(), weights[1].data_ptr()
    distance, element_size = second - first, weights[0].element_size()
    in_order = distance >= weights[0].nbytes and distance % ALIGNMENT == 0
    if in_order and all(
        weight.is_contiguous()
        and weight.data_ptr() == first + number * distance
        and weight.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
        for number, weight in enumerate(weights)
    ):
        stride = (distance // element_size, *weights[0].stride())
        return weights[0].detach().as_strided((len(weights), *weights[0].shape), stride)
    return torch.stack(tuple(weights)).detach()
