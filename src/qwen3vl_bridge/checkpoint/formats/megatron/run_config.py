"""`run_config.yaml`: what Megatron-Bridge's tools read about a checkpoint's run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron.folder import RUN_CONFIG
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.io.parsing import check_plain, read_yaml

_SECTIONS = ("model", "checkpoint", "peft")  # those that are read


def run_config(
    hf_config: Mapping[str, Any],
    hf_model: str,
    ckpt_format: str,
    *,
    provider: str,
    vocabulary: int,
    rows: int,
    vocab_divisor: int | None = None,
) -> dict[str, Any]:
    """Contents of `run_config.yaml` for a checkpoint that was not written by a run.

    Megatron-Bridge builds the model from `model`. Its loader needs the two parallel sizes if the file exists, and its
    export looks for `hf_model_id`.

    Args:
        hf_config: the model's `config.json`.
        hf_model: its source: a folder or a hub id.
        ckpt_format: which of the two formats.
        provider: dotted name of the function that creates a provider from `hf_config`. Megatron-Bridge calls it after
            the package that contains it has allowed it (`register_allowed_target_prefix`).
        vocabulary: number of tokens.
        rows: of the vocabulary, including padding.
        vocab_divisor: the padding's divisor per tensor-parallel rank; None if it is unknown, or there is no padding.

    Returns:
        Plain values only.

    Raises:
        CheckpointError: the configuration contains something that Megatron-Bridge would execute instead of reading it.
    """
    _check_passive(hf_config, "config.json")
    _check_passive(hf_model, "the name of the model")
    divisor = _divisor(vocabulary, rows, vocab_divisor)
    padding = {} if divisor is None else {"should_pad_vocab": True, "make_vocab_size_divisible_by": divisor}
    return {
        "model": {
            "_target_": provider,
            "hf_config": dict(hf_config),
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "hf_model_id": hf_model,
            **padding,
        },
        "checkpoint": {
            "ckpt_format": ckpt_format,
            "save_optim": False,
            "save_rng": False,
            "fully_parallel_save": True,
        },
    }


def _divisor(vocabulary: int, rows: int, divisor: int | None) -> int | None:
    """Divisor for which Megatron-Bridge pads a vocabulary to this many rows on one rank; None if no padding is needed.

    The smallest such divisor is valid for the most tensor-parallel sizes.
    """
    if divisor is not None and -(-vocabulary // divisor) * divisor == rows:
        return divisor
    if rows == vocabulary:
        return None
    return next(number for number in range(rows - vocabulary + 1, rows + 1) if rows % number == 0)


def _check_passive(value: Any, where: str) -> None:
    """Check that nothing in a configuration is executable: Megatron-Bridge calls a `_target_` wherever it is."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key.startswith("_") and key.endswith("_"):
                raise CheckpointError(f"{where} has the key {key!r}, expected no key that Megatron-Bridge would act on")
            _check_passive(inner, f"{where}, {key}")
    elif isinstance(value, list):
        for inner in value:
            _check_passive(inner, where)
    elif isinstance(value, str) and "${" in value:
        raise CheckpointError(f"{where} is {value[:80]!r}, expected no text that Megatron-Bridge would replace")


def read_run_config(folder: Path) -> dict[str, Any]:
    """The configuration of a checkpoint's run.

    Args:
        folder: the iteration's.

    Raises:
        CheckpointError: it is missing, or not YAML of plain values.
    """
    path = folder / RUN_CONFIG
    try:
        found = read_yaml(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected sections of settings")
    for name in _SECTIONS:
        if not isinstance(found.get(name) or {}, dict):
            raise CheckpointError(f"{path}: {name} is {str(found[name])[:80]}, expected a section of settings")
    try:
        check_plain(found.get("peft"), "peft")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return found
