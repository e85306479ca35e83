"""`run_config.yaml`: what Megatron-Bridge's tools read about the run a checkpoint comes from.

What lives here: what a converted checkpoint's file holds, and reading a run's, as data and without calling anything.
What may not: what a section means.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron.folder import RUN_CONFIG
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.files.parsing import check_plain, read_yaml

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
    """Contents of `run_config.yaml` for a checkpoint that no run has written.

    Megatron-Bridge builds the model of `model`. Its loader wants the two parallel sizes as soon as the file is there,
    its export looks for `hf_model_id`.

    Args:
        hf_config: the model's `config.json`.
        hf_model: where it came from: a folder or a hub id.
        ckpt_format: which of the two formats.
        provider: dotted name of what makes a provider of `hf_config`. Megatron-Bridge calls it once the package that
            it is in has allowed it to (`register_allowed_target_prefix`).
        vocabulary: tokens.
        rows: of the vocabulary, padding counted in.
        vocab_divisor: what they were padded to a multiple of, for each tensor-parallel rank; None where that is not
            known, or they are not padded.

    Returns:
        Plain values only.

    Raises:
        CheckpointError: the configuration holds what Megatron-Bridge would act on instead of reading it.
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
    """What makes Megatron-Bridge pad a vocabulary to so many rows on one rank; None where it needs no padding.

    The smallest such number serves the most tensor-parallel ranks.
    """
    if divisor is not None and -(-vocabulary // divisor) * divisor == rows:
        return divisor
    if rows == vocabulary:
        return None
    return next(number for number in range(rows - vocabulary + 1, rows + 1) if rows % number == 0)


def _check_passive(value: Any, where: str) -> None:
    """Check that nothing in a configuration calls for anything: Megatron-Bridge calls a `_target_` wherever it is."""
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
    """The configuration of the run that a checkpoint is of.

    Args:
        folder: the iteration's.

    Raises:
        CheckpointError: it is missing, or no YAML of plain values.
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
