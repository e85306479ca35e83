"""Megatron-Bridge's conversion of adapters, with steps that a family's bridge can override and call.

Overridden in `MegatronPeftBridge`: `_megatron_global_adapters_info_all_pp_ranks`, `_merge_lora_adapter_weights` and
`_merge_grouped_export_adapter_weights`. Megatron-Bridge calls them to export or merge adapters, but they do not fit our
models (`peft.running_model_export.AdapterConversion` says why). Called: these methods, `_gather_expert_adapter_weight`,
and `MegatronModelBridge._with_progress_tracking`. Delete this module when these methods are public.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from megatron.bridge.models.conversion.peft_bridge import MegatronPeftBridge

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
    from megatron.bridge.models.conversion.peft_bridge import AdapterWeight
    from megatron.core.transformer.module import MegatronModule
    from torch import Tensor


class OpenPeftBridge(MegatronPeftBridge):
    """MegatronPeftBridge with public methods for its steps. As a base class, list it before MegatronModelBridge."""

    def adapters_of_all_stages(self, megatron_model: MegatronModule | list[MegatronModule]) -> list[tuple]:
        """Return a tuple for each adapter of all pipeline stages; it begins with the adapter's name."""
        return super()._megatron_global_adapters_info_all_pp_ranks(megatron_model)

    def merge_into_tensors(
        self, megatron_model: list[MegatronModule], tensors: dict[str, Tensor], adapters: list[AdapterWeight]
    ) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of a layer, by name, with its adapters merged into them."""
        return super()._merge_lora_adapter_weights(megatron_model, tensors, adapters)

    def merge_into_expert(
        self, task: WeightConversionTask, tensors: dict[str, Tensor], adapters: list[AdapterWeight], num_experts: int
    ) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of an expert, by name, with its adapters merged into them.

        Under expert parallelism `tensors` contains one expert of each rank.
        """
        return super()._merge_grouped_export_adapter_weights(task, tensors, adapters, num_experts)

    def gather_over_experts(self, weight: Tensor) -> list[Tensor]:
        """Return the weights of an adapter on all expert-parallel ranks, in the order of ranks."""
        return self._gather_expert_adapter_weight(weight.contiguous()) or [weight]

    def with_progress[Task](self, tasks: Collection[Task], description: str, show: bool) -> Iterable[Task]:
        """Return an iterable over tasks that shows a progress bar on the first rank."""
        return self._with_progress_tracking(tasks, description, show)  # type: ignore[attr-defined]

    def _megatron_global_adapters_info_all_pp_ranks(self, megatron_model: Any) -> list[tuple]:
        return self.adapters_of_all_stages(megatron_model)

    def _merge_lora_adapter_weights(
        self, megatron_model: Any, converted_weights_dict: dict[str, Tensor], adapter_weights: list[AdapterWeight]
    ) -> dict[str, Tensor]:
        return self.merge_into_tensors(megatron_model, converted_weights_dict, adapter_weights)

    def _merge_grouped_export_adapter_weights(
        self,
        task: WeightConversionTask,
        converted_weights_dict: dict[str, Tensor],
        adapter_weights: list[AdapterWeight],
        num_moe_experts: int,
    ) -> dict[str, Tensor]:
        return self.merge_into_expert(task, converted_weights_dict, adapter_weights, num_moe_experts)
