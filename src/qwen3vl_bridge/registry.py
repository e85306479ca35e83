"""Families of models: a `config.json`'s `model_type` says which code reads, converts, builds and plans a model.

What lives here: what a family consists of, the families that are known, and finding one. What may not: anything that a
family's own modules say. These are named by dotted names and imported on first use, so that a conversion imports
neither Megatron nor another family. `docs/add_a_family.md` shows how to write one outside this package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.weights.expert_layout import ExpertLayout

if TYPE_CHECKING:
    from qwen3vl_bridge.weights.dimensions import Dimensions
    from qwen3vl_bridge.weights.rows import Row

_MEGATRON_BRIDGE = "megatron.bridge.models"


@dataclass(frozen=True)
class Family:
    """Models that share a weight table. All that is text beside `name` is a dotted name, "package.module.function".

    What a conversion asks for (`table` to `fields_of_run`) has to import without torch; a `config` is a `config.json`
    as a mapping.

    Attributes:
        name: of the family; `Dimensions.family` and the provider's `family` are it.
        architectures: by `model_type`, the name of transformers' class, as `config.json` has it in `architectures`.
        table: (ExpertLayout) -> rows of the weight table, for a checkpoint that holds its experts so.
        dimensions: (config) -> Dimensions, of a configuration that has passed `check`.
        check: (config) -> None; ValueError for a setting that would otherwise be ignored.
        fields: (config) -> every field that decides which tensors there are or what they mean, each in one spelling,
            by names such as "text_config.hidden_size". Two models are one where these are equal.
        fields_of_run: (provider's fields in a `run_config.yaml`, fields of a config) -> what the run says of the
            latter, by the same names; nothing of what it does not say.
        provider: (hf_config, **settings) -> Megatron-Bridge's model provider of a config, with these of its fields set,
            not finalized. The `run_config.yaml` of a converted checkpoint calls it with arguments of these names.
        bridge: module that registers the family with Megatron-Bridge when it is imported.
        flops: (Dimensions, Trained or None) -> TowerCosts.
        presets: module with `PRESETS`, whose keys are sizes, and `config_dict`, (size or hub id) -> config with
            ValueError where there is none; None for a family without.
        released_experts: how released checkpoints hold their experts, where nothing says it.
        optional: parts that one checkpoint of a model has and another lacks: the condition of its rows, and the field
            of the configuration's text part that counts its layers.
        dist_train: whether its vision tower can be on ranks of its own.
        complete: whether its bridge takes the place of Megatron-Bridge's own, and its presets are known by their sizes.
            The bridge of a family which is not has to be imported by name; conversion knows the family all the same.
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
    flops: str = "qwen3vl_bridge.models.common.flops.model_costs"
    presets: str | None = None
    released_experts: ExpertLayout = ExpertLayout.INPUT_MAJOR
    optional: Mapping[str, str] = field(default_factory=dict)
    dist_train: bool = False
    complete: bool = True

    def rows(self, experts: ExpertLayout | None = None) -> tuple[Row, ...]:
        """The weight table, with `*` for indices; None: with experts as in released checkpoints."""
        return load(self.table)(experts or self.released_experts)

    def check_settings(self, config: Mapping[str, Any]) -> None:
        """Refuse (ValueError) what the model does not compute."""
        load(self.check)(config)

    def dimensions_of(self, config: Mapping[str, Any]) -> Dimensions:
        """What the table's symbols stand for."""
        return load(self.dimensions)(config)

    def fields_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `fields`."""
        return load(self.fields)(config)

    def said_by_run(self, model: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """See `fields_of_run`."""
        return load(self.fields_of_run)(model, found)

    def config_of(self, config: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
        """A config that counts optional parts as a checkpoint of these tensors has them.

        Args:
            config: what lies beside it, which transformers leaves as it was when it saves a model without such a part.
            names: of the tensors, as Hugging Face or Megatron names them.
        """
        for condition, layers in self.optional.items():
            rows = (row for row in self.rows() if row.condition == condition)
            there = any(row.megatron in names or row.hf[0] in names for row in rows)
            counted = config["text_config"].get(layers)
            if there != bool(counted) and not (there and counted == 0):  # 0 is said of a part that should not be there
                config = {**config, "text_config": {**config["text_config"], layers: int(there)}}
        return config

    def provider_of(self, config: Mapping[str, Any], **settings: Any) -> Any:
        """The model's provider, with these of its fields set."""
        return load(self.provider)(config, **settings)

    def costs(self, dimensions: Dimensions, trained: Any = None) -> Any:
        """`TowerCosts` of `models/common/flops.py`: of a forward pass, or of a step that trains something."""
        return load(self.flops)(dimensions, trained)


def load(dotted: str) -> Any:
    """What a dotted name, "package.module.name", stands for."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _ours(name: str, architectures: Mapping[str, str], **beside: Any) -> Family:
    """A family of this package: its folder in `models` is named as it is, and has modules of these names."""
    folder = f"qwen3vl_bridge.models.{name}"
    return Family(
        name=name,
        architectures=architectures,
        table=f"{folder}.table.table",
        dimensions=f"{folder}.config_dimensions.dimensions_of",
        check=f"{folder}.config_checks.check_settings",
        fields=f"{folder}.config_identity.fields_of",
        fields_of_run=f"{folder}.config_identity.fields_of_run",
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
            {
                "qwen3_vl": "Qwen3VLForConditionalGeneration",
                "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
            },
            dist_train=True,
        ),
        _ours(
            "qwen3_5",
            {
                "qwen3_5": "Qwen3_5ForConditionalGeneration",
                "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
            },
            released_experts=ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT,
            optional={"mtp": "mtp_num_hidden_layers"},
        ),
    )
}


def register_family(family: Family) -> None:
    """Make a family known. To be called where the modules it names can be imported.

    Raises:
        ValueError: another family has its name or one of its `model_type`s.
    """
    for other in _FAMILIES.values():
        taken = [kind for kind in family.architectures if kind in other.architectures]
        if other != family and (taken or other.name == family.name):
            raise ValueError(f"the family {other.name!r} has {taken or 'this name'} already, expected a new one")
    _FAMILIES[family.name] = family
    if _MEGATRON_BRIDGE in sys.modules:
        importlib.import_module(family.bridge)


def import_bridges() -> None:
    """Register all complete families with Megatron-Bridge, which has been imported."""
    for family in list(_FAMILIES.values()):
        if family.complete:
            importlib.import_module(family.bridge)


def family(name: str) -> Family:
    """The family of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in _FAMILIES:
        raise ValueError(f"unknown family {name!r}, expected one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
        ValueError: its `model_type`, or the class it names beside, is of none.
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
    """The family whose `provider` a `run_config.yaml` names; None where that is something else."""
    return next((one for one in _FAMILIES.values() if one.provider == target), None)


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """The numbers of a `config.json`'s model.

    Raises:
        ValueError: it is of no family.
        KeyError: it lacks a field; the message names it.
    """
    return family_of(config).dimensions_of(config)


def preset(name: str) -> dict[str, Any]:
    """The `config.json` of a released model. A size that several families have is the first one's; hub ids are not.

    Args:
        name: a size or a hub id.

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
        ValueError: there is no such family, or it has no presets.
    """
    one = family(name)
    if one.presets is None:
        raise ValueError(f"the family {name} has no presets")
    importlib.import_module(one.bridge)
    return importlib.import_module(one.presets)


def _presets() -> list[Any]:
    return [importlib.import_module(one.presets) for one in _FAMILIES.values() if one.presets and one.complete]
