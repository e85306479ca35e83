"""Inspect: what a checkpoint holds, from headers and metadata alone.

What lives here: gathering it, and laying it out as a table. What may not: reading weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import megatron_folder as megatron
from qwen3vl_bridge.checkpoint.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.hf_config import ModelConfig
from qwen3vl_bridge.checkpoint.hf_reader import INDEX, SINGLE, HFWeights
from qwen3vl_bridge.checkpoint.json_files import read_object
from qwen3vl_bridge.checkpoint.plan import naming_of
from qwen3vl_bridge.checkpoint.tensors import TensorSpec


def inspect_checkpoint(path: str | Path, *, iteration: int | None = None) -> dict[str, Any]:
    """What a checkpoint holds.

    Args:
        path: folder of a Hugging Face model, or a Megatron checkpoint's root or iteration folder.
        iteration: which iteration of a Megatron checkpoint; None for the latest.

    Returns:
        Plain values, fit for JSON.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    folder = Path(path).expanduser()
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        weights = HFWeights(folder)
        files = len(list(folder.glob("*.safetensors")))
        return {"format": "huggingface", "path": str(folder), "files": files, **_summary(weights.specs.values())}
    folder = megatron.find_iteration(folder, iteration)
    metadata = read_metadata(folder)
    keys = megatron.model_keys(metadata)
    specs = {name: metadata.tensors[key][0] for name, key in keys.items()}
    model_keys = set(keys.values())
    others = [spec for key, (spec, _) in metadata.tensors.items() if key not in model_keys]
    manifest = folder / megatron.MANIFEST
    config_folder = folder / megatron.HF_FILES
    config = ModelConfig(config_folder) if (config_folder / "config.json").is_file() else None
    return {
        "format": "fsdp_dtensor",
        "path": str(folder),
        "files": len(list(folder.glob("*.distcp"))),
        **_summary(specs.values()),
        "chunks": sum(len(metadata.tensors[key][1]) for key in model_keys),
        "layer_spec": naming_of(config.rows, config.dimensions, specs) if config else None,
        "other_tensors": len(others),
        "other_bytes": sum(spec.nbytes for spec in others),
        "byte_items": sorted(metadata.byte_items),
        "manifest": read_object(manifest) if manifest.is_file() else None,
    }


def _summary(specs: Iterable[TensorSpec]) -> dict[str, Any]:
    specs = list(specs)
    return {
        "tensors": len(specs),
        "parameters": sum(spec.numel for spec in specs),
        "bytes": sum(spec.nbytes for spec in specs),
        "dtypes": dict(sorted(Counter(spec.dtype for spec in specs).items())),
    }


def as_table(found: Mapping[str, Any]) -> str:
    """What `inspect_checkpoint` found, one line per value."""
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {entry}" for key, entry in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value[:8])) + (f" and {len(value) - 8} more" if len(value) > 8 else "")
        elif isinstance(value, int):
            value = f"{value:,}"
        lines.append(f"{name.replace('_', ' '):14} {'-' if value in (None, '') else value}")
    return "\n".join(lines)
