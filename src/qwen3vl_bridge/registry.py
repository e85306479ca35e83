"""Families of models: the `model_type` of a `config.json` determines the code that reads, converts, builds and plans a
model.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.weights.rows import ExpertLayout

if TYPE_CHECKING:
    from qwen3vl_bridge.weights.rows import Dimensions, WeightRow

_MEGATRON_BRIDGE = "megatron.bridge.models"
_NEAR = 0.9  # as `difflib` measures it: another size or release, but no other model
# Packages of the families of this package, each with a `FAMILY`.
_BUILT_IN = ("qwen3vl_bridge.models.qwen3_vl", "qwen3vl_bridge.models.qwen3_5")

Config = Mapping[str, Any]  # a `config.json`


@dataclass(frozen=True)
class Family:
    """Models that share a weight table. What a conversion needs are functions, which need neither torch nor Megatron.

    Attributes:
        name: of the family; equal to `Dimensions.family` and the provider's `family`.
        architectures: by `model_type`, the name of transformers' class, as in `architectures` of `config.json`.
        table: rows of the weight table, for a checkpoint with this format of experts.
        dimensions: of the model of a configuration that has passed `check`.
        check: raises ValueError for a setting that would otherwise be ignored.
        fields: every field of a configuration that determines which tensors there are or what they mean, normalized, by
            names such as "text_config.hidden_size". Two models are the same if these are equal.
        fields_of_run: (section `model` of a `run_config.yaml`, result of `fields` for a config that may be the run's)
            -> what `fields` would give for the model of the run, as far as the section tells.
        bridge: dotted name of the module that needs Megatron: it registers the family with Megatron-Bridge when it is
            imported, and has `provider_from_hf_config`, (hf_config, **settings) -> Megatron-Bridge's model provider of
            a configuration, with these of its fields set, not finalized. The `run_config.yaml` of a converted
            checkpoint calls that function with arguments of these names.
        presets: module with `PRESETS`, whose keys are sizes, and `config_dict`, (size or hub id) -> config, which
            raises ValueError for an unknown one, and perhaps `hub_ids`, size -> hub ids; None for a family without.
        released_experts: the format of experts in released checkpoints, used if the format is unknown.
        fp8_experts: the same in released checkpoints in FP8, if it is another.
        optional: parts that a checkpoint of a model may have or lack: the condition of its rows, and the field of the
            configuration's text part that counts its layers.
        replacements: by module of Megatron, the dotted name of a function (module) -> None, called once the module has
            been executed, that replaces functions of the module that the family's layers cannot use as they are.
        dist_train: whether it supports separate vision ranks.
    """

    name: str
    architectures: Mapping[str, str]
    table: Callable[[ExpertLayout], tuple[WeightRow, ...]]
    dimensions: Callable[[Config], Dimensions]
    check: Callable[[Config], None]
    fields: Callable[[Config], dict[str, Any]]
    fields_of_run: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    bridge: str
    presets: ModuleType | None = None
    released_experts: ExpertLayout = ExpertLayout.INPUT_MAJOR
    fp8_experts: ExpertLayout | None = None
    optional: Mapping[str, str] = field(default_factory=dict)
    replacements: Mapping[str, str] = field(default_factory=dict)
    dist_train: bool = False

    @property
    def provider_target(self) -> str:
        """Dotted name of the function that builds a provider, the `_target_` in a converted checkpoint's file."""
        return f"{self.bridge}.provider_from_hf_config"

    def rows(self, experts: ExpertLayout | None = None) -> tuple[WeightRow, ...]:
        """The weight table, with `*` for indices; None: with experts as in released checkpoints."""
        return self.table(experts or self.released_experts)

    def config_of(self, config: Config, names: Collection[str]) -> Config:
        """A config that fits a checkpoint with tensors of these Hugging Face or Megatron names: its counts of layers of
        optional parts (`mtp_num_hidden_layers`) are corrected to whether the checkpoint has any of their tensors.

        transformers leaves these counts in a `config.json` when it saves a model without the parts.
        """
        for condition, layers in self.optional.items():
            rows = (row for row in self.rows() if row.condition == condition)
            there = any(row.megatron in names or row.hf[0] in names for row in rows)
            counted = config["text_config"].get(layers)
            if there != bool(counted) and not (there and counted == 0):  # 0 means a part that should not exist
                config = {**config, "text_config": {**config["text_config"], layers: int(there)}}
        return config

    def build_provider(self, config: Config, **settings: Any) -> Any:
        """The model's provider, with these of its fields set."""
        return load(self.provider_target)(config, **settings)


def load(dotted: str) -> Any:
    """The object of a dotted name, "package.module.name"."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def families() -> dict[str, Family]:
    """All families by name, this package's first."""
    return {one.name: one for one in (load(f"{package}.FAMILY") for package in _BUILT_IN)}


def register_family(family: Family) -> None:
    """Register a family. To be called where the module that it names can be imported.

    Raises:
        ValueError: another family has its name or one of its `model_type`s.
    """
    known = families()
    for other in known.values():
        taken = [kind for kind in family.architectures if kind in other.architectures]
        if other != family and (taken or other.name == family.name):
            raise ValueError(f"the family {other.name!r} has {taken or 'this name'} already, expected a new one")
    if family.name not in known:
        for module in family.replacements:
            if module in sys.modules:
                load(family.replacements[module])(sys.modules[module])
    known[family.name] = family
    if _MEGATRON_BRIDGE in sys.modules:
        importlib.import_module(family.bridge)


def import_bridges() -> None:
    """Register all families with Megatron-Bridge, which has been imported."""
    for family in list(families().values()):
        importlib.import_module(family.bridge)


def replace_functions(module: ModuleType) -> None:
    """Make the families' replacements in a module of Megatron that has just been executed."""
    for family in list(families().values()):
        if (replace := family.replacements.get(module.__name__)) is not None:
            load(replace)(module)


def family(name: str) -> Family:
    """The family of this name; raises ValueError for an unknown one."""
    if name not in families():
        raise ValueError(f"unknown family {name!r}, expected one of {', '.join(families())}")
    return families()[name]


def family_of(config: Config) -> Family:
    """The family of a `config.json`.

    Raises:
        ValueError: an unknown `model_type`, or a class in `architectures` that is not the family's.
    """
    kind, architectures, known = config.get("model_type"), config.get("architectures"), {}
    for one in families().values():
        named = one.architectures.get(kind) if isinstance(kind, str) else None
        if named is not None and architectures in (None, [named]):
            return one
        known |= one.architectures
    whole = kind.removesuffix("_text") if isinstance(kind, str) else None
    advice = "another family is made known with qwen3vl_bridge.register_family"
    if whole != kind and whole in known:
        advice = (
            f"a text model is converted only as part of its complete model (model_type {whole}); or use "
            "Megatron-Bridge's AutoBridge, which has its own text models"
        )
    expected = " or ".join(f"{arch} (model_type {kind})" for kind, arch in known.items())
    raise ValueError(f"describes {architectures} (model_type {kind}), expected {expected}; {advice}")


def family_of_provider(target: Any) -> Family | None:
    """The family whose `provider_target` a `run_config.yaml` names; None for another provider."""
    return next((one for one in families().values() if one.provider_target == target), None)


def dimensions_of(config: Config) -> Dimensions:
    """Dimensions of a `config.json`'s model; raises ValueError if it is of no family, KeyError for a missing field."""
    return family_of(config).dimensions(config)


def preset(name: str) -> dict[str, Any]:
    """The `config.json` of a released model, by its size or hub id; a size of several families is the first one's.
    Raises ValueError if no family has it.
    """
    for presets in _presets():
        with contextlib.suppress(ValueError):
            return presets.config_dict(name)
    raise ValueError(
        f"unknown model {name!r}, expected one of {', '.join(preset_sizes())}, or a hub id"
        f"{nearest_name(name, preset_sizes())}"
    )


def nearest_name(name: str, sizes: Collection[str] = ()) -> str:
    """Words about the hub id with known dimensions, or one of these sizes, that a name begins or is much like; of
    another model of Qwen's, which ones are supported.
    """
    with_ids = [presets for presets in _presets() if hasattr(presets, "hub_ids")]
    pairs = [(size, hub_id) for presets in with_ids for size in presets.PRESETS for hub_id in presets.hub_ids(size)]
    known = {one.lower(): one for one in (*sizes, *(hub_id for _, hub_id in pairs))}
    word = name.lower()
    near = [one for one in known if one.startswith(word)]
    near = near or difflib.get_close_matches(word, known, n=len(known), cutoff=_NEAR)
    nearest = max(
        near, key=lambda one: difflib.SequenceMatcher(None, word, one).find_longest_match().size, default=None
    )
    if nearest is not None:
        return f"; the nearest name whose dimensions are known is {known[nearest]}" if nearest != word else ""
    if not word.startswith("qwen/"):
        return ""
    return f"; supported are the models {', '.join(dict.fromkeys(one.split(f'-{size}')[0] for size, one in pairs))}"


def preset_sizes() -> list[str]:
    """The sizes that `preset` knows."""
    return list(dict.fromkeys(size for presets in _presets() for size in presets.PRESETS))


def _presets() -> list[Any]:
    return [one.presets for one in families().values() if one.presets is not None]
