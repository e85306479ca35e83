"""Adapters of a running model as Hugging Face tensors, alone or merged into weights.

Megatron-Bridge gathers each adapter's parameters from the ranks; the rows that convert stored adapters say what they
become.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from qwen3vl_bridge.checkpoint.formats.megatron import RUN_CONFIG, read_run_config
from qwen3vl_bridge.io.files import write_object
from qwen3vl_bridge.parallel.collectives import wait_for_all
from qwen3vl_bridge.peft.adapter_rows import (
    CONFIG,
    HF_PREFIX,
    WEIGHTS,
    Scaled,
    adapter_config,
    adapter_names,
    adapter_row,
    layer_of,
)
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.bridge_mappings import InputMajor
from qwen3vl_bridge.weights.rows import (
    IN,
    MAGNITUDE,
    OUT,
    Dimensions,
    ExpertLayout,
    WeightRow,
    expand,
    is_of_experts,
    shared_name,
    stored_rows,
)

import torch
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple
from megatron.bridge.models.conversion.peft_bridge import (
    ADAPTER_KEY_TO_SUFFIX,
    AdapterWeight,
    AdapterWeightConversionTask,
    MegatronPeftBridge,
)
from megatron.bridge.peft.base import PEFT
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

# CanonicalLoRA's adapters in the order of their rows in a Hugging Face tensor; None is a layer's only one.
_ORDER = (None, "adapter_q", "adapter_k", "adapter_v", "adapter_gate", "adapter_up")
# Index of an expert that is a separate module.
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


class Factors(NamedTuple):
    """An adapter of a weight [out, in]: a [rank, in], b [out, rank], and under DoRA the magnitude [out]."""

    a: Tensor
    b: Tensor
    rank: int
    alpha: float
    magnitude: Tensor | None = None


class AdapterConversion(MegatronPeftBridge):
    """Megatron-Bridge's conversion of adapters, completed. To be listed before MegatronModelBridge as a base class.

    Megatron-Bridge leaves a vision layer's q, k, v rows in Megatron's interleaved order, supports one adapter for them
    where CanonicalLoRA has three, and does not support DoRA's magnitudes, neither in adapters nor in merged weights. It
    counts adapters of experts from 0 on each rank if they are separate modules, merges them transposed into input-major
    tensors and its own into other ranks' experts, and packs them in another order than `peft` reads.
    """

    family: ClassVar[str]

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
        if layers := _dora_layers(chunks):
            raise ValueError(
                f"the model has {len(layers)} DoRA adapters, whose magnitude vectors this export cannot return; save "
                "them with save_hf_adapter, or export merged weights (merge_adapter_weights=True)"
            )
        weights, _ = self.adapters(chunks, exclude_adapter_base_prefixes or (), show_progress=show_progress)
        return (HFWeightTuple(name, weight.cpu() if cpu else weight) for name, weight in weights.items())

    def _row(self, layer: str, experts: ExpertLayout | None = None) -> WeightRow:
        """The expanded row of a layer's weight."""
        for row in family(self.family).rows(experts):
            if match := re.fullmatch(re.escape(layer_of(row)).replace(r"\*", r"(\d+)"), layer):
                return row.at(*map(int, match.groups()))
        raise KeyError(f"{layer} has no row in the weight table")

    def _dimensions(self) -> Dimensions:
        return family(self.family).dimensions(self.hf_config.to_dict())

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

    def adapters(
        self, megatron_model: list[MegatronModule], exclude: Iterable[str] = (), *, show_progress: bool = False
    ) -> tuple[Weights, dict[str, Scaled]]:
        """All adapters with the names of `peft` (M.lora_A.weight, M.lora_B.weight, M.lora_magnitude_vector), those of
        experts scaled like the others; and the rank and alpha of each by the name of the adapted tensor. Layers whose
        Megatron names have an excluded prefix are left out.
        """
        tasks = self.build_adapter_conversion_tasks(megatron_model, exclude)
        dims, scale, weights, adapted = self._dimensions(), _common_scale(tasks), {}, {}
        layers = {shared_name(layer) for layer in tasks}
        for layer, each in self._with_progress_tracking(list(tasks.items()), "Exporting adapters", show_progress):
            adapters = self.materialize_adapter_weights(each)
            if not is_of_experts(layer):
                row = self._row(layer)
                split = self._of_each_tensor(megatron_model, row, layer, adapters)
                for number, (tensor, factors) in enumerate(split.items()):
                    adapted[tensor] = Scaled(factors.rank, factors.alpha)
                    for kind, part in ((IN, factors.a), (OUT, factors.b), (MAGNITUDE, factors.magnitude)):
                        if part is not None:
                            weights[adapter_names(row, kind)[number]] = part
                continue
            shared = shared_name(layer)
            # `peft` wraps the module of the experts once for each parameter that has adapters.
            wrapped_once = shared[:-1] + ("2" if shared.endswith("1") else "1") not in layers
            for expert, factors in self._of_each_expert(layer, _fused(adapters)).items():
                row, b, alpha = self._row(_of_expert(layer, expert)), factors.b, factors.alpha
                if scale is not None:
                    b, alpha = b * (alpha / factors.rank / scale), scale * factors.rank
                adapted[row.hf[0]] = Scaled(factors.rank, alpha)
                if wrapped_once:
                    row = replace(row, gated=False)
                _put(weights, adapter_row(row, IN, factors.rank), factors.a, dims)
                _put(weights, adapter_row(row, OUT, factors.rank, whole=True), b, dims)
        return {name.removeprefix(HF_PREFIX): weight.detach() for name, weight in weights.items()}, adapted

    def _of_each_tensor(
        self, megatron_model: list[MegatronModule], row: WeightRow, layer: str, adapters: list[AdapterWeight]
    ) -> dict[str, Factors]:
        """The adapters of a layer's Hugging Face weights, by name and in the row's order."""
        if len(adapters) > 1 and len(row.hf) > 1:
            separate = {ADAPTER_KEY_TO_SUFFIX[each.adapter_key]: _fused([each]) for each in adapters}
            return {name: factors for name in row.hf for end, factors in separate.items() if name.endswith(end)}
        whole, dims = _fused(adapters), self._dimensions()
        if len(adapters) > 1:
            return {row.hf[0]: whole}
        split = _split(row, whole, dims)
        if (dora := _dora_layers(megatron_model).get(layer)) is not None:
            magnitudes: Weights = {}
            magnitude = dora.adapter.get_weight_magnitude().detach()
            _put(magnitudes, adapter_row(row, MAGNITUDE, 1, whole=True), magnitude, dims)
            for name, key in zip(row.hf, adapter_names(row, MAGNITUDE), strict=True):
                split[name] = split[name]._replace(magnitude=magnitudes[key])
        return split

    def _of_each_expert(self, layer: str, own: Factors) -> dict[int, Factors]:
        """The adapters of the experts of a layer, or of one and those of the same index on other ranks."""
        sides = [self._gather_expert_adapter_weight(side.contiguous()) or [side] for side in (own.a, own.b)]
        count, number = self._experts_of_a_rank(), _EXPERT.search(layer)
        here = range(count) if number is None else [int(number[0]) % count]
        return {
            rank * count + expert: own._replace(a=a[expert] if a.ndim > 2 else a, b=b[expert] if b.ndim > 2 else b)
            for rank, (a, b) in enumerate(zip(*sides, strict=True))
            for expert in here
        }

    def _merge_lora_adapter_weights(
        self,
        megatron_model: list[MegatronModule],
        converted_weights_dict: Weights,
        adapter_weights: list[AdapterWeight],
    ) -> Weights:
        """Merge into the tensors of a layer, or of experts that have a tensor each."""
        layer = adapter_weights[0].global_base_prefix
        if is_of_experts(layer):
            wanted = {self._infer_hf_expert_idx(name) for name in converted_weights_dict}
            adapters = {}
            for expert, factors in self._of_each_expert(layer, _fused(adapter_weights)).items():
                if expert in wanted:
                    row = self._row(_of_expert(layer, expert), ExpertLayout.PER_EXPERT)
                    adapters |= _split(row, factors, self._dimensions())
        else:
            adapters = self._of_each_tensor(megatron_model, self._row(layer), layer, adapter_weights)
        merged = {}
        for name, weight in converted_weights_dict.items():
            factors = adapters[name]
            whole = self._merge_single_adapter_weight(weight.float(), factors.alpha, factors.rank, factors.a, factors.b)
            if factors.magnitude is not None:
                whole = whole * (factors.magnitude.to(whole) / torch.linalg.norm(whole, dim=1))[:, None]
            merged[name] = whole.to(weight.dtype)
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
        count, layer = self._experts_of_a_rank(), adapter_weights[0].global_base_prefix
        number = extract_expert_number_from_param(task.global_param_name) % count
        adapters = self._of_each_expert(layer, _fused(adapter_weights))
        adapters = [factors for expert, factors in adapters.items() if expert % count == number]
        input_major, merged = isinstance(task.mapping, InputMajor), {}
        for name, weight in converted_weights_dict.items():
            experts = [weight] if len(adapters) == 1 else list(weight)
            experts = [expert.t() if input_major else expert for expert in experts]
            experts = [
                self._merge_single_adapter_weight(expert, factors.alpha, factors.rank, factors.a, factors.b)
                for expert, factors in zip(experts, adapters, strict=True)
            ]
            experts = [expert.t() if input_major else expert for expert in experts]
            merged[name] = experts[0] if len(adapters) == 1 else torch.stack(experts)
        return merged


