"""Export the adapters of a running model as Hugging Face tensors, alone or merged into weights.

Megatron-Bridge gathers the parameters of each adapter from the ranks. They are converted with the same weight-table
rows (`adapter_rows.py`) as the adapters in checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from qwen3vl_bridge.checkpoint.formats.megatron import RUN_CONFIG, read_run_config
from qwen3vl_bridge.core.collectives import barrier
from qwen3vl_bridge.core.files import write_object
from qwen3vl_bridge.peft.adapter_rows import (
    CONFIG,
    HF_PREFIX,
    WEIGHTS,
    RankAndAlpha,
    adapter_config,
    adapter_names,
    adapter_row,
    layer_name,
)
from qwen3vl_bridge.peft.insertion import EXPERT
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.upstream.auto_bridge import model_bridge
from qwen3vl_bridge.upstream.peft_bridge import OpenPeftBridge
from qwen3vl_bridge.weights.bridge_mappings import InputMajor
from qwen3vl_bridge.weights.rows import (
    LINEAR_IN,
    LINEAR_OUT,
    MAGNITUDE,
    Dimensions,
    ExpertLayout,
    WeightRow,
    expand,
    is_expert_layer,
    shared_name,
    stored_sizes,
)

import torch
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple
from megatron.bridge.models.conversion.peft_bridge import (
    ADAPTER_KEY_TO_SUFFIX,
    AdapterWeight,
    AdapterWeightConversionTask,
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

# Keys of CanonicalLoRA's adapters in the order of their rows in the layer's weight; None for a layer's only adapter.
_ORDER = (None, "adapter_q", "adapter_k", "adapter_v", "adapter_gate", "adapter_up")


class Factors(NamedTuple):
    """The matrices and the scale of an adapter: b @ a * alpha / rank is added to a weight [out, in]."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    rank: int
    alpha: float
    magnitude: Tensor | None = None  # [out] under DoRA

    def merge_into(self, weight: Tensor) -> Tensor:
        """Return `weight` [out, in] plus alpha / rank * b @ a, computed in float32. The magnitude is not applied."""
        a, b = (factor.to(weight.device, torch.float32) for factor in (self.a, self.b))
        return (weight.float() + self.alpha / self.rank * (b @ a)).to(weight.dtype)


