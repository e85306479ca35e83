"""Rules of settings as rows of a table; `models/refusals.py` has the model's, `training/run_refusals.py` a run's."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, replace
from enum import Enum
from functools import reduce
from typing import Any

logger = logging.getLogger(__name__)

# A row; or a function that raises ValueError, for constraints between several settings.
Rule = Callable[[Any], Any]

IGNORED = "it would be ignored"


def check(rules: Iterable[Rule], settings: Any) -> None:
    """Check a provider or a run's configuration against a table, in its order.

    Raises:
        ValueError: the first rule that is broken: the value, what is expected and why.
    """
    for rule in rules:
        rule(settings)


def unknown_names(settings: Any) -> list[str]:
    """Public attributes of a dataclass's instance that neither it nor its class declares, such as misspelt settings."""
    declared = fields_of(settings).keys() | dir(type(settings))
    return [name for name in vars(settings) if name not in declared and not name.startswith("_")]


# What other trainers call settings of a run: of several, each takes the value, unless it has its own here.
_ELSEWHERE = {
    "optimizer.lr": "learning_rate", "optimizer.min_lr": "min_learning_rate",
    "optimizer_config_override_provider.vision_model_lr": "vit_lr",
    "optimizer_config_override_provider.vision_projection_lr": "aligner_lr",
    "train.num_epochs": "num_train_epochs epochs",
    "train.global_batch_size": "batch_size batchsize gradient_accumulation_steps per_device_train_batch_size",
    "train.micro_batch_size": "mbs", "train.train_iters": "max_steps iters steps",
    "scheduler.lr_warmup_iters": "warmup_steps warmup_iters warmup",
    "scheduler.lr_warmup_iters=0 scheduler.lr_warmup_fraction": "warmup_ratio lr_warmup_fraction",
    "scheduler.lr_decay_style": "lr_scheduler_type",
    "optimizer.clip_grad": "max_grad_norm", "checkpoint.save": "output_dir", "checkpoint.save_interval": "save_steps",
    "checkpoint.most_recent_k": "save_total_limit", "validation.eval_interval": "eval_steps",
    "logger.log_interval": "logging_steps",
    "model.seq_length dataset.seq_length": "max_length max_seq_length seq_length seq_len cutoff_len",
    "dataset.valid_path": "val_dataset eval_dataset", "dataset.pack": "packing neat_packing",
    "dataset.vision.image_max_pixels": "max_pixels", "dataset.num_workers": "dataloader_num_workers",
    "model.tensor_model_parallel_size": "tp", "model.pipeline_model_parallel_size": "pp",
    "model.context_parallel_size": "cp", "model.expert_model_parallel_size": "ep",
    "model.expert_tensor_parallel_size": "etp",
    "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1":
        "gradient_checkpointing activation_checkpointing",
    "model.freeze_vision_model": "freeze_vit freeze_vision freeze_vision_tower freeze_vision_encoder freeze_visual",
    "model.freeze_vision_projection": "freeze_aligner freeze_projector", "model.freeze_language_model": "freeze_llm",
    "peft.dim": "lora_rank rank r", "peft.alpha": "lora_alpha", "peft.dropout": "lora_dropout",
    "peft.target_modules": "target_modules lora_target", "rng.seed": "seed",
}  # fmt: skip
_NAMES_ELSEWHERE = {alias: names for names, aliases in _ELSEWHERE.items() for alias in aliases.split()}
_OF_A_DEVICE = {"per_device_train_batch_size", "gradient_accumulation_steps"}
ALL_LINEAR = ("all", "all-linear")  # what others call all linear layers, which here an empty list selects
# Names whose values have other names here, too: what is said, with theirs in brackets.
_OTHER_VALUES = {
    **dict.fromkeys(("lora", "lora_config"), "peft, which recipes such as qwen3_vl_8b_peft_config set"),
    "truncation_strategy": "dataset.on_long=drop (delete) or dataset.on_long=truncate (right)",
    "loss_scale": "dataset.answers=last (last_round) or dataset.answers=all (default); fp16's is optimizer.loss_scale",
}
# Names of which nothing here is like it: what happens instead.
_NONE_HERE = {
    "load_from_cache_file": "samples are encoded during training, and not cached; `qwen3vl data pack` packs "
    "them before, for dataset.train_packing"
}