def save_hf_adapter(
    bridge: AutoBridge,
    model: list[MegatronModule],
    path: str | Path,
    peft_config: PEFT,
    base_model_name_or_path: str | None = None,
    show_progress: bool = False,
    exclude_adapter_base_prefixes: Iterable[str] | None = None,
) -> None:
    """Save a running model's adapters. Call it on all ranks; rank 0 writes. `AutoBridge.save_hf_adapter` is this
    function for our models (`compat/patches.py`).

    Args:
        model: a rank's virtual stages, with adapters.
        peft_config: the configuration that inserted the adapters: one of ours, or Megatron-Bridge's LoRA, VLMLoRA, DoRA
            or CanonicalLoRA.
        base_model_name_or_path: name or folder of the base model; None for the bridge's own.
        show_progress: accepted as by Megatron-Bridge's method; no progress is shown.
        exclude_adapter_base_prefixes: prefixes of Megatron's names of layers whose adapters are not saved.

    Raises:
        ValueError: the model has no adapters.
    """
    conversion, exclude = bridge._model_bridge, tuple(exclude_adapter_base_prefixes or ())
    weights, adapted = conversion.adapters(model, exclude)
    if not weights:
        raise ValueError(
            "the model has no adapters to save; expected a model to which Qwen3VLLoRA or another PEFT was applied"
        )
    if base_model_name_or_path is None:
        base_model_name_or_path = str(getattr(bridge.hf_pretrained, "model_name_or_path", None) or "")
    if torch.distributed.get_rank() == 0:
        folder, usual = Path(path), Scaled(peft_config.dim, peft_config.alpha)
        rows = expand(family(conversion.family).rows(), unwrap_model(model)[0].config.dimensions())
        tensors = (name for row in rows for name in row.hf)
        dora = any(name.endswith("magnitude_vector") for name in weights)
        folder.mkdir(parents=True, exist_ok=True)
        # Tensors of a file must not share memory, as the A of q, k and v do.
        separate = {f"{HF_PREFIX}{name}": weight.cpu().clone().contiguous() for name, weight in weights.items()}
        save_file(separate, folder / WEIGHTS)
        config = adapter_config(usual, adapted, tensors, base_model_name_or_path, dora=dora, others=adapted)
        write_object(folder / CONFIG, config)
    wait_for_all()