class AdapterConversion(OpenPeftBridge):
    """Megatron-Bridge's conversion of adapters, corrected. List it before MegatronModelBridge as a base class.

    Megatron-Bridge's own conversion

    - leaves the q, k, v rows of a vision layer in Megatron's interleaved order,
    - supports one adapter for q, k, v, where CanonicalLoRA has three,
    - drops DoRA's magnitudes, in adapters and in merged weights,
    - numbers experts that are separate modules from 0 on each rank,
    - merges adapters of experts into input-major tensors untransposed, and also into the experts of other ranks,
    - packs adapters of experts in another order than `peft` reads.
    """

    family: ClassVar[str]

    def stream_adapter_weights_megatron_to_hf(
        self,
        megatron_model: MegatronModule | list[MegatronModule],
        cpu: bool = True,
        show_progress: bool = True,
        exclude_adapter_base_prefixes: Iterable[str] | None = None,
        expand_shared_outer: bool = False,
    ) -> Iterator[HFWeightTuple]:
        """Return all adapters as Hugging Face tensors, see Megatron-Bridge's method of this name.

        Adapters of experts are as `peft` and vLLM read them: two matrices for all experts of a layer, named
        `experts.base_layer` for gate and up, and `experts` for the down projection.

        Raises:
            ValueError: the model has DoRA adapters, but callers expect two matrices per adapter; or
                `expand_shared_outer` (an argument since megatron-bridge 0.7) is set.
        """
        _check_expert_names(expand_shared_outer)
        chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        if layers := _dora_layers(chunks):
            raise ValueError(
                f"the model has {len(layers)} DoRA adapters, whose magnitude vectors this export cannot return; save "
                "them with save_hf_adapter, or export merged weights (merge_adapter_weights=True)"
            )
        weights, _ = self.adapters(chunks, exclude_adapter_base_prefixes or (), show_progress=show_progress)
        return (HFWeightTuple(name, weight.cpu() if cpu else weight) for name, weight in weights.items())

    def _row(self, layer: str, experts: ExpertLayout | None = None) -> WeightRow:
        """Return the expanded weight-table row of the layer named `layer`."""
        for row in family(self.family).rows(experts):
            if match := re.fullmatch(re.escape(layer_name(row)).replace(r"\*", r"(\d+)"), layer):
                return row.with_indices(*map(int, match.groups()))
        raise KeyError(f"{layer} has no row in the weight table")

    def _dimensions(self) -> Dimensions:
        return family(self.family).dimensions(self.hf_config.to_dict())

    def adapters_of_all_stages(self, megatron_model: MegatronModule | list[MegatronModule]) -> list[tuple]:
        """Return Megatron-Bridge's adapters of all pipeline stages, with global instead of local expert indices."""
        first = self._experts_of_a_rank() * parallel_state.get_expert_model_parallel_rank()
        return [
            (EXPERT.sub(lambda number: f"{int(number[0]) + first}", name), *others)
            for name, *others in super().adapters_of_all_stages(megatron_model)
        ]

    def _experts_of_a_rank(self) -> int:
        return self._dimensions()["experts"] // parallel_state.get_expert_model_parallel_world_size()

    def adapters(
        self, megatron_model: list[MegatronModule], exclude: Iterable[str] = (), *, show_progress: bool = False
    ) -> tuple[Weights, dict[str, RankAndAlpha]]:
        """Return all adapters. Adapters of experts are rescaled to the alpha / rank of the other layers.

        Args:
            exclude: prefixes of the Megatron names of layers to leave out.

        Returns:
            The tensors by the names of `peft` (MODULE.lora_A.weight, .lora_B.weight, .lora_magnitude_vector); and rank
            and alpha of each adapter by the name of the adapted tensor.
        """
        tasks = self.build_adapter_conversion_tasks(megatron_model, exclude)
        dims, scale, weights, adapted = self._dimensions(), _common_scale(tasks), {}, {}
        layers = {shared_name(layer) for layer in tasks}
        for layer, each in self.with_progress(list(tasks.items()), "Exporting adapters", show_progress):
            adapters = self.materialize_adapter_weights(each)
            if not is_expert_layer(layer):
                row = self._row(layer)
                split = self._split_by_tensor(megatron_model, row, layer, adapters)
                for number, (tensor, factors) in enumerate(split.items()):
                    adapted[tensor] = RankAndAlpha(factors.rank, factors.alpha)
                    for kind, part in ((LINEAR_IN, factors.a), (LINEAR_OUT, factors.b), (MAGNITUDE, factors.magnitude)):
                        if part is not None:
                            weights[adapter_names(row, kind)[number]] = part
                continue
            shared = shared_name(layer)
            # `peft` wraps the module of the experts once for each parameter that has adapters.
            wrapped_once = shared[:-1] + ("2" if shared.endswith("1") else "1") not in layers
            for expert, factors in self._split_by_expert(layer, _fuse_adapters(adapters)).items():
                row, b, alpha = self._row(_expert_layer(layer, expert)), factors.b, factors.alpha
                if scale is not None:
                    b, alpha = b * (alpha / factors.rank / scale), scale * factors.rank
                adapted[row.hf[0]] = RankAndAlpha(factors.rank, alpha)
                if wrapped_once:
                    row = replace(row, gated=False)
                _write_parameter(weights, adapter_row(row, LINEAR_IN, factors.rank), factors.a, dims)
                _write_parameter(weights, adapter_row(row, LINEAR_OUT, factors.rank, fused=True), b, dims)
        return {name.removeprefix(HF_PREFIX): weight.detach() for name, weight in weights.items()}, adapted

    def _split_by_tensor(
        self, megatron_model: list[MegatronModule], row: WeightRow, layer: str, adapters: list[AdapterWeight]
    ) -> dict[str, Factors]:
        """Return an adapter for each Hugging Face weight of a layer, by weight name, in the order of `row.hf`."""
        if len(adapters) > 1 and len(row.hf) > 1:
            separate = {ADAPTER_KEY_TO_SUFFIX[each.adapter_key]: _fuse_adapters([each]) for each in adapters}
            return {name: factors for name in row.hf for end, factors in separate.items() if name.endswith(end)}
        whole, dims = _fuse_adapters(adapters), self._dimensions()
        if len(adapters) > 1:
            return {row.hf[0]: whole}
        split = _split_rows(row, whole, dims)
        if (dora := _dora_layers(megatron_model).get(layer)) is not None:
            magnitudes: Weights = {}
            magnitude = dora.adapter.get_weight_magnitude().detach()
            _write_parameter(magnitudes, adapter_row(row, MAGNITUDE, 1, fused=True), magnitude, dims)
            for name, key in zip(row.hf, adapter_names(row, MAGNITUDE), strict=True):
                split[name] = split[name]._replace(magnitude=magnitudes[key])
        return split

    def _split_by_expert(self, layer: str, own: Factors) -> dict[int, Factors]:
        """Return the adapter of each expert in a layer, by global expert index.

        If `layer` is the module of a single expert, return the adapters of the experts with its local index on all
        ranks.
        """
        sides = [self.gather_over_experts(side) for side in (own.a, own.b)]
        count, number = self._experts_of_a_rank(), EXPERT.search(layer)
        here = range(count) if number is None else [int(number[0]) % count]
        return {
            rank * count + expert: own._replace(a=a[expert] if a.ndim > 2 else a, b=b[expert] if b.ndim > 2 else b)
            for rank, (a, b) in enumerate(zip(*sides, strict=True))
            for expert in here
        }

    def merge_into_tensors(
        self, megatron_model: list[MegatronModule], tensors: Weights, adapters: list[AdapterWeight]
    ) -> Weights:
        """Return the Hugging Face tensors of a layer, or of experts with separate tensors, with adapters merged in."""
        layer = adapters[0].global_base_prefix
        if is_expert_layer(layer):
            by_tensor = {}
            for expert, factors in self._split_by_expert(layer, _fuse_adapters(adapters)).items():
                row = self._row(_expert_layer(layer, expert), ExpertLayout.PER_EXPERT)
                if not tensors.keys().isdisjoint(row.hf):
                    by_tensor |= _split_rows(row, factors, self._dimensions())
        else:
            by_tensor = self._split_by_tensor(megatron_model, self._row(layer), layer, adapters)
        merged = {}
        for name, weight in tensors.items():
            factors = by_tensor[name]
            whole = factors.merge_into(weight.float())
            if factors.magnitude is not None:
                whole = whole * (factors.magnitude.to(whole) / torch.linalg.norm(whole, dim=1))[:, None]
            merged[name] = whole.to(weight.dtype)
        return merged

    def merge_into_expert(
        self, task: WeightConversionTask, tensors: Weights, adapters: list[AdapterWeight], num_experts: int
    ) -> Weights:
        """Return the Hugging Face tensors of one expert per expert-parallel rank, with adapters merged in.

        Tensors in `tensors` and in the result have the shape [ranks, ...] if there are several ranks.
        """
        if not tensors:
            return tensors
        count, layer = self._experts_of_a_rank(), adapters[0].global_base_prefix
        number = extract_expert_number_from_param(task.global_param_name) % count
        by_expert = self._split_by_expert(layer, _fuse_adapters(adapters))
        of_ranks = [factors for expert, factors in by_expert.items() if expert % count == number]
        input_major, merged = isinstance(task.mapping, InputMajor), {}
        for name, weight in tensors.items():
            experts = [weight] if len(of_ranks) == 1 else list(weight)
            experts = [expert.t() if input_major else expert for expert in experts]
            experts = [factors.merge_into(expert) for expert, factors in zip(experts, of_ranks, strict=True)]
            experts = [expert.t() if input_major else expert for expert in experts]
            merged[name] = experts[0] if len(of_ranks) == 1 else torch.stack(experts)
        return merged


