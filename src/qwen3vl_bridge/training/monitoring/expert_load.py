"""How evenly tokens are distributed over experts.

What lives here: counting, during a step, which experts real tokens choose; summing that over ranks. What may not:
routing and its losses (`models/common/router.py`).

Hooks of the routers count, and exist only in a step whose metrics are logged; other steps are unaffected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.router import tracked_row, tracked_rows
from qwen3vl_bridge.parallel.collectives import sum_over_ranks
from qwen3vl_bridge.training.global_batch import check_share

import torch
from megatron.bridge.peft.lora_layers import LoRATopKRouter
from megatron.bridge.training.config import ConfigContainer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

# Kinds of balancing losses, by the router's log names.
_LOSSES = {"aux_loss": "load_balancing_loss", "global_aux_loss": "global_load_balancing_loss"}


class ExpertLoad:
    """Counts from its creation until `take`. Nothing waits for the device in between.

    Args:
        model: this rank's chunks.
    """

    def __init__(self, model: Sequence[nn.Module]) -> None:
        self._counts: dict[int, Tensor] = {}
        self._device = next(model[0].parameters()).device
        modules = [module for chunk in model for module in chunk.modules()]
        adapted = {module.to_wrap: module for module in modules if isinstance(module, LoRATopKRouter)}
        routers = [adapted.get(module, module) for module in modules if isinstance(module, TopKRouter)]
        self._hooks = [router.register_forward_hook(self._count, with_kwargs=True) for router in routers]
        get_moe_metrics_tracker().clear()

    def _count(self, router: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return  # a recomputed layer is called a second time, with gradients
        chosen = output[1]  # [tokens, E] bool
        padding = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)  # [s, b] bool, True for padding
        if padding is not None:
            chosen = chosen & ~padding.reshape(-1, 1)
        layer, count = tracked_row(getattr(router, "to_wrap", router)), chosen.sum(0)
        self._counts[layer] = self._counts[layer] + count if layer in self._counts else count

    def take(self, cfg: ConfigContainer) -> dict[str, float]:
        """Stop counting; metrics of all ranks' tokens.

        Args:
            cfg: the run's configuration.

        Returns:
            `expert_load_max` and `expert_load_mean` over layers, of the tokens of a layer's busiest expert divided by
            the mean of its experts; and the balancing losses.
        """
        counts = self.counts(cfg.model)
        loads = counts.amax(1) / counts.sum(1).clamp(min=1) * counts.size(1)
        figures = {"expert_load_max": loads.max().item(), "expert_load_mean": loads.mean().item()}
        return figures | self._balancing_losses(cfg)

    def counts(self, config: VisionLanguageProvider) -> Tensor:
        """Stop counting; [layers with experts, E] how often real tokens of all ranks chose each expert."""
        for hook in self._hooks:
            hook.remove()
        counts = torch.zeros(tracked_rows(config), config.num_moe_experts, dtype=torch.int64, device=self._device)
        for layer, count in self._counts.items():
            counts[layer] += count
        counts = sum_over_ranks(counts)[_layers(config)]
        # Without sequence parallelism tensor-parallel ranks have the same tokens.
        return counts if config.sequence_parallel else counts // config.tensor_model_parallel_size

    def _balancing_losses(self, cfg: ConfigContainer) -> dict[str, float]:
        config, tracker, found = cfg.model, get_moe_metrics_tracker(), {}
        replicas = cfg.data_parallel_size
        microbatches = check_share(cfg, replicas)
        kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        if isinstance(kinds, str):
            kinds, coefficients = [kinds], [coefficients]
        for kind, coefficient in zip(kinds, coefficients, strict=True):
            if not coefficient or kind not in _LOSSES:
                continue
            name = _LOSSES[kind]
            tracker.ensure_initialized(name, tracked_rows(config))  # a stage without experts has recorded nothing
            total = sum_over_ranks(tracker.metrics[name].values).sum().item()
            # Each data-parallel rank has balanced its own microbatches, or all of them the same.
            times = replicas if kind == "aux_loss" else 1
            found[name] = total / (times * microbatches * len(_layers(config)))
        return found


def _layers(config: VisionLanguageProvider) -> list[int]:
    """Rows of the layers with experts, with that of multi-token prediction if it is trained."""
    return [*config.moe_layers, *([config.num_layers] if config.trains_mtp else [])]
