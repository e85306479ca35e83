"""Which layers get adapters (LoRA and DoRA, `AdapterSettings.adapts`), and adapters as rows like the weight table's.

A layer in Megatron may be several in Hugging Face (q, k and v; gate and up; the four of linear attention's `in_proj`).
Its adapter has one `linear_in`, which is the `lora_A` of each of them, and one `linear_out`, whose rows are ordered
like those of the layer's weight.

Experts that are one tensor in Hugging Face have separate adapters in Megatron, and in `peft` two matrices for all of
them (source: peft 0.21, `ParamWrapper`; vLLM reads the same). `lora_A` is [experts * dim, in], expert by expert.
`lora_B` is [out, dim * experts], in which the experts are the faster index: a column for each expert, `dim` times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from qwen3vl_bridge.models.rules import ALL_LINEAR
from qwen3vl_bridge.weights.rows import (
    IN,
    MAGNITUDE,
    MARK,
    OUT,
    Dimensions,
    PackedExpert,
    ParamSlice,
    WeightRow,
    is_of_experts,
    is_of_mtp,
    local_name,
    part_of,
    shared_name,
)

# `peft`'s files; a folder with the second counts as an adapter, so it is written last.
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Its prefix of names in a file of adapters, and what replaces ".weight" at their end.
HF_PREFIX = "base_model.model."
_HF = {IN: "lora_A.weight", OUT: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
# Layers that Megatron-Bridge adapts by default, and those of linear attention.
LINEAR_LAYERS, OF_LINEAR_ATTENTION = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), ("in_proj", "out_proj")
# Megatron's layer of what peft and transformers call by these names.
_ELSEWHERE = {
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
    """Settings that determine which adapters there are, and their scale, alpha / dim."""

    dim: int
    alpha: float
    dora: bool
    parts: frozenset[str]  # values of `Part` whose layers are adapted
    target_modules: tuple[str, ...]  # names of layers or patterns, as Megatron-Bridge matches them
    exclude_modules: tuple[str, ...] = ()
    experts: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The parameters of an adapter."""
        return (IN, OUT, MAGNITUDE) if self.dora else (IN, OUT)

    def adapts(self, layer: str) -> bool:
        """Whether a module gets an adapter, as linear layers can. Either all of a layer's experts do, or none."""
        if _last_part(layer) not in LINEAR_LAYERS + OF_LINEAR_ATTENTION:
            return False
        if part_of(layer).value not in self.parts or (is_of_experts(layer) and not self.experts):
            return False
        name = shared_name(layer)
        if self.target_modules:
            return _is_named(name, self.target_modules)
        return not _is_named(name, self.exclude_modules)


def _is_named(layer: str, entries: Iterable[str]) -> bool:
    """Whether one of them is the layer's last name, or a pattern of its whole name in which `*` is any text."""
    return any(entry == _last_part(layer) or re.fullmatch(entry.replace("*", ".*"), layer) for entry in entries)


def names_meant(entries: Iterable[str]) -> str:
    """The end of a message about names that match no layer: Megatron's names of those that are Hugging Face's, or what
    others call all linear layers.
    """
    if any(entry in ALL_LINEAR for entry in entries):
        return f"; all are [{','.join(LINEAR_LAYERS)}], and {','.join(OF_LINEAR_ATTENTION)} of linear attention"
    meant = {ours: None for entry in entries if (ours := _ELSEWHERE.get(_last_part(entry)))}
    return f"; did you mean {', '.join(meant)}?" if meant else ""


def layer_of(row: WeightRow) -> str:
    """The layer of a row's weight; for an expert, the separate module that it has to be to have an adapter."""
    return local_name(row.megatron).removesuffix(".weight")


def linear_rows(rows: Iterable[WeightRow]) -> Iterator[WeightRow]:
    """Among expanded rows, the weights of linear layers that can be adapted: models in `peft` have no MTP."""
    return (row for row in rows if _LINEAR.search(row.megatron) and not is_of_mtp(row.megatron))


