"""Select the layers that get adapters (`AdapterSettings`), and describe adapters by rows as in the weight table.

A layer in Megatron may be several layers in Hugging Face (q, k and v; gate and up; the four of linear attention's
`in_proj`). Its adapter has one `linear_in`, which equals the `lora_A` of each Hugging Face layer, and one `linear_out`.
The rows of `linear_out` have the order of the rows of the layer's weight.

Experts that share a tensor in Hugging Face have separate adapters in Megatron, and two matrices for all of them in
`peft` (source: peft 0.21, `ParamWrapper`; vLLM reads the same). `lora_A` is [experts * dim, in], expert by expert.
`lora_B` is [out, dim * experts], where the expert is the faster index.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from qwen3vl_bridge.config.other_trainers import ALL_LINEAR
from qwen3vl_bridge.weights.rows import (
    ADAPTER_MARK,
    LINEAR_IN,
    LINEAR_OUT,
    MAGNITUDE,
    Dimensions,
    PackedExpert,
    TensorSlice,
    WeightRow,
    component_of,
    is_expert_layer,
    is_mtp,
    local_name,
    shared_name,
)

# Files of `peft`. A folder with the second file counts as an adapter, so it is written last.
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Prefix of names in the file of `peft`, and the suffixes that replace ".weight".
HF_PREFIX = "base_model.model."
_HF = {LINEAR_IN: "lora_A.weight", LINEAR_OUT: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
# Linear layers that Megatron-Bridge adapts by default, and the linear layers of linear attention.
LINEAR_LAYERS, OF_LINEAR_ATTENTION = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), ("in_proj", "out_proj")
# Megatron's names of layers by their names in peft and transformers.
_MEGATRON_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv"), "linear_qkv"),
    **dict.fromkeys(("o_proj", "proj"), "linear_proj"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "linear_fc1"),
    "down_proj": "linear_fc2",
    "in_proj_qkv": "in_proj",
    "in_proj_z": "in_proj",
}
_LINEAR = re.compile(rf"\.({'|'.join(LINEAR_LAYERS + OF_LINEAR_ATTENTION)})\.weight\d*$")


@dataclass(frozen=True)
class AdapterSettings:
    """Settings that determine which layers have adapters, and the scale of adapters, alpha / dim."""

    dim: int
    alpha: float
    dora: bool
    components: frozenset[str]  # values of `Component`
    target_modules: tuple[str, ...]  # names of layers or patterns, as Megatron-Bridge matches them
    exclude_modules: tuple[str, ...] = ()
    experts: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the names of the parameters that each adapter has, such as "linear_in.weight"."""
        return (LINEAR_IN, LINEAR_OUT, MAGNITUDE) if self.dora else (LINEAR_IN, LINEAR_OUT)

    def adapts(self, layer: str) -> bool:
        """Return True if the module named `layer` gets an adapter. Either all experts of a layer get one, or none."""
        if _last_part(layer) not in LINEAR_LAYERS + OF_LINEAR_ATTENTION:
            return False
        if component_of(layer).value not in self.components or (is_expert_layer(layer) and not self.experts):
            return False
        name = shared_name(layer)
        if self.target_modules:
            return _is_named(name, self.target_modules)
        return not _is_named(name, self.exclude_modules)


def _is_named(layer: str, entries: Iterable[str]) -> bool:
    """Return True if an entry selects a layer.

    An entry is the last part of the layer's name ("linear_qkv"), or a pattern for the full name, where `*` is any text.
    """
    return any(entry == _last_part(layer) or re.fullmatch(entry.replace("*", ".*"), layer) for entry in entries)


def suggest_names(entries: Iterable[str]) -> str:
    """Return text to append to an error about names that match no layer: the names that were probably meant."""
    if any(entry in ALL_LINEAR for entry in entries):
        return f"; all layers are [{','.join(LINEAR_LAYERS)}], and {','.join(OF_LINEAR_ATTENTION)} of linear attention"
    meant = dict.fromkeys(ours for entry in entries if (ours := _MEGATRON_NAMES.get(_last_part(entry))))
    return f"; did you mean {', '.join(meant)}?" if meant else ""


def layer_name(row: WeightRow) -> str:
    """Return the Megatron name of the linear layer of a weight-table row. Each expert is a layer of its own."""
    return local_name(row.megatron).removesuffix(".weight")


def adaptable_rows(rows: Iterable[WeightRow]) -> Iterator[WeightRow]:
    """Yield the weight-table rows of linear layers that can have adapters."""
    return (row for row in rows if _LINEAR.search(row.megatron) and not is_mtp(row.megatron))


