"""Families of models: the `model_type` of a `config.json` determines the code that reads, converts, builds and plans a
model.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.weights.rows import ExpertLayout

if TYPE_CHECKING:
    from qwen3vl_bridge.weights.rows import Dimensions, WeightRow

_MEGATRON_BRIDGE = "megatron.bridge.models"
_KERNELS = "qwen3vl_bridge.models.qwen3_5.delta_rule"


@dataclass(frozen=True)
class Family:
    """Models that share a weight table. All text fields except `name` are dotted names, "package.module.function".

    The functions that a conversion needs (`table` to `fields_of_run`) must be importable without torch; a `config` is a
    `config.json` as a mapping.

    Attributes:
        name: of the family; equal to `Dimensions.family` and the provider's `family`.
        architectures: by `model_type`, the name of transformers' class, as in `architectures` of `config.json`.
        table: (ExpertLayout) -> rows of the weight table, for a checkpoint with this format of experts.
        dimensions: (config) -> Dimensions, of a configuration that has passed `check`.
        check: (config) -> None; ValueError for a setting that would otherwise be ignored.
        fields: (config) -> every field that determines which tensors there are or what they mean, normalized, by names
            such as "text_config.hidden_size". Two models are the same if these are equal.
        fields_of_run: (provider's fields in a `run_config.yaml`, fields of a config) -> the run's values of the latter,
            by the same names; without the fields that it does not have.
        provider: (hf_config, **settings) -> Megatron-Bridge's model provider of a config, with these of its fields set,
            not finalized. The `run_config.yaml` of a converted checkpoint calls it with arguments of these names.
        bridge: module that registers the family with Megatron-Bridge when it is imported.
        flops: (Dimensions, Trained or None) -> TowerCosts.
        presets: module with `PRESETS`, whose keys are sizes, and `config_dict`, (size or hub id) -> config, which
            raises ValueError for an unknown one; None for a family without presets.
        released_experts: the format of experts in released checkpoints, used if the format is unknown.
        optional: parts that a checkpoint of a model may have or lack: the condition of its rows, and the field of the
            configuration's text part that counts its layers.
        replacements: by module of Megatron, a function (module) -> None, called once the module has been executed, that
            replaces functions of the module that the family's layers cannot use as they are.
        dist_train: whether it supports separate vision ranks.
        complete: whether its bridge replaces Megatron-Bridge's own, and its presets are known by their sizes. The
            bridge of a family that is not complete has to be imported by name; conversion supports the family all the
            same.
    """

    name: str
    architectures: Mapping[str, str]
    table: str
    dimensions: str
    check: str
    fields: str
    fields_of_run: str
    provider: str
    bridge: str
    flops: str = "qwen3vl_bridge.models.flops.model_costs"
    presets: str | None = None
    released_experts: ExpertLayout = ExpertLayout.INPUT_MAJOR
    optional: Mapping[str, str] = field(default_factory=dict)
    replacements: Mapping[str, str] = field(default_factory=dict)
    dist_train: bool = False
    complete: bool = True

    def rows(self, experts: ExpertLayout | None = None) -> tuple[WeightRow, ...]:
        """The weight table, with `*` for indices; None: with experts as in released checkpoints."""
        return load(self.table)(experts or self.released_experts)

    def check_settings(self, config: Mapping[str, Any]) -> None:
        """Refuse (ValueError) settings that the model does not support."""
        load(self.check)(config)

    def dimensions_of(self, config: Mapping[str, Any]) -> Dimensions:
        """Values of the weight table's symbols."""
        return load(self.dimensions)(config)

    def fields_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `fields`."""
        return load(self.fields)(config)

    def run_fields_of(self, model: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """See `fields_of_run`."""
        return load(self.fields_of_run)(model, found)

    def config_of(self, config: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
        """A config, which transformers does not change when it saves a model without an optional part, with those parts
        counted as in a checkpoint with these tensors, by Hugging Face's or Megatron's names.
        """
        for condition, layers in self.optional.items():
            rows = (row for row in self.rows() if row.condition == condition)
            there = any(row.megatron in names or row.hf[0] in names for row in rows)
            counted = config["text_config"].get(layers)
            if there != bool(counted) and not (there and counted == 0):  # 0 means a part that should not exist
                config = {**config, "text_config": {**config["text_config"], layers: int(there)}}
        return config

    def provider_of(self, config: Mapping[str, Any], **settings: Any) -> Any:
        """The model's provider, with these of its fields set."""
        return load(self.provider)(config, **settings)

    def costs(self, dimensions: Dimensions, trained: Any = None) -> Any:
        """`TowerCosts` of `models/flops.py`: of a forward pass, or of a step that trains something."""
        return load(self.flops)(dimensions, trained)


def load(dotted: str) -> Any:
    """The object of a dotted name, "package.module.name"."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _ours(name: str, architectures: Mapping[str, str], **beside: Any) -> Family:
    """A family of this package: its folder in `models` has its name, and modules of these names."""
    folder = f"qwen3vl_bridge.models.{name}"
    return Family(
        name=name,
        architectures=architectures,
        table=f"{folder}.table.table",
        dimensions=f"{folder}.config.dimensions_of",
        check=f"{folder}.config.check_settings",
        fields=f"{folder}.config.fields_of",
        fields_of_run=f"{folder}.config.fields_of_run",
        provider=f"{folder}.bridge.provider_from_hf_config",
        bridge=f"{folder}.bridge",
        presets=f"{folder}.presets",
        **beside,
    )


_FAMILIES: dict[str, Family] = {
    one.name: one
    for one in (
        _ours(
            "qwen3_vl",
            {"qwen3_vl": "Qwen3VLForConditionalGeneration", "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration"},
            dist_train=True,
        ),
        _ours(
            "qwen3_5",
            {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"},
            released_experts=ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT,
            optional={"mtp": "mtp_num_hidden_layers"},
            replacements={
                "megatron.core.ssm.gated_delta_net.common": f"{_KERNELS}.build_without_package",
                "megatron.core.ssm.gated_delta_net.gdn": f"{_KERNELS}.use_torch",
            },
        ),
    )
}


def register_family(family: Family) -> None:
    """Register a family. To be called where the modules that it names can be imported.

    Raises:
        ValueError: another family has its name or one of its `model_type`s.
    """
    for other in _FAMILIES.values():
        taken = [kind for kind in family.architectures if kind in other.architectures]
        if other != family and (taken or other.name == family.name):
            raise ValueError(f"the family {other.name!r} has {taken or 'this name'} already, expected a new one")
    if family.name not in _FAMILIES:
        for module in family.replacements:
            if module in sys.modules:
                load(family.replacements[module])(sys.modules[module])
    _FAMILIES[family.name] = family
    if _MEGATRON_BRIDGE in sys.modules:
        importlib.import_module(family.bridge)


def import_bridges() -> None:
    """Register all complete families with Megatron-Bridge, which has been imported."""
    for family in list(_FAMILIES.values()):
        if family.complete:
            importlib.import_module(family.bridge)


def replace_functions(module: ModuleType) -> None:
    """Make the families' replacements in a module of Megatron that has just been executed."""
    for family in list(_FAMILIES.values()):
        if (replace := family.replacements.get(module.__name__)) is not None:
            load(replace)(module)


def family(name: str) -> Family:
    """The family of this name.

    Raises:
        ValueError: an unknown family.
    """
    if name not in _FAMILIES:
        raise ValueError(f"unknown family {name!r}, expected one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
        ValueError: an unknown `model_type`, or a class in `architectures` that is not the family's.
    """
    kind, architectures = config.get("model_type"), config.get("architectures")
    for one in _FAMILIES.values():
        named = one.architectures.get(kind) if isinstance(kind, str) else None
        if named is not None and architectures in (None, [named]):
            return one
    known = [f"{arch} (model_type {kind})" for one in _FAMILIES.values() for kind, arch in one.architectures.items()]
    whole = kind.removesuffix("_text") if isinstance(kind, str) else None
    advice = "another family is made known with qwen3vl_bridge.register_family"
    if whole != kind and any(whole in one.architectures for one in _FAMILIES.values()):
        advice = (
            f"a text model is converted only as part of its complete model (model_type {whole}); or use "
            "Megatron-Bridge's AutoBridge, which has its own text models"
        )
    raise ValueError(f"describes {architectures} (model_type {kind}), expected {' or '.join(known)}; {advice}")


def family_of_provider(target: Any) -> Family | None:
    """The family whose `provider` a `run_config.yaml` names; None for another provider."""
    return next((one for one in _FAMILIES.values() if one.provider == target), None)


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """Dimensions of a `config.json`'s model.

    Raises:
        ValueError: it is of no family.
        KeyError: it lacks a field; the message names it.
    """
    return family_of(config).dimensions_of(config)


def preset(name: str) -> dict[str, Any]:
    """The `config.json` of a released model, by its size or hub id; a size of several families is the first one's.

    Raises:
        ValueError: no family has it.
    """
    reasons = []
    for presets in _presets():
        try:
            return presets.config_dict(name)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError("; ".join(reasons))


def preset_sizes() -> list[str]:
    """The sizes that `preset` knows."""
    return list(dict.fromkeys(size for presets in _presets() for size in presets.PRESETS))


def presets_of(name: str) -> Any:
    """The presets of a family, whose bridge is registered with Megatron-Bridge from then on.

    Raises:
        ValueError: an unknown family, or one without presets.
    """
    one = family(name)
    if one.presets is None:
        raise ValueError(f"the family {name} has no presets")
    importlib.import_module(one.bridge)
    return importlib.import_module(one.presets)


def _presets() -> list[Any]:
    return [importlib.import_module(one.presets) for one in _FAMILIES.values() if one.presets and one.complete]