def adapter_row(weight: WeightRow, kind: str, dim: int, *, whole: bool = False) -> WeightRow:
    """The row of an adapter's parameter (IN, OUT or MAGNITUDE), from the expanded row of the layer's own weight.

    For IN, it has only the first Hugging Face tensor; `adapter_names` has all. `whole`: one tensor holds what is
    separate for the layer's weight, as Megatron-FSDP stores adapters.
    """
    hf = adapter_names(weight, kind)
    where = {
        "megatron": layer_of(weight) + MARK + kind,
        "pattern": local_name(weight.pattern).removesuffix(".weight") + MARK + kind,
        "indices": weight.indices,
        "position": weight.position,
    }
    if isinstance(weight, PackedExpert):
        shape = weight.shapes[0]
        out, width = reversed(shape) if weight.transposed else shape
        if kind == IN:
            return _ExpertLoraA(hf=hf, shapes=((dim, width),), **where)
        return _ExpertLoraB(hf=hf, shapes=((out, dim),), gated=weight.gated and not whole, **where)
    if kind == IN:
        return WeightRow(hf=hf[:1], shapes=((dim, weight.shapes[0][1]),), condition=weight.condition, **where)
    shapes = tuple((shape[0], dim) if kind == OUT else (shape[0],) for shape in weight.shapes)
    row = replace(weight, hf=hf, shapes=shapes, **where)
    return replace(row, gated=False, sections=()) if whole else row


class _ExpertLoraA(WeightRow):
    """One expert's rows of the `lora_A` of all experts of a layer, [experts * dim, in]."""

    def hf_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        dim, width = self.numbers(dimensions)[0]
        return ((dimensions["experts"] * dim, width),)

    def hf_slices(self, dimensions: Dimensions) -> Iterator[ParamSlice]:
        size = math.prod(self.numbers(dimensions)[0])
        yield ParamSlice(self.hf[0], self.expert * size, size)


class _ExpertLoraB(WeightRow):
    """One expert's columns of the `lora_B` of all experts of a layer, [out, dim * experts]."""

    def hf_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        out, dim = self.numbers(dimensions)[0]
        return ((out, dim * dimensions["experts"]),)

    def hf_slices(self, dimensions: Dimensions) -> Iterator[ParamSlice]:
        size = math.prod(self.numbers(dimensions)[0])
        yield ParamSlice(self.hf[0], self.expert, size, stride=dimensions["experts"])


def adapter_names(weight: WeightRow, kind: str) -> tuple[str, ...]:
    """Names in `peft`'s file of the parts of an adapter's parameter; those for IN are equal tensors."""
    if isinstance(weight, PackedExpert):
        # `peft` wraps the module of the experts once for each parameter: down_proj's wrapper is around gate_up_proj's.
        module = weight.hf[0].rpartition(".")[0] + ".base_layer" * weight.gated
        return (f"{HF_PREFIX}{module}.{_HF[kind]}",)
    return tuple(f"{HF_PREFIX}{name.removesuffix('weight')}{_HF[kind]}" for name in weight.hf)


@dataclass(frozen=True)
class Scaled:
    """An adapter's rank, and the scale of its product: alpha / rank."""

    rank: int
    alpha: float


def adapter_config(
    usual: Scaled,
    adapted: Iterable[str],
    tensors: Iterable[str],
    base_model: str,
    *,
    dora: bool,
    others: Mapping[str, Scaled] = MappingProxyType({}),
) -> dict[str, object]:
    """Contents of `adapter_config.json`, as `peft` and vLLM read it.

    Args:
        usual: of adapters that are not among `others`, which are by name of the adapted tensor.
        adapted, tensors: Hugging Face names of the weights that have adapters, and of all the model's.
        base_model: name or folder of the model without adapters.
    """
    adapted, tensors = set(adapted), set(tensors)
    # What selects exactly these weights: the last part of a name if all names that end with it are adapted ("q_proj"),
    # else whole names; of modules, and of other weights, if any.
    parameters = _shortest({name for name in adapted if not _is_of_module(name)}, tensors)
    differ = {name.removesuffix(".weight") if _is_of_module(name) else name: it for name, it in others.items()}
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
        "rank_pattern": {name: it.rank for name, it in differ.items() if it.rank != usual.rank},
        "alpha_pattern": {name: it.alpha for name, it in differ.items() if it.alpha != usual.alpha},
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _is_of_module(tensor: str) -> bool:
    """Whether `peft` adapts the module whose weight it is: a linear layer, which experts and routers are not."""
    return tensor.endswith(".weight") and not tensor.endswith(".mlp.gate.weight")


def _modules(tensors: set[str]) -> set[str]:
    return {name.removesuffix(".weight") for name in tensors if _is_of_module(name)}


def _shortest(selected: set[str], names: set[str]) -> list[str]:
    ambiguous = {_last_part(name) for name in names - selected}
    return sorted({name if _last_part(name) in ambiguous else _last_part(name) for name in selected})


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
