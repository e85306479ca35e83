"""Map the `model_type` of a `config.json` to a `Family`: the code that reads, converts, builds and plans its models."""

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
_SIMILAR = 0.9  # cutoff of `difflib`: accepts another size or release, but no other model
# Packages of built-in families, each with a `FAMILY`.
_BUILT_IN = tuple(f"qwen3vl_bridge.models.{name}" for name in ("qwen3_vl", "qwen3_5", "qwen4_exp"))

Config = Mapping[str, Any]  # a `config.json`


@dataclass(frozen=True)
class Family:
    """The models that share a weight table, and what this package needs to convert and train them.

    The attributes `table`, `dimensions`, `check`, `fields`, `fields_of_run` and `constants` are functions. Conversion
    calls only these functions, so they must need neither torch nor Megatron.

    Attributes:
        name: the name of the family, equal to `Dimensions.family` and to the provider's `family`.
        architectures: a dict from each `model_type` to the name of the transformers class (`architectures` of
            `config.json`).
        table: function that returns the rows of the weight table, given how a checkpoint stores experts.
        dimensions: function that returns the dimensions of a configuration that has passed `check`.
        check: function that raises ValueError if a configuration contains a setting that we would ignore.
        fields: function that returns the fields of a configuration that identify the model: a dict from names such as
            "text_config.hidden_size" to normalized values. Two configurations with equal fields are the same model.
        fields_of_run: function that returns the fields, with names as in `fields`, that the section `model` of a
            `run_config.yaml` contains. Its second argument is the `fields` of the configuration to compare them with.
        bridge: dotted name of a module that registers the family with Megatron-Bridge when it is imported. Its function
            `provider_from_hf_config(hf_config, **settings)` returns the provider for a configuration, with the fields
            in `settings` set, not finalized. The `run_config.yaml` of a converted checkpoint names that function.
        presets: module with the released configurations; None if there are none. The keys of its mapping `PRESETS` are
            sizes. Its function `config_dict` takes a size or a hub id, returns a configuration, and raises ValueError
            for an unknown name. Its optional function `hub_ids` returns the hub ids of a size.
        released_experts: the expert layout of released checkpoints, used if nothing else determines it.
        fp8_experts: the expert layout of released FP8 checkpoints; None for `released_experts`.
        fp8_only_experts: whether routed experts are the only linear layers that released FP8 checkpoints store in FP8.
        optional: components that a checkpoint may lack, such as multi-token prediction: a dict from the
            `WeightRow.condition` of the component's rows to the `text_config` field that gives its number of layers.
        fp8_table_field: field of `text_config` with the dtype of an n-gram table that a checkpoint may store in FP8,
            with one scale for all its parts; None if the family has no such table.
        constants: function that returns int64 vectors, by tensor name, which follow from the configuration, and which
            checkpoints store in addition to the weights.
        dist_train: whether the family supports separate vision ranks.
        title: the name of the models in help and messages; None for `name`.
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
    fp8_only_experts: bool = False
    optional: Mapping[str, str] = field(default_factory=dict)
    fp8_table_field: str | None = None
    constants: Callable[[Config], Mapping[str, tuple[int, ...]]] = lambda config: {}
    dist_train: bool = False
    title: str | None = None

    @property
    def provider_target(self) -> str:
        """Return the dotted name of the function that builds a provider, the `_target_` in `run_config.yaml`."""
        return f"{self.bridge}.provider_from_hf_config"

    def rows(self, experts: ExpertLayout | None = None) -> tuple[WeightRow, ...]:
        """Return the weight table for an expert layout; None stands for the expert layout of released checkpoints."""
        return self.table(experts or self.released_experts)

    def config_of(self, config: Config, names: Collection[str]) -> Config:
        """Return `config` with the layer counts of optional components changed to match the tensors of a checkpoint.

        Args:
            config: contents of a `config.json`.
            names: Hugging Face or Megatron names of the checkpoint's tensors.
        """
        for condition, layers in self.optional.items():
            rows = (row for row in self.rows() if row.condition == condition)
            exists = any(row.megatron in names or row.hf[0] in names for row in rows)
            number = config["text_config"].get(layers)
            if exists != bool(number) and not (exists and number == 0):  # 0: the layers should not exist, so keep it
                config = {**config, "text_config": {**config["text_config"], layers: int(exists)}}
        return config

    def build_provider(self, config: Config, **settings: Any) -> Any:
        """Return the Megatron-Bridge provider for a `config.json`, with the fields in `settings` set, not finalized."""
        return load(self.provider_target)(config, **settings)


def load(dotted: str) -> Any:
    """Import and return an object by its dotted name, "package.module.name"."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def families() -> dict[str, Family]:
    """Return all families by name, built-in families first."""
    return {family.name: family for family in (load(f"{package}.FAMILY") for package in _BUILT_IN)}


