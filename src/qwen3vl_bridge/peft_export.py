"""Adapters in Hugging Face's form: rows in Hugging Face's order, DoRA's magnitudes, a folder for the `peft` library.

What lives here: what Megatron-Bridge's conversion of adapters lacks for this model, as a base class of our bridges,
and `save_hf_adapter`. What may not: parameter names (`mappings.py`), adapters on the model (`peft.py`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.adapter_rows import HF_PREFIX, IN, MARK, OUT, adapter_config, adapter_row, hf_targets, layer_of
from qwen3vl_bridge.mappings import EXPERT_ROWS, TABLE, ExpertLayout, is_of_experts
from qwen3vl_bridge.parallel import wait_for_all
from qwen3vl_bridge.param_mappings import InputMajor
from qwen3vl_bridge.weight_rows import ConcatenatedQKV, expand

import torch
from megatron.bridge.models.conversion.peft_bridge import (
    AdapterWeight,
    AdapterWeightConversionTask,
    MegatronPeftBridge,
)
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from qwen3vl_bridge.peft import Qwen3VLParts

    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask

Weights = dict[str, Tensor]

# Megatron names of weights whose q, k and v are one Hugging Face tensor.
_CONCATENATED_QKV = re.compile(
    "|".join(re.escape(row.megatron).replace(r"\*", r"\d+") for row in TABLE if isinstance(row, ConcatenatedQKV))
)


class AdapterConversion(MegatronPeftBridge):
    """Megatron-Bridge's conversion of adapters, completed. To be named before MegatronModelBridge as a base class.

    Megatron-Bridge leaves a vision layer's q, k, v rows as Megatron interleaves them, and knows nothing of DoRA's
    magnitudes, neither in adapters nor in merged weights. Adapters of experts that are modules of their own it counts
    on each rank from 0, has no name for, and merges into input-major tensors the wrong way round.
    """

    def build_adapter_conversion_tasks(
        self, megatron_model: list[MegatronModule], *args: Any, **kwargs: Any
    ) -> dict[str, list[AdapterWeightConversionTask]]:
        """As Megatron-Bridge's.

        Raises:
            ValueError: experts that have adapters are spread over ranks.
        """
        size = unwrap_model(megatron_model)[0].config.expert_model_parallel_size
        if size > 1 and any(is_of_experts(name) and MARK in name for name in _parameter_names(megatron_model)):
            raise ValueError(
                f"expert_model_parallel_size is {size}, expected 1 to save adapters of experts, or weights merged with "
                "them, from a model; of a run's checkpoint, conversion/adapters.py writes both at any split"
            )
        return super().build_adapter_conversion_tasks(megatron_model, *args, **kwargs)

    def materialize_adapter_weights(self, adapter_tasks: list[AdapterWeightConversionTask]) -> list[AdapterWeight]:
        """Whole adapters, the rows of `linear_out` in Hugging Face's order where it has one tensor for q, k and v."""
        adapters = []
        for adapter in super().materialize_adapter_weights(adapter_tasks):
            rows = self._in_hf_order(adapter.global_base_prefix, adapter.linear_out_weight.weight)
            adapters.append(
                dataclasses.replace(adapter, linear_out_weight=adapter.linear_out_weight._replace(weight=rows))
            )
        return adapters

    def stream_adapter_weights_megatron_to_hf(
        self, megatron_model: MegatronModule | list[MegatronModule], *args: Any, **kwargs: Any
    ) -> Iterable[tuple[str, Tensor]]:
        """As Megatron-Bridge's.

        Raises:
            ValueError: the adapters are DoRA's, which are more than the two matrices that callers expect, or those of
                experts, which callers do not name to `peft`.
        """
        if any(is_of_experts(name) and MARK in name for name in _parameter_names(megatron_model)):
            raise ValueError(
                "experts have adapters, which Megatron-Bridge has no configuration for; save them with "
                "qwen3vl_bridge.save_hf_adapter"
            )
        if layers := list(_dora_layers(megatron_model)):
            raise ValueError(
                f"the model has {len(layers)} DoRA adapters, whose magnitudes Megatron-Bridge would leave out; "
                "save them with qwen3vl_bridge.save_hf_adapter"
            )
        return super().stream_adapter_weights_megatron_to_hf(megatron_model, *args, **kwargs)

    def adapter_weights(self, megatron_model: list[MegatronModule]) -> Weights:
        """All adapters on the CPU, as `peft` names them: M.lora_A.weight, M.lora_B.weight, M.lora_magnitude_vector."""
        experts, weights = self._adapters_of_experts(megatron_model)
        others = super().stream_adapter_weights_megatron_to_hf(
            megatron_model, cpu=True, show_progress=False, exclude_adapter_base_prefixes=experts
        )
        weights |= dict(others)
        registry = self.mapping_registry()
        for prefix, layer in _dora_layers(megatron_model):
            names = self._get_base_hf_param_names_for_adapter(registry, prefix, None, ".weight")
            for name, magnitude in self._magnitudes(megatron_model, prefix, layer, names).items():
                weights[f"{name.removesuffix('.weight')}.lora_magnitude_vector"] = magnitude.cpu()
        # A file may hold no tensor that shares memory with another, as the A of q, k and v does.
        return {name: weight.detach().clone().contiguous() for name, weight in weights.items()}

    def hf_targets(self, megatron_model: list[MegatronModule]) -> dict[str, list[str]]:
        """What of `peft`'s configuration says which weights have adapters."""
        registry, adapted, tensors = self.mapping_registry(), set(), set()
        layers = self.build_adapter_conversion_tasks(megatron_model).keys()
        for name in self._megatron_global_param_names_all_pp_ranks(megatron_model):
            layer = self._get_lora_unwrapped_name(name).removesuffix(".weight")
            names = set(self._get_base_hf_param_names_for_adapter(registry, layer, None, ".weight"))
            tensors |= names
            adapted |= names if layer in layers else set()
        return hf_targets(adapted, tensors)

    def _adapters_of_experts(self, megatron_model: list[MegatronModule]) -> tuple[list[str], Weights]:
        """The layers of experts that have adapters, and these, of all experts of a layer together."""
        tasks = self.build_adapter_conversion_tasks(megatron_model)
        rows = expand(EXPERT_ROWS[ExpertLayout.INPUT_MAJOR], unwrap_model(megatron_model)[0].config.dimensions())
        layers, parts = [], {IN: defaultdict(list), OUT: defaultdict(list)}
        for weight in rows:
            if (layer := layer_of(weight)) not in tasks:
                continue
            layers.append(layer)
            (adapter,) = self.materialize_adapter_weights(tasks[layer])
            for kind, matrix in ((IN, adapter.linear_in_weight.weight), (OUT, adapter.linear_out_weight.weight)):
                name = adapter_row(weight, kind, adapter.dim).hf[0].removeprefix(HF_PREFIX)
                parts[kind][name].append(matrix.cpu())
        weights = {name: torch.cat(each) for name, each in parts[IN].items()}
        return layers, weights | {name: torch.stack(each, -1).flatten(1) for name, each in parts[OUT].items()}

    def _merge_lora_adapter_weights(
        self,
        megatron_model: list[MegatronModule],
        converted_weights_dict: Weights,
        adapter_weights: list[AdapterWeight],
    ) -> Weights:
        prefix = adapter_weights[0].global_base_prefix
        layer = dict(_dora_layers(megatron_model)).get(prefix)
        if layer is None:
            return super()._merge_lora_adapter_weights(megatron_model, converted_weights_dict, adapter_weights)
        whole = {name: weight.float() for name, weight in converted_weights_dict.items()}
        merged = super()._merge_lora_adapter_weights(megatron_model, whole, adapter_weights)
        for name, magnitude in self._magnitudes(megatron_model, prefix, layer, list(merged)).items():
            length = magnitude.to(merged[name]) / torch.linalg.norm(merged[name], dim=1)
            merged[name] = merged[name] * length[:, None]
        return {name: weight.to(converted_weights_dict[name].dtype) for name, weight in merged.items()}

    def _merge_grouped_export_adapter_weights(
        self,
        task: WeightConversionTask,
        converted_weights_dict: Weights,
        adapter_weights: list[AdapterWeight],
        num_moe_experts: int,
    ) -> Weights:
        def turned(weights: Weights) -> Weights:
            return {name: weight.t() for name, weight in weights.items()} if input_major else weights

        input_major = isinstance(task.mapping, InputMajor)
        weights = turned(converted_weights_dict)
        merged = super()._merge_grouped_export_adapter_weights(task, weights, adapter_weights, num_moe_experts)
        return turned(merged)

    def _magnitudes(
        self, megatron_model: list[MegatronModule], prefix: str, layer: DoRALinear, names: list[str]
    ) -> Weights:
        """The [out] magnitudes of a layer, for each of the Hugging Face tensors it is made of."""
        rows = self._in_hf_order(prefix, layer.adapter.get_weight_magnitude().detach()[:, None])
        parts = self._get_fused_adapter_linear_out_slices(megatron_model, names, rows) or {names[0]: rows}
        return {name: part[:, 0] for name, part in parts.items()}

    def _in_hf_order(self, prefix: str, rows: Tensor) -> Tensor:
        """[out, r] rows, from q, k, v of head 0, of head 1, ... to q of all heads, k of all, v of all."""
        if not _CONCATENATED_QKV.fullmatch(f"{prefix}.weight"):
            return rows
        return rows.unflatten(0, (self.hf_config.vision_config.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _parameter_names(megatron_model: MegatronModule | list[MegatronModule]) -> Iterator[str]:
    for chunk in megatron_model if isinstance(megatron_model, list) else [megatron_model]:
        yield from (name for name, _ in chunk.named_parameters())


def _dora_layers(megatron_model: MegatronModule | list[MegatronModule]) -> Iterator[tuple[str, DoRALinear]]:
    """Name and module of each. DoRA has one pipeline stage, so that its own names are those of the whole model."""
    for chunk in unwrap_model(megatron_model if isinstance(megatron_model, list) else [megatron_model]):
        for name, module in chunk.named_modules():
            if isinstance(module, DoRALinear):
                yield name, module


def save_hf_adapter(
    bridge: AutoBridge,
    model: list[MegatronModule],
    path: str | Path,
    peft: Qwen3VLParts,
    *,
    base_model_name_or_path: str | None = None,
) -> None:
    """Save a model's LoRA or DoRA adapters as a folder that `peft.PeftModel.from_pretrained` loads.

    All ranks call it; rank 0 writes.

    Args:
        bridge: of the model.
        model: with adapters, as the list of a rank's virtual stages.
        path: the folder; made if it is not there.
        peft: the configuration that put the adapters in.
        base_model_name_or_path: name or folder of the model without adapters; the bridge's own where None.

    Raises:
        ValueError: the model has no adapters.
    """
    conversion = bridge._model_bridge
    weights = conversion.adapter_weights(model)
    if not weights:
        raise ValueError(
            "the model has no adapters to save; expected one that Qwen3VLLoRA or Qwen3VLDoRA was applied to"
        )
    if base_model_name_or_path is None:
        base_model_name_or_path = str(getattr(bridge.hf_pretrained, "model_name_or_path", None) or "")
    config = adapter_config(peft.settings, conversion.hf_targets(model), base_model_name_or_path)
    if torch.distributed.get_rank() == 0:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {f"{HF_PREFIX}{name}": weight for name, weight in weights.items()},
            folder / "adapter_model.safetensors",
        )
        # Last: a folder with this file is an adapter.
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    wait_for_all()