# Environment variables that ms-swift reads and nothing here does, by the setting that does the same.
_OF_ENVIRONMENT = {
    "dataset.vision.image_min_pixels": "MIN_PIXELS IMAGE_MIN_TOKEN_NUM",
    "dataset.vision.image_max_pixels": "MAX_PIXELS IMAGE_MAX_TOKEN_NUM",
    "dataset.vision.video_min_pixels": "VIDEO_MIN_PIXELS VIDEO_MIN_TOKEN_NUM",
    "dataset.vision.video_max_pixels": "VIDEO_MAX_PIXELS VIDEO_MAX_TOKEN_NUM VIDEO_TOTAL_PIXELS",
    "dataset.vision.video_fps": "FPS", "dataset.vision.video_min_frames": "FPS_MIN_FRAMES",
    "dataset.vision.video_max_frames": "FPS_MAX_FRAMES", "dataset.media_root": "ROOT_IMAGE_DIR",
}  # fmt: skip
_OF_A_FRAME, _OF_TOKENS, _TOKEN_PIXELS = "VIDEO_M", "_TOKEN_NUM", 32 * 32


def named_elsewhere(alias: str, value: str = "") -> str | None:
    """The settings that other trainers call so, with the value if there is one; None if no trainer does."""
    if said := _OTHER_VALUES.get(alias):
        return said
    if (names := _NAMES_ELSEWHERE.get(alias)) is None:
        return None
    if alias in _OF_A_DEVICE:
        return f"{names}{'=...' if value else ''}, which is per device x accumulation x GPUs"
    if names == "peft.target_modules" and value:
        value = "[]" if value in ALL_LINEAR else f"[{value.strip('[]')}]"
    separator, end = (" ", f"={value}") if value else (" and ", "")
    return separator.join(name if "=" in name else name + end for name in names.split())


def none_here(alias: str) -> str | None:
    """What happens instead of what other trainers call so, if no setting is like it."""
    return _NONE_HERE.get(alias)


def unread_variables(environment: Mapping[str, str], spelt: Callable[[str, str], str | None]) -> str | None:
    """A warning of variables that ms-swift reads and nothing here does; None if none is set.

    Args:
        environment: the process's.
        spelt: a setting with a value in the words of a command; None if the command has been given a value for it.
    """
    found = {
        variable: words
        for name, variables in _OF_ENVIRONMENT.items()
        for variable in variables.split()
        if environment.get(variable) and (words := spelt(name, _value_here(variable, environment[variable])))
    }
    if not found:
        return None
    of_frames = any(variable.startswith(_OF_A_FRAME) for variable in found)
    return (
        f"warning: the environment has {', '.join(found)}, which nothing reads; expected "
        f"{' '.join(dict.fromkeys(found.values()))}{' (pixels of all frames together)' * of_frames}"
    )


def _value_here(variable: str, value: str) -> str:
    if variable.startswith(_OF_A_FRAME):
        return "..."
    return str(int(value) * _TOKEN_PIXELS) if variable.endswith(_OF_TOKENS) and value.isdecimal() else value


