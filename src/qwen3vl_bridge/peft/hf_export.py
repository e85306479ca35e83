"""Adapters in Hugging Face's form: rows in Hugging Face's order, DoRA's magnitudes, a folder for the `peft` library.

What lives here: what Megatron-Bridge's conversion of adapters lacks for this model, as a base class of our bridges,
and `save_hf_adapter`. What may not: parameter names (`models/qwen3_vl/table.py`), adapters on the model (`lora.py`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge.checkpoint.adapters.settings import read_run_config
from qwen3vl_bridge.checkpoint.formats.megatron.folder import RUN_CONFIG
from qwen3vl_bridge.models.qwen3_vl.table import TABLE
from qwen3vl_bridge.parallel.collectives import wait_for_all
from qwen3vl_bridge.weights.adapter_rows import (
    HF_PREFIX,
    IN,
    OUT,
    Scaled,
    adapter_config,
    adapter_row,
    hf_targets,
    layer_of,
)
from qwen3vl_bridge.weights.bridge_mappings import InputMajor
from qwen3vl_bridge.weights.joined_adapters import join, pack_experts
from qwen3vl_bridge.weights.names import OUTPUT_LAYER, is_of_experts, shared_name
from qwen3vl_bridge.weights.rows import ConcatenatedQKV, Row, expand

import torch
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple
from megatron.bridge.models.conversion.peft_bridge import (
    AdapterWeight,
    AdapterWeightConversionTask,
    MegatronPeftBridge,
)
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.bridge.utils.common_utils import extract_expert_number_from_param
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask

Weights = dict[str, Tensor]
Tasks = dict[str, list[AdapterWeightConversionTask]]

# Megatron names of weights whose q, k and v are one Hugging Face tensor.
_CONCATENATED_QKV = re.compile(
    "|".join(re.escape(row.megatron).replace(r"\*", r"\d+") for row in TABLE if isinstance(row, ConcatenatedQKV))
)
# The number of an expert that is a module of its own.
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


class AdapterConversion(MegatronPeftBridge):
    """Megatron-Bridge's conversion of adapters, completed. To be named before MegatronModelBridge as a base class.

    Megatron-Bridge leaves a vision layer's q, k, v rows as Megatron interleaves them, knows one adapter for them where
    CanonicalLoRA has three, and nothing of DoRA's magnitudes, neither in adapters nor in merged weights. Adapters of
    experts it counts on each rank from 0 where they are modules of their own, merges into input-major tensors the wrong
    way round and into other ranks' experts its own, and packs in another order than `peft` reads.
    """

    def materialize_adapter_weights(self, adapter_tasks: list[AdapterWeightConversionTask]) -> list[AdapterWeight]:
        """Whole adapters of a layer, the rows of `linear_out` in Hugging Face's order.

        One, where Hugging Face has one tensor for what CanonicalLoRA has several adapters for.
        """
        adapters = super().materialize_adapter_weights(adapter_tasks)
        first, *others = adapters
        if others:
            return [join(adapters)] if _is_one_tensor(first.global_base_prefix) else adapters
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
        """As Megatron-Bridge's; those of experts as `peft` and vLLM read them: two matrices for all experts of a layer,
        of gate and up as `experts.base_layer`, of the projection down as `experts`.

        Raises:
            ValueError: the adapters are DoRA's, which are more than the two matrices that callers expect.
        """
        chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        if layers := list(_dora_layers(chunks)):
            raise ValueError(
                f"the model has {len(layers)} DoRA adapters, whose magnitudes callers of this don't expect; save them "
                "with save_hf_adapter, or export weights that have adapters merged in (merge_adapter_weights=True)"
            )
        weights = self._adapters(chunks, exclude_adapter_base_prefixes or (), show_progress=show_progress)
        return (HFWeightTuple(name, weight.cpu() if cpu else weight) for name, weight in weights.items())

    def adapter_weights(self, megatron_model: list[MegatronModule], exclude: Iterable[str] = ()) -> Weights:
        """All adapters on the CPU, as `peft` names them: M.lora_A.weight, M.lora_B.weight, M.lora_magnitude_vector.

        Args:
            megatron_model: a rank's virtual stages.
            exclude: how the names of layers begin, in Megatron, whose adapters are left out.
        """
        weights, registry = self._adapters(megatron_model, exclude), self.mapping_registry()
        for prefix, layer in _dora_layers(megatron_model):
            if prefix.startswith(tuple(exclude)):
                continue
            names = self._get_base_hf_param_names_for_adapter(registry, prefix, None, ".weight")
            for name, magnitude in self._magnitudes(megatron_model, prefix, layer, names).items():
                weights[f"{name.removesuffix('.weight')}.lora_magnitude_vector"] = magnitude
        # A file may hold no tensor that shares memory with another, as the A of q, k and v does.
        return {name: weight.detach().cpu().clone().contiguous() for name, weight in weights.items()}

    def adapted_tensors(self, megatron_model: list[MegatronModule], exclude: Iterable[str] = ()) -> dict[str, Scaled]:
        """The Hugging Face tensors that have adapters, with their rank and alpha; arguments as `adapter_weights`'."""
        tasks, rows = self.build_adapter_conversion_tasks(megatron_model, exclude), self._rows(megatron_model)
        layers = {shared_name(prefix): _scaled(prefix, each, tasks) for prefix, each in tasks.items()}
        weights = ((shared_name(layer_of(row)), row) for row in rows)
        return {name: layers[layer] for layer, row in weights if layer in layers for name in row.hf}

    def hf_targets(self, megatron_model: list[MegatronModule], exclude: Iterable[str] = ()) -> dict[str, list[str]]:
        """What of `peft`'s configuration says which weights have adapters; arguments as `adapter_weights`'."""
        tensors = {name for row in self._rows(megatron_model) for name in row.hf}
        return hf_targets(self.adapted_tensors(megatron_model, exclude), tensors)

    def _rows(self, megatron_model: list[MegatronModule]) -> list[Row]:
        """The model's rows of the weight table, experts as transformers' models have them."""
        return list(expand(TABLE, unwrap_model(megatron_model)[0].config.dimensions()))

    def _megatron_global_adapters_info_all_pp_ranks(
        self, megatron_model: MegatronModule | list[MegatronModule]
    ) -> list[tuple]:
        """As Megatron-Bridge's, this rank's experts counted among all, as those of their weights are."""
        first = self._experts_of_a_rank() * parallel_state.get_expert_model_parallel_rank()
        return [
            (_EXPERT.sub(lambda number: f"{int(number[0]) + first}", name), *others)
            for name, *others in super()._megatron_global_adapters_info_all_pp_ranks(megatron_model)
        ]

    def _experts_of_a_rank(self) -> int:
        experts = getattr(self.hf_config.text_config, "num_experts", 0)
        return experts // parallel_state.get_expert_model_parallel_world_size()

    def _adapters(
        self, megatron_model: list[MegatronModule], exclude: Iterable[str], *, show_progress: bool = False
    ) -> Weights:
        """All adapters' two matrices, as `peft` names them."""
        tasks = self.build_adapter_conversion_tasks(megatron_model, exclude)
        experts = {prefix: each for prefix, each in tasks.items() if is_of_experts(prefix)}
        joined = [prefix for prefix, each in tasks.items() if len(each) > 1 and _is_one_tensor(prefix)]
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
        """Those of all experts of a layer together, scaled as the others' are."""
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
        """[dim, in] and [out, dim] of the experts that an adapter is of, on all expert-parallel ranks."""
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
        layer = dict(_dora_layers(megatron_model)).get(prefix)
        if layer is None:
            return super()._merge_lora_adapter_weights(megatron_model, converted_weights_dict, adapter_weights)
        whole = {name: weight.float() for name, weight in converted_weights_dict.items()}
        merged = super()._merge_lora_adapter_weights(megatron_model, whole, adapter_weights)
        for name, magnitude in self._magnitudes(megatron_model, prefix, layer, list(merged)).items():
            length = magnitude.to(merged[name]) / torch.linalg.norm(merged[name], dim=1)
            merged[name] = merged[name] * length[:, None]
        return {name: weight.to(converted_weights_dict[name].dtype) for name, weight in merged.items()}

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
        """Merge into an expert of each expert-parallel rank, [ranks, ...] where there are several."""
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
        """The [out] magnitudes of a layer, for each of the Hugging Face tensors it is made of."""
        rows = self._in_hf_order(prefix, layer.adapter.get_weight_magnitude().detach()[:, None])
        parts = self._get_fused_adapter_linear_out_slices(megatron_model, names, rows) or {names[0]: rows}
        return {name: part[:, 0] for name, part in parts.items()}

    def _in_hf_order(self, prefix: str, rows: Tensor) -> Tensor:
        """[out, r] rows, from q, k, v of head 0, of head 1, ... to q of all heads, k of all, v of all.

        Of an output layer, those of tokens: the others pad the vocabulary.
        """
        if prefix == OUTPUT_LAYER:
            return rows[: self.hf_config.text_config.vocab_size]
        if not _CONCATENATED_QKV.fullmatch(f"{prefix}.weight"):
            return rows
        return rows.unflatten(0, (self.hf_config.vision_config.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _is_one_tensor(prefix: str) -> bool:
    """Whether a layer whose parts have adapters of their own is written as one tensor."""
    return is_of_experts(prefix) or _CONCATENATED_QKV.fullmatch(f"{prefix}.weight") is not None


def _shared_layer(row: Row) -> str:
    return shared_name(layer_of(row))


def _common_scale(tasks: Tasks) -> float | None:
    """What layers' adapters are scaled by: all alike, but those of experts (`normalize_moe_lora`)."""
    scales = {each[0].alpha / each[0].dim for prefix, each in tasks.items() if not is_of_experts(prefix)}
    return scales.pop() if len(scales) == 1 else None


def _scaled(prefix: str, tasks: list[AdapterWeightConversionTask], others: Tasks) -> Scaled:
    """A layer's rank and alpha as they are written, of parts together where these are one tensor."""
    rank = sum(task.dim for task in tasks) if _is_one_tensor(prefix) else tasks[0].dim
    scale = (_common_scale(others) if is_of_experts(prefix) else None) or tasks[0].alpha / tasks[0].dim
    return Scaled(rank, scale * rank)


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
    peft_config: PEFT,
    base_model_name_or_path: str | None = None,
    show_progress: bool = False,
    exclude_adapter_base_prefixes: Iterable[str] | None = None,
) -> None:
    """Save a model's adapters as a folder that `peft.PeftModel.from_pretrained` loads.

    All ranks call it; rank 0 writes. `AutoBridge.save_hf_adapter` is this function for models of ours
    (`compat/patches.py`).

    Args:
        bridge: of the model.
        model: with adapters, as the list of a rank's virtual stages.
        path: the folder; made if it is not there.
        peft_config: the configuration that put the adapters in: one of ours, or Megatron-Bridge's LoRA, VLMLoRA, DoRA
            or CanonicalLoRA.
        base_model_name_or_path: name or folder of the model without adapters; the bridge's own where None.
        show_progress: taken, as Megatron-Bridge's method has it; there is no bar.
        exclude_adapter_base_prefixes: how the names of layers begin, in Megatron, whose adapters are left out.

    Raises:
        ValueError: the model has no adapters.
    """
    conversion, exclude = bridge._model_bridge, tuple(exclude_adapter_base_prefixes or ())
    weights = conversion.adapter_weights(model, exclude)
    if not weights:
        raise ValueError(
            "the model has no adapters to save; expected one that Qwen3VLLoRA or another PEFT was applied to"
        )
    if base_model_name_or_path is None:
        base_model_name_or_path = str(getattr(bridge.hf_pretrained, "model_name_or_path", None) or "")
    config = adapter_config(
        Scaled(peft_config.dim, peft_config.alpha),
        conversion.hf_targets(model, exclude),
        base_model_name_or_path,
        dora=isinstance(peft_config, DoRA),
        others=conversion.adapted_tensors(model, exclude),
    )
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


def refuse_run_of_dora(peft_checkpoint: str | Path) -> None:
    """Refuse a run's checkpoint whose adapters `AutoBridge.export_adapter_ckpt` would write without their magnitudes.

    Raises:
        ValueError: they are DoRA's.
    """
    folder = Path(peft_checkpoint).expanduser().resolve()
    folder = next((each for each in (folder, folder.parent) if (each / RUN_CONFIG).is_file()), None)
    if folder is None:
        return  # it says what is missing
    kind = (read_run_config(folder).get("peft") or {}).get("_target_", "")
    if kind.rpartition(".")[2].endswith("DoRA"):
        raise ValueError(
            f"{folder} is of a run with {kind}, and export_adapter_ckpt would leave its magnitudes out; expected "
            "`conversion/adapters.py export`, which writes them"
        )
