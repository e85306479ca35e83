"""Adapters between Megatron and Hugging Face: rows in Hugging Face's order, experts, DoRA's magnitudes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.adapter_rows import (
    HF_PREFIX,
    IN,
    OUT,
    Scaled,
    adapter_row,
    hf_targets,
    layer_of,
)
from qwen3vl_bridge.weights.bridge_mappings import InputMajor
from qwen3vl_bridge.weights.joined_adapters import join, pack_experts
from qwen3vl_bridge.weights.rows import (
    OUTPUT_LAYER,
    ConcatenatedQKV,
    Dimensions,
    Row,
    expand,
    is_of_experts,
    shared_name,
)

import torch
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple
from megatron.bridge.models.conversion.peft_bridge import (
    AdapterWeight,
    AdapterWeightConversionTask,
    MegatronPeftBridge,
)
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.bridge.utils.common_utils import extract_expert_number_from_param
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask

Weights = dict[str, Tensor]
Tasks = dict[str, list[AdapterWeightConversionTask]]

# Index of an expert that is a separate module.
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


class AdapterConversion(MegatronPeftBridge):
    """Megatron-Bridge's conversion of adapters, completed. To be listed before MegatronModelBridge as a base class.

    Megatron-Bridge leaves a vision layer's q, k, v rows in Megatron's interleaved order, supports one adapter for them
    where CanonicalLoRA has three, and does not support DoRA's magnitudes, neither in adapters nor in merged weights. It
    counts adapters of experts from 0 on each rank if they are separate modules, merges them transposed into input-major
    tensors and its own into other ranks' experts, and packs them in another order than `peft` reads.

    Class attributes:
        family: name of the family in the registry.
    """

    family: ClassVar[str]

    def materialize_adapter_weights(self, adapter_tasks: list[AdapterWeightConversionTask]) -> list[AdapterWeight]:
        """Whole adapters of a layer, the rows of `linear_out` in Hugging Face's order.

        A single one, if Hugging Face has one tensor for what CanonicalLoRA has several adapters for.
        """
        adapters = super().materialize_adapter_weights(adapter_tasks)
        first, *others = adapters
        if others:
            return [join(adapters)] if _is_one_tensor(self.family, first.global_base_prefix) else adapters
        if first.adapter_key is not None:
            return adapters
        rows = self._in_hf_order(first.global_base_prefix, first.linear_out_weight.weight)
        return [dataclasses.replace(first, linear_out_weight=first.linear_out_weight._replace(weight=rows))]

    def stream_adapter_weights_megatron_to_hf(
        self,
        megatron_model: MegatronModule | list[MegatronModule],
        cpu: bool = True,
        show_progress: bool = True,
        exclude_adapter_base_prefixes: Iterable[str] | None = None,
    ) -> Iterator[HFWeightTuple]:
        """Like Megatron-Bridge's; adapters of experts as `peft` and vLLM read them: two matrices for all experts of a
        layer, of gate and up as `experts.base_layer`, of the down projection as `experts`.

        Raises:
            ValueError: the adapters are DoRA's, which have more than the two matrices that callers expect.
        """
        chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        if layers := list(_dora_layers(chunks)):
            raise ValueError(
                f"the model has {len(layers)} DoRA adapters, whose magnitude vectors this export cannot return; save "
                "them with save_hf_adapter, or export merged weights (merge_adapter_weights=True)"
            )
        weights = self._adapters(chunks, exclude_adapter_base_prefixes or (), show_progress=show_progress)
        return (HFWeightTuple(name, weight.cpu() if cpu else weight) for name, weight in weights.items())

    def adapter_weights(self, megatron_model: list[MegatronModule], exclude: Iterable[str] = ()) -> Weights:
        """All adapters on the CPU, with the names of `peft`: M.lora_A.weight, M.lora_B.weight, M.lora_magnitude_vector.

        Args:
            megatron_model: a rank's virtual stages.
            exclude: prefixes of Megatron names of layers whose adapters are left out.
        """
        weights, registry = self._adapters(megatron_model, exclude), self.mapping_registry()
        for prefix, layer in _dora_layers(megatron_model):
            if prefix.startswith(tuple(exclude)):
                continue
            names = self._get_base_hf_param_names_for_adapter(registry, prefix, None, ".weight")
            for name, magnitude in self._magnitudes(megatron_model, prefix, layer, names).items():
                weights[f"{name.removesuffix('.weight')}.lora_magnitude_vector"] = magnitude
        # Tensors of a file must not share memory, as the A of q, k and v do.
        return {name: weight.detach().cpu().clone().contiguous() for name, weight in weights.items()}

    def adapted_tensors(self, megatron_model: list[MegatronModule], exclude: Iterable[str] = ()) -> dict[str, Scaled]:
        """The Hugging Face tensors with adapters, with their rank and alpha; arguments as for `adapter_weights`."""
        tasks, rows = self.build_adapter_conversion_tasks(megatron_model, exclude), self._rows(megatron_model)
        layers = {shared_name(prefix): _scaled(self.family, prefix, each, tasks) for prefix, each in tasks.items()}
        weights = ((shared_name(layer_of(row)), row) for row in rows)
        return {name: layers[layer] for layer, row in weights if layer in layers for name in row.hf}

    def hf_targets(self, megatron_model: list[MegatronModule], exclude: Iterable[str] = ()) -> dict[str, list[str]]:
        """The fields of `peft`'s configuration that select adapted weights; arguments as for `adapter_weights`."""
        tensors = {name for row in self._rows(megatron_model) for name in row.hf}
        return hf_targets(self.adapted_tensors(megatron_model, exclude), tensors)

    def _rows(self, megatron_model: list[MegatronModule]) -> list[Row]:
        """The model's rows of the weight table, with the expert format of transformers' models."""
        return list(expand(family(self.family).rows(), unwrap_model(megatron_model)[0].config.dimensions()))

    def _dimensions(self) -> Dimensions:
        return family(self.family).dimensions_of(self.hf_config.to_dict())

    def _megatron_global_adapters_info_all_pp_ranks(
        self, megatron_model: MegatronModule | list[MegatronModule]
    ) -> list[tuple]:
        """Like Megatron-Bridge's, with this rank's experts numbered among all, as in the names of their weights."""
        first = self._experts_of_a_rank() * parallel_state.get_expert_model_parallel_rank()
        return [
            (_EXPERT.sub(lambda number: f"{int(number[0]) + first}", name), *others)
            for name, *others in super()._megatron_global_adapters_info_all_pp_ranks(megatron_model)
        ]

    def _experts_of_a_rank(self) -> int:
        return self._dimensions()["experts"] // parallel_state.get_expert_model_parallel_world_size()

    def _adapters(
        self, megatron_model: list[MegatronModule], exclude: Iterable[str], *, show_progress: bool = False
    ) -> Weights:
        """All adapters' two matrices, with the names of `peft`."""
        tasks = self.build_adapter_conversion_tasks(megatron_model, exclude)
        experts = {prefix: each for prefix, each in tasks.items() if is_of_experts(prefix)}
        joined = [prefix for prefix, each in tasks.items() if len(each) > 1 and _is_one_tensor(self.family, prefix)]
        weights = super().stream_adapter_weights_megatron_to_hf(
            megatron_model,
            cpu=False,
            show_progress=show_progress,
            exclude_adapter_base_prefixes=(*exclude, *experts, *joined),
        )
        weights = dict(weights) | self._adapters_of_experts(megatron_model, experts, _common_scale(tasks))
        registry = self.mapping_registry()
        for prefix in (prefix for prefix in joined if prefix not in experts):
            (adapter,) = self.materialize_adapter_weights(tasks[prefix])
            (name,) = self._get_base_hf_param_names_for_adapter(registry, prefix, None, ".weight")
            weights[self._make_lora_param_name(name, f".{IN}")] = adapter.linear_in_weight.weight
            weights[self._make_lora_param_name(name, f".{OUT}")] = adapter.linear_out_weight.weight
        return weights

    def _adapters_of_experts(self, megatron_model: list[MegatronModule], tasks: Tasks, scale: float | None) -> Weights:
        """Adapters of all experts of a layer together, scaled like the others."""
        layers = defaultdict(dict)
        for prefix, each in tasks.items():
            (adapter,) = self.materialize_adapter_weights(each)
            factor = 1 if scale is None else adapter.alpha / adapter.dim / scale
            for expert, (rows, columns) in self._of_each_expert(adapter).items():
                layers[shared_name(prefix)][expert] = rows, columns * factor
        weights = {}
        for row in self._rows(megatron_model):
            if is_of_experts(row.megatron) and row.position[-1] == 0 and (matrices := layers.get(_shared_layer(row))):
                # `peft` wraps the module of the experts once for each parameter that has adapters.
                alone = len(layers.keys() & {_shared_layer(row)[:-1] + last for last in "12"}) == 1
                for kind, matrix in zip((IN, OUT), pack_experts(matrices), strict=True):
                    name = adapter_row(row, kind, 1).hf[0].removeprefix(HF_PREFIX)
                    weights[name.replace(".base_layer", "") if alone else name] = matrix
        return weights

    def _of_each_expert(self, adapter: AdapterWeight) -> dict[int, tuple[Tensor, Tensor]]:
        """[dim, in] and [out, dim] of the experts of an adapter, on all expert-parallel ranks."""
        sides = [side.weight for side in (adapter.linear_in_weight, adapter.linear_out_weight)]
        ranks = zip(*(self._gather_expert_adapter_weight(side.contiguous()) or [side] for side in sides), strict=True)
        own, number = self._experts_of_a_rank(), _EXPERT.search(adapter.global_base_prefix)
        here = range(own) if number is None else [int(number[0]) % own]
        return {
            rank * own + expert: tuple(side[expert] if side.ndim > 2 else side for side in both)
            for rank, both in enumerate(ranks)
            for expert in here
        }

    def _merge_lora_adapter_weights(
        self,
        megatron_model: list[MegatronModule],
        converted_weights_dict: Weights,
        adapter_weights: list[AdapterWeight],
    ) -> Weights:
        prefix = adapter_weights[0].global_base_prefix
        if is_of_experts(prefix):
            return self._merge_into_experts(converted_weights_dict, adapter_weights[0])
        whole = {name: weight.float() for name, weight in converted_weights_dict.items()}
        if self._is_gdn_in_proj_split(whole):
            merged = self._merge_into_sections(megatron_model, whole, adapter_weights[0])
        else:
            merged = super()._merge_lora_adapter_weights(megatron_model, whole, adapter_weights)
        if (layer := dict(_dora_layers(megatron_model)).get(prefix)) is not None:
            for name, magnitude in self._magnitudes(megatron_model, prefix, layer, list(merged)).items():
                length = magnitude.to(merged[name]) / torch.linalg.norm(merged[name], dim=1)
                merged[name] = merged[name] * length[:, None]
        return {name: weight.to(converted_weights_dict[name].dtype) for name, weight in merged.items()}

    def _merge_into_sections(
        self, megatron_model: list[MegatronModule], weights: Weights, adapter: AdapterWeight
    ) -> Weights:
        """Merge into the projections of linear attention. Megatron-Bridge's own rounds the product to their dtype."""
        rows, columns = adapter.linear_in_weight.weight, adapter.linear_out_weight.weight
        parts = self._get_fused_adapter_linear_out_slices(megatron_model, list(weights), columns)
        return {
            name: self._merge_single_adapter_weight(weight, adapter.alpha, adapter.dim, rows, parts[name])
            for name, weight in weights.items()
        }

    def _merge_into_experts(self, converted: Weights, adapter: AdapterWeight) -> Weights:
        """Merge into tensors of one expert each: gate, up or down."""
        experts, merged = self._of_each_expert(adapter), {}
        for name, weight in converted.items():
            rows, columns = experts[self._infer_hf_expert_idx(name)]
            if len(columns) > len(weight):
                columns = columns.chunk(2)[self._is_fused_fc1_up_proj(name)]
            merged[name] = self._merge_single_adapter_weight(weight, adapter.alpha, adapter.dim, rows, columns)
        return merged

    def _merge_grouped_export_adapter_weights(
        self,
        task: WeightConversionTask,
        converted_weights_dict: Weights,
        adapter_weights: list[AdapterWeight],
        num_moe_experts: int,
    ) -> Weights:
        """Merge into an expert of each expert-parallel rank, [ranks, ...] if there are several."""
        if not converted_weights_dict:
            return converted_weights_dict
        (adapter,), own = adapter_weights, self._experts_of_a_rank()
        number = extract_expert_number_from_param(task.global_param_name) % own
        matrices = [both for expert, both in self._of_each_expert(adapter).items() if expert % own == number]
        input_major, merged = isinstance(task.mapping, InputMajor), {}
        for name, weight in converted_weights_dict.items():
            experts = [weight] if len(matrices) == 1 else list(weight)
            experts = [expert.t() if input_major else expert for expert in experts]
            experts = [
                self._merge_single_adapter_weight(expert, adapter.alpha, adapter.dim, *both)
                for expert, both in zip(experts, matrices, strict=True)
            ]
            experts = [expert.t() if input_major else expert for expert in experts]
            merged[name] = experts[0] if len(matrices) == 1 else torch.stack(experts)
        return merged

    def _magnitudes(
        self, megatron_model: list[MegatronModule], prefix: str, layer: DoRALinear, names: list[str]
    ) -> Weights:
        """The [out] magnitudes of a layer, for each of its Hugging Face tensors."""
        rows = self._in_hf_order(prefix, layer.adapter.get_weight_magnitude().detach()[:, None])
        parts = self._get_fused_adapter_linear_out_slices(megatron_model, names, rows) or {names[0]: rows}
        return {name: part[:, 0] for name, part in parts.items()}

    def _in_hf_order(self, prefix: str, rows: Tensor) -> Tensor:
        """[out, r] rows, from q, k, v of head 0, of head 1, ... to q of all heads, k of all, v of all.

        For an output layer, only the rows of tokens: the others pad the vocabulary.
        """
        if prefix == OUTPUT_LAYER:
            return rows[: self._dimensions()["vocab"]]
        if not _is_concatenated(self.family, prefix):
            return rows
        return rows.unflatten(0, (self._dimensions()["v_heads"], 3, -1)).transpose(0, 1).flatten(0, 2)