def _check_expert_names(expand_shared_outer: bool) -> None:
    if expand_shared_outer:
        raise ValueError(
            "expand_shared_outer is True, expected False: adapters of experts are written as two matrices for all "
            "experts of a layer, not by expert"
        )


def save_hf_adapter(
    bridge: AutoBridge,
    model: list[MegatronModule],
    path: str | Path,
    peft_config: PEFT,
    base_model_name_or_path: str | None = None,
    show_progress: bool = False,
    exclude_adapter_base_prefixes: Iterable[str] | None = None,
    expand_shared_outer: bool = False,
) -> None:
    """Save the adapters of a running model as a folder for `peft`. Call it on all ranks; rank 0 writes.

    For our models `AutoBridge.save_hf_adapter` calls this function (`upstream/auto_bridge_saves.py`).

    Args:
        model: a rank's virtual pipeline stages, with adapters.
        peft_config: the configuration that inserted the adapters: one of ours, or Megatron-Bridge's LoRA, VLMLoRA, DoRA
            or CanonicalLoRA.
        base_model_name_or_path: name or folder of the base model; None for the one that `bridge` was loaded from.
        show_progress: has no effect; an argument of Megatron-Bridge's method.
        exclude_adapter_base_prefixes: prefixes of the Megatron names of layers to leave out.
        expand_shared_outer: must be False; an argument of megatron-bridge since 0.7.

    Raises:
        ValueError: the model has no adapters, or `expand_shared_outer` is set.
    """
    _check_expert_names(expand_shared_outer)
    conversion, exclude = model_bridge(bridge), tuple(exclude_adapter_base_prefixes or ())
    weights, adapted = conversion.adapters(model, exclude)
    if not weights:
        raise ValueError(
            "the model has no adapters to save; expected a model to which Qwen3VLLoRA or another PEFT was applied"
        )
    if base_model_name_or_path is None:
        base_model_name_or_path = str(getattr(bridge.hf_pretrained, "model_name_or_path", None) or "")
    if torch.distributed.get_rank() == 0:
        folder, usual = Path(path), RankAndAlpha(peft_config.dim, peft_config.alpha)
        rows = expand(family(conversion.family).rows(), unwrap_model(model)[0].config.dimensions())
        tensors = (name for row in rows for name in row.hf)
        dora = any(name.endswith("magnitude_vector") for name in weights)
        folder.mkdir(parents=True, exist_ok=True)
        # Tensors of a file must not share memory, but the A matrices of q, k and v do.
        separate = {f"{HF_PREFIX}{name}": weight.cpu().clone().contiguous() for name, weight in weights.items()}
        save_file(separate, folder / WEIGHTS)
        config = adapter_config(usual, adapted, tensors, base_model_name_or_path, dora=dora, others=adapted)
        write_object(folder / CONFIG, config)
    barrier()