def refuse_run_of_dora(peft_checkpoint: str | Path) -> None:
    """Refuse a run of DoRA, which `AutoBridge.export_adapter_ckpt` would write without its magnitudes."""
    folder = Path(peft_checkpoint).expanduser().resolve()
    folder = next((each for each in (folder, folder.parent) if (each / RUN_CONFIG).is_file()), None)
    if folder is None:
        return  # it reports what is missing
    kind = (read_run_config(folder).get("peft") or {}).get("_target_", "")
    if kind.rpartition(".")[2].endswith("DoRA"):
        raise ValueError(
            f"{folder} was saved by a run with {kind}, whose magnitudes export_adapter_ckpt would drop; use `qwen3vl "
            "adapters export`, which writes them"
        )


def _fused(adapters: list[AdapterWeight]) -> Factors:
    """A layer's adapter. Several, of q, k and v or of gate and up, become one of all rows with the scale of each:
    their product is one of n times the rank, `a` concatenated and `b` block-diagonal.
    """
    adapters = sorted(adapters, key=lambda adapter: _ORDER.index(adapter.adapter_key))
    a = [adapter.linear_in_weight.weight.detach() for adapter in adapters]
    b = [adapter.linear_out_weight.weight.detach() for adapter in adapters]
    first, count = adapters[0], len(adapters)
    if count == 1:
        return Factors(a[0], b[0], first.dim, first.alpha)
    return Factors(torch.cat(a, dim=-2), torch.block_diag(*b), count * first.dim, count * first.alpha)