def suggestion(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown setting of a run: those of `known`, full names, that may be meant."""
    field, by_field = name.rpartition(".")[2], {one.rpartition(".")[2]: one for one in known}
    if instead := none_here(field):
        return f": {instead}"
    if meant := named_elsewhere(field) or by_field.get(field):
        close = [meant]
    elif name == field:
        close = [by_field[one] for one in difflib.get_close_matches(field, by_field, n=3)]
    else:
        close = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


# Attributes other than fields that callers store on a provider.
_NOTES = frozenset(
    {"pretrained_model_name", "swiglu", "bridge", "grid", "world_size", "rank_offset"}
    | {"teacher", "kd_config", "distill_submodule", "full_model"}  # of Megatron-Bridge's `DistillationProvider`
)
# From this similarity on a name counts as a misspelt field; Megatron-Bridge's recipes set some names that are not
# fields.
_LIKE = 0.85
_FREEZE = ("freeze_language_model", "freeze_vision_model", "freeze_vision_projection")


def check_provider_names(provider: Any) -> None:
    """Refuse attributes of a provider that are not fields, but similar to one, another trainer's name for one, or meant
    to freeze something. Callers may store their own: others are only logged.
    """
    fields, kind = [*fields_of(provider)], type(provider).__name__
    for name in unknown_names(provider):
        if name in _NOTES or getattr(provider, name) in (None, False):
            continue
        meant = _NAMES_ELSEWHERE.get(name, "").partition(" ")[0].partition("=")[0].rpartition(".")[2]
        like = [meant] if meant in fields else difflib.get_close_matches(name, fields, n=1, cutoff=_LIKE)
        if like := like or (_FREEZE if name.startswith("freeze_") else ()):
            raise ValueError(f"{name} is set, but {kind} has no such setting: expected {', '.join(like)}")
        logger.warning("%s is set, but %s has no such setting: it has no effect", name, kind)


@dataclass(frozen=True)
class When:
    """Conditions under which rows apply, to be called with all settings."""

    names: str  # the settings on which the conditions depend, separated by spaces, for the message
    holds: Callable[[Any], Any]  # whether the conditions are met

    def __call__(self, settings: Any) -> Any:
        """Whether the conditions are met."""
        return self.holds(settings)

    def __and__(self, other: Callable[[Any], Any]) -> When:
        """Both; the message says the settings of those that are `When`."""
        names = f"{self.names} {other.names}" if isinstance(other, When) else self.names
        return When(names, lambda settings: self(settings) and other(settings))

    def describe(self, settings: Any) -> str:
        """These settings with their values, as " with a 1 and b 'c'"."""
        values = {name: _value(settings, name) for name in self.names.split()}
        words = [name if value is True else f"{name} {_shown(value)}" for name, value in values.items()]
        return f" with {' and '.join(words)}"


def is_on(name: str) -> When:
    """The setting is True, or has a value."""
    return When(name, lambda settings: _value(settings, name))


def is_off(name: str) -> When:
    """The setting is False, None or "none"."""
    return When(name, lambda settings: _value(settings, name) in (None, False, "", "none"))


def above(name: str, number: int) -> When:
    """The setting is above this number; None is not."""
    return When(name, lambda settings: (_value(settings, name) or 0) > number)


def equal(name: str, value: Any) -> When:
    """The setting has this value."""
    return When(name, lambda settings: _value(settings, name) == value)


def not_equal(name: str, value: Any) -> When:
    """The setting has another value."""
    return When(name, lambda settings: _value(settings, name) != value)


def missing(package: str) -> Callable[[Any], bool]:
    """The package is not installed."""
    return lambda _: importlib.util.find_spec(package) is None


@dataclass(frozen=True)
class Allowed:
    """The allowed value of a setting."""

    name: str  # the path to it, as "dist_train.vision_world_size"; or a product of settings, as "a * b"
    expected: Any  # its only value, a `Range` of values, or `DEFAULT`
    # Condition under which the row applies, which the message says if it is a `When`; None: always.
    when: When | Callable[[Any], Any] | None = None
    also: tuple[Any, ...] = ()  # further accepted values with the same meaning
    why: str = ""  # the reason, or what to do instead

    def because(self, why: str) -> Allowed:
        """The row with a reason."""
        return replace(self, why=why)

    def __call__(self, settings: Any) -> None:
        """Raise ValueError if the setting has another value."""
        if self.when is not None and not self.when(settings):
            return
        wanted = self.expected
        if wanted is DEFAULT:
            section, _, name = self.name.rpartition(".")
            field = fields_of(_value(settings, section)).get(name)
            if field is None:
                return
            wanted = field.default if field.default_factory is MISSING else field.default_factory()
        value = _value(settings, self.name)
        if value in self.also or (wanted.has(value, settings) if isinstance(wanted, Range) else value == wanted):
            return
        expected = wanted.describe(settings) if isinstance(wanted, Range) else _shown(wanted)
        circumstances = self.when.describe(settings) if isinstance(self.when, When) else ""
        why = f": {self.why}" if self.why else ""
        raise ValueError(f"{self.name} is {_shown(value)}{circumstances}, expected {expected}{why}")


def fields_of(settings: Any) -> dict[str, Field]:
    """Fields by name; of a student's settings those of its own class, which Megatron-Bridge's for students hides."""
    return getattr(getattr(settings, "_super_class", settings), "__dataclass_fields__", {})


# The default of the setting's class. Settings that it does not have in the installed release are not checked.
DEFAULT = object()


@dataclass(frozen=True)
class Range:
    """Allowed values of a setting."""

    has: Callable[[Any, Any], bool]  # (value, all settings) -> whether it is allowed
    describe: Callable[[Any], str]  # description of the values, from all settings


def any_of(*values: Any) -> Range:
    """These values, or lists of some of them."""
    *words, last = map(_shown, values)
    return Range(
        lambda value, _: all(entry in values for entry in (value if isinstance(value, list) else [value])),
        lambda _: f"{', '.join(words)} or {last}",
    )


def at_least(least: int | str) -> Range:
    """This number, or the value of this setting, and those above."""

    def lowest(settings: Any) -> int:
        return _value(settings, least) if isinstance(least, str) else least

    return Range(
        lambda value, settings: value is not None and value >= lowest(settings),
        lambda settings: f"{least}, {lowest(settings)}, or more" if isinstance(least, str) else f"{least} or more",
    )


def same_as(other: str) -> Range:
    """The value of another setting."""
    return Range(
        lambda value, settings: value == _value(settings, other),
        lambda settings: f"{other}, {_shown(_value(settings, other))}",
    )


def multiple_of(divisor: str) -> Range:
    """Multiples of a setting, or of a product, as "a * b"; None counts as 1."""

    def sizes(settings: Any) -> dict[str, int]:
        values = {name: _value(settings, name) for name in divisor.split(" * ")}
        return {name: size for name, size in values.items() if size is not None}

    return Range(
        lambda value, settings: value % math.prod(sizes(settings).values()) == 0,
        lambda settings: f"a multiple of {' * '.join(sizes(settings))}, {math.prod(sizes(settings).values())}",
    )


def keep(
    names: str, why: str, when: When | None = None, *, section: str = "", also: tuple[Any, ...] = ()
) -> tuple[Allowed, ...]:
    """Rows of settings, separated by spaces, that must keep the default of their class; `section` comes before each."""
    return tuple(Allowed(section + name, DEFAULT, when, also, why) for name in names.split())


def dependents(names_of: Mapping[str, str]) -> tuple[Allowed, ...]:
    """Rows of settings of something that another setting of their section turns on: while it is off, they keep their
    defaults.
    """
    return tuple(
        row
        for switch, names in names_of.items()
        for row in keep(names, IGNORED, is_off(switch), section="".join(switch.rpartition(".")[:2]), also=(None,))
    )


def _value(settings: Any, name: str) -> Any:
    if " * " in name:
        return math.prod(_value(settings, factor) for factor in name.split(" * "))
    return reduce(getattr, name.split("."), settings) if name else settings


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Enum) else repr(value)