def check_no_dora_run(peft_checkpoint: str | Path) -> None:
    """Raise ValueError if a checkpoint has DoRA adapters: `AutoBridge.export_adapter_ckpt` would drop magnitudes."""
    folder = Path(peft_checkpoint).expanduser().resolve()
    folder = next((each for each in (folder, folder.parent) if (each / RUN_CONFIG).is_file()), None)
    if folder is None:
        return  # `export_adapter_ckpt` reports what is missing
    kind = (read_run_config(folder).get("peft") or {}).get("_target_", "")
    if kind.rpartition(".")[2].endswith("DoRA"):
        raise ValueError(
            f"{folder} was saved by a run with {kind}, whose magnitudes export_adapter_ckpt would drop; use `qwen3vl "
            "adapters export`, which writes them"
        )


def _fuse_adapters(adapters: list[AdapterWeight]) -> Factors:
    """Fuse the adapters of one layer into a single adapter.

    Separate adapters of q, k and v, or of gate and up, become one adapter of all rows with n times the rank: `a` is
    concatenated, `b` is block-diagonal, and the scale is the same.
    """
    adapters = sorted(adapters, key=lambda adapter: _ORDER.index(adapter.adapter_key))
    a = [adapter.linear_in_weight.weight.detach() for adapter in adapters]
    b = [adapter.linear_out_weight.weight.detach() for adapter in adapters]
    first, count = adapters[0], len(adapters)
    if count == 1:
        return Factors(a[0], b[0], first.dim, first.alpha)
    return Factors(torch.cat(a, dim=-2), torch.block_diag(*b), count * first.dim, count * first.alpha)


def _split_rows(row: WeightRow, whole: Factors, dims: Dimensions) -> dict[str, Factors]:
    """Split the adapter of a fused layer into one for each Hugging Face weight: the same `a`, and its rows of `b`."""
    b, size = whole.b, parallel_state.get_tensor_model_parallel_world_size()
    if size > 1 and len(row.stored_names) > 1 and not is_expert_layer(row.megatron):
        # Tensor-parallel ranks are concatenated, each with its rows of every section.
        sections = [rows // size for rows in stored_sizes(row, len(b), dims)]
        b = torch.cat(
            [torch.cat(parts) for parts in zip(*(rank.split(sections) for rank in b.chunk(size)), strict=True)]
        )
    parts: Weights = {}
    _write_parameter(parts, adapter_row(row, LINEAR_OUT, whole.rank, fused=True), b, dims)
    return {
        name: whole._replace(b=parts[key]) for name, key in zip(row.hf, adapter_names(row, LINEAR_OUT), strict=True)
    }


def _write_parameter(weights: Weights, row: WeightRow, parameter: Tensor, dims: Dimensions) -> None:
    """Write an unsharded Megatron parameter to its Hugging Face tensors in `weights`. Missing tensors are created."""
    for name, shape in zip(row.hf, row.hf_shapes(dims), strict=True):
        if name not in weights:
            weights[name] = parameter.new_empty(shape)
    flat, position = parameter.flatten(), 0
    for part in row.hf_slices(dims):
        elements = slice(part.start, part.start + part.length * part.stride, part.stride)
        weights[part.tensor].view(-1)[elements] = flat[position : position + part.length]
        position += part.length


def _expert_layer(layer: str, expert: int) -> str:
    """Return the module name of one expert in a layer with separate experts (`local_experts.N`)."""
    return shared_name(layer).replace(".experts.", f".experts.local_experts.{expert}.")


def _common_scale(tasks: dict[str, list[AdapterWeightConversionTask]]) -> float | None:
    """Return alpha / rank if it is the same for all adapters except those of experts, else None."""
    scales = {each[0].alpha / each[0].dim for layer, each in tasks.items() if not is_expert_layer(layer)}
    return scales.pop() if len(scales) == 1 else None


def _dora_layers(megatron_model: list[MegatronModule]) -> dict[str, DoRALinear]:
    """Return the layers under DoRA, by name. DoRA requires one pipeline stage, so the names are of the full model."""
    named = (each for chunk in unwrap_model(megatron_model) for each in chunk.named_modules())
    return {name: module for name, module in named if isinstance(module, DoRALinear)}