@functools.cache
def _concatenated(name: str) -> re.Pattern[str]:
    """Megatron names of a family's weights whose q, k and v are one Hugging Face tensor."""
    names = [row.megatron for row in family(name).rows() if isinstance(row, ConcatenatedQKV)]
    return re.compile("|".join(re.escape(name).replace(r"\*", r"\d+") for name in names))


def _is_concatenated(name: str, prefix: str) -> bool:
    return _concatenated(name).fullmatch(f"{prefix}.weight") is not None


def _is_one_tensor(name: str, prefix: str) -> bool:
    """Whether a layer whose parts have separate adapters is written as one tensor."""
    return is_of_experts(prefix) or _is_concatenated(name, prefix)


def _shared_layer(row: Row) -> str:
    return shared_name(layer_of(row))


def _common_scale(tasks: Tasks) -> float | None:
    """The common scale of layers' adapters, except those of experts (`normalize_moe_lora`)."""
    scales = {each[0].alpha / each[0].dim for prefix, each in tasks.items() if not is_of_experts(prefix)}
    return scales.pop() if len(scales) == 1 else None


def _scaled(name: str, prefix: str, tasks: list[AdapterWeightConversionTask], others: Tasks) -> Scaled:
    """A layer's rank and alpha as written; for parts that are one tensor, the combined ones."""
    rank = sum(task.dim for task in tasks) if _is_one_tensor(name, prefix) else tasks[0].dim
    scale = (_common_scale(others) if is_of_experts(prefix) else None) or tasks[0].alpha / tasks[0].dim
    return Scaled(rank, scale * rank)


def _dora_layers(megatron_model: MegatronModule | list[MegatronModule]) -> Iterator[tuple[str, DoRALinear]]:
    """Name and module of each layer. DoRA requires one pipeline stage, so these are names of the whole model."""
    for chunk in unwrap_model(megatron_model if isinstance(megatron_model, list) else [megatron_model]):
        for name, module in chunk.named_modules():
            if isinstance(module, DoRALinear):
                yield name, module