def register_family(family: Family) -> None:
    """Register a family. Its `bridge` module must be importable.

    Raises:
        ValueError: another registered family has the same name, or one of the same `model_type`s.
    """
    known = families()
    for other in known.values():
        taken = [kind for kind in family.architectures if kind in other.architectures]
        if other != family and (taken or other.name == family.name):
            raise ValueError(f"the registered family {other.name!r} already uses {taken or 'this name'}; use another")
    known[family.name] = family
    if _MEGATRON_BRIDGE in sys.modules:
        importlib.import_module(family.bridge)


def import_bridges() -> None:
    """Register all families with Megatron-Bridge, which must be imported already."""
    for family in list(families().values()):
        importlib.import_module(family.bridge)


def family(name: str) -> Family:
    """Return the family named `name`. Raise ValueError for an unknown name."""
    if name not in families():
        raise ValueError(f"unknown family {name!r}, expected one of {', '.join(families())}")
    return families()[name]


def family_of(config: Config) -> Family:
    """Return the family of a `config.json`.

    Raises:
        ValueError: the `model_type` is unknown, or `architectures` names another class.
    """
    kind, architectures, known = config.get("model_type"), config.get("architectures"), {}
    for each in families().values():
        named = each.architectures.get(kind) if isinstance(kind, str) else None
        if named is not None and architectures in (None, [named]):
            return each
        known |= each.architectures
    whole = kind.removesuffix("_text") if isinstance(kind, str) else None
    advice = "call qwen3vl_bridge.register_family to add another family"
    if whole != kind and whole in known:
        advice = (
            f"a text model is converted only as part of its complete model (model_type {whole}); for a text model "
            "alone, use Megatron-Bridge's AutoBridge"
        )
    expected = " or ".join(f"{arch} (model_type {kind})" for kind, arch in known.items())
    raise ValueError(f"found the architectures {architectures} (model_type {kind}), expected {expected}; {advice}")


def family_of_provider(target: Any) -> Family | None:
    """Return the family that has `target` as its `provider_target`, or None."""
    return next((each for each in families().values() if each.provider_target == target), None)


def dimensions_of(config: Config) -> Dimensions:
    """Return the dimensions of a model from the contents of its `config.json`.

    Raises:
        ValueError: the family is unknown.
        KeyError: a field is missing.
    """
    return family_of(config).dimensions(config)


def preset(name: str) -> dict[str, Any]:
    """Return the `config.json` of a released model by its size or hub id. Raise ValueError for an unknown name."""
    for presets in _presets():
        with contextlib.suppress(ValueError):
            return presets.config_dict(name)
    raise ValueError(
        f"unknown model {name!r}, expected one of {', '.join(preset_sizes())}, or a hub id"
        f"{nearest_name(name, preset_sizes())}"
    )


def nearest_name(name: str, sizes: Collection[str] = ()) -> str:
    """Return text to append to an error about an unknown model name.

    The text names the most similar known name. If no known name is similar, it lists the supported models for an id
    such as "Qwen/...", and is empty for all other names.
    """
    with_ids = [presets for presets in _presets() if hasattr(presets, "hub_ids")]
    pairs = [(size, hub_id) for presets in with_ids for size in presets.PRESETS for hub_id in presets.hub_ids(size)]
    known = {known_name.lower(): known_name for known_name in (*sizes, *(hub_id for _, hub_id in pairs))}
    word = name.lower()
    near = [each for each in known if each.startswith(word)]
    near = near or difflib.get_close_matches(word, known, n=len(known), cutoff=_SIMILAR)
    nearest = max(
        near, key=lambda each: difflib.SequenceMatcher(None, word, each).find_longest_match().size, default=None
    )
    if nearest is not None:
        return f"; the nearest name whose dimensions are known is {known[nearest]}" if nearest != word else ""
    if not word.startswith("qwen/"):
        return ""
    return (
        f"; supported are the models {', '.join(dict.fromkeys(hub_id.split(f'-{size}')[0] for size, hub_id in pairs))}"
    )


def titles() -> dict[str, str]:
    """Return a dict from the name of each family to the name of its models in help and messages."""
    return {name: family.title or name for name, family in families().items()}


def preset_sizes() -> list[str]:
    """Return the sizes that `preset` accepts."""
    return list(dict.fromkeys(size for presets in _presets() for size in presets.PRESETS))


def _presets() -> list[Any]:
    return [each.presets for each in families().values() if each.presets is not None]