def adapter_row(weight: WeightRow, kind: str, dim: int, *, fused: bool = False) -> WeightRow:
    """Return the weight-table row of one parameter of an adapter.

    Args:
        weight: the expanded weight-table row of the adapted weight.
        kind: LINEAR_IN, LINEAR_OUT or MAGNITUDE. The row of LINEAR_IN names only the first of several equal Hugging
            Face tensors; `adapter_names` returns the names of all.
        dim: rank of the adapter.
        fused: whether Megatron stores gate and up, or all sections of the layer, as one tensor, as Megatron-FSDP does.
    """
    hf = adapter_names(weight, kind)
    where = {
        "megatron": layer_name(weight) + ADAPTER_MARK + kind,
        "pattern": local_name(weight.pattern).removesuffix(".weight") + ADAPTER_MARK + kind,
        "indices": weight.indices,
        "position": weight.position,
    }
    if isinstance(weight, PackedExpert):
        shape = weight.shapes[0]
        out, width = reversed(shape) if weight.transposed else shape
        if kind == LINEAR_IN:
            return _ExpertLoraA(hf=hf, shapes=((dim, width),), **where)
        return _ExpertLoraB(hf=hf, shapes=((out, dim),), gated=weight.gated and not fused, **where)
    if kind == LINEAR_IN:
        return WeightRow(hf=hf[:1], shapes=((dim, weight.shapes[0][1]),), condition=weight.condition, **where)
    shapes = tuple((shape[0], dim) if kind == LINEAR_OUT else (shape[0],) for shape in weight.shapes)
    row = replace(weight, hf=hf, shapes=shapes, **where)
    return replace(row, gated=False, sections=()) if fused else row


class _ExpertLoraA(WeightRow):
    """`linear_in` of one expert: `dim` rows of the `lora_A` [experts * dim, in] that all experts of a layer share."""

    def hf_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        dim, width = self.resolve_shapes(dimensions)[0]
        return ((dimensions["experts"] * dim, width),)

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        size = math.prod(self.resolve_shapes(dimensions)[0])
        yield TensorSlice(self.hf[0], self.expert * size, size)


class _ExpertLoraB(WeightRow):
    """`linear_out` of one expert: columns of the `lora_B` [out, dim * experts] that all experts of a layer share."""

    def hf_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        out, dim = self.resolve_shapes(dimensions)[0]
        return ((out, dim * dimensions["experts"]),)

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        size = math.prod(self.resolve_shapes(dimensions)[0])
        yield TensorSlice(self.hf[0], self.expert, size, stride=dimensions["experts"])


def adapter_names(weight: WeightRow, kind: str) -> tuple[str, ...]:
    """Return the names of one parameter of an adapter in the file of `peft`, one for each Hugging Face layer."""
    if isinstance(weight, PackedExpert):
        # `peft` wraps the module of the experts once for each parameter: down_proj's wrapper is around gate_up_proj's.
        module = weight.hf[0].rpartition(".")[0] + ".base_layer" * weight.gated
        return (f"{HF_PREFIX}{module}.{_HF[kind]}",)
    return tuple(f"{HF_PREFIX}{name.removesuffix('weight')}{_HF[kind]}" for name in weight.hf)


@dataclass(frozen=True)
class RankAndAlpha:
    """The rank of an adapter, and alpha. The product of its matrices is scaled by alpha / rank."""

    rank: int
    alpha: float


def adapter_config(
    usual: RankAndAlpha,
    adapted: Iterable[str],
    tensors: Iterable[str],
    base_model: str,
    *,
    dora: bool,
    others: Mapping[str, RankAndAlpha] = MappingProxyType({}),
) -> dict[str, object]:
    """Return the contents of `adapter_config.json`, as `peft` and vLLM read it.

    Args:
        usual: rank and alpha of adapters that are not in `others`.
        adapted, tensors: Hugging Face names of the weights with adapters, and of all weights of the model.
        base_model: name or folder of the model without adapters.
        dora: whether the adapters are DoRA's.
        others: rank and alpha of adapters by the name of the adapted tensor.
    """
    adapted, tensors = set(adapted), set(tensors)
    # Weights that do not belong to a module of their own, such as packed experts, are selected by another field.
    parameters = _shortest({name for name in adapted if not _is_of_module(name)}, tensors)
    differ = {name.removesuffix(".weight") if _is_of_module(name) else name: each for name, each in others.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": usual.rank,
        "lora_alpha": usual.alpha,
        "lora_dropout": 0.0,
        "use_dora": dora,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": _shortest(_modules(adapted), _modules(tensors)),
        **({"target_parameters": parameters} if parameters else {}),
        "rank_pattern": {name: each.rank for name, each in differ.items() if each.rank != usual.rank},
        "alpha_pattern": {name: each.alpha for name, each in differ.items() if each.alpha != usual.alpha},
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _is_of_module(tensor: str) -> bool:
    """Return True if `peft` selects a weight by `target_modules`, and False if by `target_parameters`.

    `target_parameters` selects packed experts and routers.
    """
    return tensor.endswith(".weight") and not tensor.endswith(".mlp.gate.weight")


def _modules(tensors: set[str]) -> set[str]:
    return {name.removesuffix(".weight") for name in tensors if _is_of_module(name)}


def _shortest(selected: set[str], names: set[str]) -> list[str]:
    """Return names by which `peft` selects exactly `selected` out of `names`.

    A name is shortened to its last part ("q_proj"), unless that would select other names too.
    """
    ambiguous = {_last_part(name) for name in names - selected}
    return sorted({name if _last_part(name) in ambiguous else _last_part(name) for name in selected})


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
