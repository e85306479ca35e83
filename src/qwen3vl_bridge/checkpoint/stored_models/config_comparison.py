"""Whether two configurations describe the same model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.registry import family_of, family_of_provider


def check_same_model(one: ModelConfig, other: ModelConfig) -> None:
    """Check that two configurations are of the same model.

    Dtypes, dropout, initialisation and the maximum row length may differ.

    Args:
        one: a model's.
        other: the expected one.

    Raises:
        CheckpointError: they are of two models; all fields that differ are listed.
    """
    found, expected = one.family.fields_of(one.raw), other.family.fields_of(other.raw)
    _compare(one, found, expected, found | expected, other.folder / "config.json")


def check_model_of_run(config: ModelConfig, run: Mapping[str, Any], path: Path) -> bool:
    """Check that a configuration is of the model that a run has trained.

    Args:
        config: a model's.
        run: contents of the run's file.
        path: that file.

    Returns:
        Whether the file describes the model.

    Raises:
        CheckpointError: they are of two models; all fields that differ are listed.
    """
    model = run.get("model")
    if not isinstance(model, Mapping):
        return False
    found = config.family.fields_of(config.raw)
    if family_of_provider(model.get("_target_")) is not None:  # a conversion has written a whole `config.json`
        expected = _fields_of_conversion(model.get("hf_config"), path)
        _compare(config, found, expected, found | expected, path)
        return True
    expected = config.family.run_fields_of(model, found)
    _compare(config, found, expected, expected, path)
    return bool(expected)


def _fields_of_conversion(hf_config: Any, path: Path) -> dict[str, Any]:
    try:
        if not isinstance(hf_config, Mapping):
            raise ValueError(f"the configuration is {hf_config!r:.80}, expected an object")
        family = family_of(hf_config)
        family.check_settings(hf_config)
    except ValueError as error:
        raise CheckpointError(f"{path}, model.hf_config: {error}") from error
    return family.fields_of(hf_config)


def _compare(
    config: ModelConfig, found: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str], path: Path
) -> None:
    """Check some fields of a configuration against those of another."""
    names = [name for name in names if found.get(name) != expected.get(name)]
    if names:
        lines = [f"{name} is {found.get(name)!r}, expected {expected.get(name)!r}" for name in names]
        first = f"{config.folder / 'config.json'} describes another model than {path}:"
        raise CheckpointError("\n  ".join([first, *lines]))
