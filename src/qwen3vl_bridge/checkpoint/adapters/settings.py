"""The adapter settings in a run's checkpoint: the `peft` section of its run_config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from qwen3vl_bridge.checkpoint.formats.megatron import RUN_CONFIG, read_run_config
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights.adapter_rows import AdapterSettings
from qwen3vl_bridge.weights.rows import Part

_METHODS = {"qwen3vl_bridge.peft.Qwen3VLLoRA": False, "qwen3vl_bridge.peft.Qwen3VLDoRA": True}
# Megatron-Bridge's own, which adapt all parts, and experts unless they are DoRA.
_BRIDGES = {
    "megatron.bridge.peft.lora.LoRA": False,
    "megatron.bridge.peft.lora.VLMLoRA": False,
    "megatron.bridge.peft.dora.DoRA": True,
}
# Fields that are missing in runs of earlier versions, with their values then.
_LATER = {"adapt_experts": False}
# Fields that may change in a resumed run: they affect neither which tensors there are nor their meaning.
_FREE = (
    *("dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method"),
    *("sequence_parallel_input_regather", "a2a_experimental"),
)


class PeftConfig(Protocol):
    """A run's adapter configuration."""

    def to_cfg_dict(self) -> dict[str, Any]:
        """Its fields, and its class as `_target_`."""
        ...


def adapter_settings(config: dict[str, Any], where: Path) -> AdapterSettings:
    """The adapters of a run.

    Args:
        config: from `read_run_config`.
        where: its folder, for errors.

    Raises:
        CheckpointError: it has none, or of a kind whose tensors this package does not support.
    """
    found = config.get("peft")
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} was saved by a run without adapters: its {RUN_CONFIG} has peft {found!r}")
    found = _LATER | found
    method, known = found.get("_target_"), _METHODS | _BRIDGES
    if not isinstance(method, str) or method not in known:
        raise CheckpointError(f"{where / RUN_CONFIG}: peft is {method!r}, expected one of {', '.join(known)}")
    if method in _BRIDGES:
        found = found | {f"adapt_{part.value}": True for part in Part} | {"adapt_experts": not known[method]}
    try:
        numbers = {name: _number(found[name]) for name in ("dim", "alpha")}
        parts = frozenset(part.value for part in Part if found[f"adapt_{part.value}"] is True)
        modules = {name: _texts(found[name]) for name in ("target_modules", "exclude_modules")}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{where / RUN_CONFIG}: peft lacks {error}, or its value has the wrong type") from error
    if numbers["dim"] < 1 or int(numbers["dim"]) != numbers["dim"]:
        raise CheckpointError(
            f"{where / RUN_CONFIG}: peft.dim is {numbers['dim']}, expected a whole number of at least 1"
        )
    experts = found["adapt_experts"] is True
    return AdapterSettings(int(numbers["dim"]), numbers["alpha"], known[method], parts, experts=experts, **modules)


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a number (found {value!r})")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value or [], list) or not all(isinstance(entry, str) for entry in value or []):
        raise TypeError(f"names (found {value!r})")
    return tuple(value or [])


def refuse_adapters_alone(folder: Path) -> None:
    """Refuse a checkpoint that contains only adapters where a complete model is required.

    Raises:
        CheckpointError: it contains only adapters.
    """
    if (folder / RUN_CONFIG).is_file() and read_run_config(folder).get("peft") is not None:
        raise CheckpointError(
            f"{folder} holds only the adapters and other parameters that a run trained, expected a complete model; "
            "`qwen3vl adapters merge` makes one of it"
        )


def check_same_adapters(folder: Path, peft: PeftConfig | None) -> None:
    """Check that a run has the adapters of a checkpoint.

    Args:
        folder: the checkpoint's.
        peft: the run's; None without adapters.

    Raises:
        CheckpointError: they differ; the differences are listed.
    """
    theirs = read_run_config(folder).get("peft") or {}
    theirs = theirs and _LATER | theirs
    ours = {} if peft is None else peft.to_cfg_dict()
    names = sorted((theirs.keys() | ours.keys()) - {*_FREE, "params_to_save"})
    differ = [
        f"peft.{name} was {theirs.get(name)!r}, is {ours.get(name)!r}" for name in names
        if theirs.get(name) != ours.get(name)
    ]  # fmt: skip
    if not theirs or not ours:
        was, has = (section.get("_target_", "no adapters") for section in (theirs, ours))
        differ = (
            [f"the checkpoint was saved by a run with {was}, this run has {has}"] if bool(theirs) != bool(ours) else []
        )
    if differ:
        raise CheckpointError("\n  ".join([f"{folder} has different adapters from this run:", *differ]))
