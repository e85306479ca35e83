"""Inspect: the contents of a checkpoint, from headers and metadata, without the numpy and torch of a conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import naming_of
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.huggingface import HUGGINGFACE, HFWeights, has_weights
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, own_config, read_manifest
from qwen3vl_bridge.io.files import expanded
from qwen3vl_bridge.weights import fp8


def inspect_checkpoint(path: str | Path, *, iteration: int | None = None) -> dict[str, Any]:
    """Contents of a checkpoint, as plain values that can be written as JSON.

    Args:
        path: folder of a Hugging Face model, or a Megatron checkpoint's root or iteration folder.
        iteration: iteration of a Megatron checkpoint; None for the latest.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    folder = expanded(path)
    if has_weights(folder):
        return inspect_model(folder)
    folder = megatron.find_iteration(folder, iteration)
    ckpt_format, metadata, manifest = megatron.format_of(folder), read_metadata(folder), read_manifest(folder)
    keys = megatron.model_keys(metadata, ckpt_format)
    specs = {name: metadata.tensors[key][0] for name, key in keys.items()}
    model_keys = set(keys.values())
    others = [spec for key, (spec, _) in metadata.tensors.items() if key not in model_keys]
    config = own_config(folder)
    naming = naming_of(config.rows(), specs) if config and ckpt_format == megatron.FSDP_DTENSOR else None
    return {
        "format": ckpt_format,
        "path": str(folder),
        "model": config.raw.get("model_type") if config else None,
        "files": len(list(folder.glob("*.distcp"))),
        **_summary(specs.values()),
        "chunks": sum(len(metadata.tensors[key][1]) for key in model_keys),
        "layer_spec": naming or manifest.get("layer_spec"),
        "topology": manifest.get("topology"),
        "source": manifest.get("source"),
        "checksums": "sha256" in manifest,
        "other_tensors": len(others),
        "other_bytes": sum(spec.nbytes for spec in others),
        "byte_items": sorted(key for key in metadata.byte_items if "_extra_state" not in key),
        "manifest": {name: value for name, value in manifest.items() if name != "sha256"} or None,
    }


def inspect_model(folder: Path) -> dict[str, Any]:
    """Contents of a Hugging Face model's folder; a CheckpointError if it has none, or is damaged."""
    config, weights, experts = ModelConfig(folder), HFWeights(folder), None
    if config.dimensions.indices["moe_layers"]:
        experts = config.expert_layout({name: spec.shape for name, spec in weights.specs.items()}).name.lower()
    return {
        "format": HUGGINGFACE,
        "path": str(folder),
        "model": config.raw.get("model_type"),
        "files": len(weights.files),
        **_summary(replace(spec, dtype=fp8.E4M3) if spec.scales else spec for spec in weights.specs.values()),
        "experts": experts,
    }


def _summary(specs: Iterable[TensorSpec]) -> dict[str, Any]:
    specs = list(specs)
    return {
        "tensors": len(specs),
        "parameters": sum(spec.numel for spec in specs),
        "bytes": sum(spec.nbytes for spec in specs),
        "dtypes": dict(sorted(Counter(spec.dtype for spec in specs).items())),
    }