def _split(row: WeightRow, whole: Factors, dims: Dimensions) -> dict[str, Factors]:
    """A layer's adapter in those of its Hugging Face weights, by name: each has all of `a` and its rows of `b`."""
    b, size = whole.b, parallel_state.get_tensor_model_parallel_world_size()
    if size > 1 and len(row.stored) > 1 and not is_of_experts(row.megatron):
        # Gathered rank by rank, each with its rows of every section.
        sections = [rows // size for rows in stored_rows(row, len(b), dims)]
        b = torch.cat(
            [torch.cat(parts) for parts in zip(*(rank.split(sections) for rank in b.chunk(size)), strict=True)]
        )
    parts: Weights = {}
    _put(parts, adapter_row(row, OUT, whole.rank, whole=True), b, dims)
    return {name: whole._replace(b=parts[key]) for name, key in zip(row.hf, adapter_names(row, OUT), strict=True)}


def _put(weights: Weights, row: WeightRow, parameter: Tensor, dims: Dimensions) -> None:
    """Write a whole Megatron parameter into its Hugging Face tensors. A padded vocabulary's last rows are left out."""
    for name, shape in zip(row.hf, row.hf_shapes(dims), strict=True):
        if name not in weights:
            weights[name] = parameter.new_empty(shape)
    flat, position = parameter.flatten(), 0
    for at in row.hf_slices(dims):
        elements = slice(at.start, at.start + at.length * at.stride, at.stride)
        weights[at.tensor].view(-1)[elements] = flat[position : position + at.length]
        position += at.length


def _of_expert(layer: str, expert: int) -> str:
    """The module that an expert of a layer has if experts are not grouped."""
    return shared_name(layer).replace(".experts.", f".experts.local_experts.{expert}.")


def _common_scale(tasks: dict[str, list[AdapterWeightConversionTask]]) -> float | None:
    """The common scale of layers' adapters, except those of experts (`normalize_moe_lora`)."""
    scales = {each[0].alpha / each[0].dim for layer, each in tasks.items() if not is_of_experts(layer)}
    return scales.pop() if len(scales) == 1 else None


def _dora_layers(megatron_model: list[MegatronModule]) -> dict[str, DoRALinear]:
    """Layers under DoRA, which requires one pipeline stage, so these are names of the whole model."""
    named = (each for chunk in unwrap_model(megatron_model) for each in chunk.named_modules())
    return {name: module for name, module in named if isinstance(module, DoRALinear)}
