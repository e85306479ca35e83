"""Reading a Qwen3.5-VL `config.json`: checks, dimensions, and the fields that identify the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.config import hf_config, hybrid_config
from qwen3vl_bridge.weights.rows import Dimensions

FAMILY_NAME = "qwen3_5"


def check_settings(config: Any) -> None:
    """Check that a configuration is well-formed and supported.

    Raises:
        ValueError: a field is missing, invalid or not supported; the message names it.
    """
    hybrid_config.check_settings(config)
    hf_config.check_model_type(config, FAMILY_NAME, hf_config.experts_of(config["text_config"]), "experts")


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """Return the dimensions that the weight table uses, from a `config.json`. Raise KeyError for a missing field."""
    return hybrid_config.dimensions_of(config, FAMILY_NAME)


def fields_of_run(model: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that identify a model and that the `model` section of a run's `run_config.yaml` contains.

    `config` is the result of `hybrid_config.fields_of` for the configuration to compare with.
    """
    return hybrid_config.fields_of_run(model, config, FAMILY_NAME)
