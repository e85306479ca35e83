"""One MoE checkpoint in each of the ways that experts are held on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from qwen3vl_bridge.weights.names import ExpertLayout

import torch
from safetensors.torch import load_file, save_file


def relayout(tensors: dict[str, torch.Tensor], layout: ExpertLayout) -> dict[str, torch.Tensor]:
    """Tensors of a packed, output-major checkpoint in another layout."""
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name or layout is ExpertLayout.OUTPUT_MAJOR:
            changed[name] = tensor
        elif layout is ExpertLayout.INPUT_MAJOR:
            changed[name] = tensor.transpose(1, 2).contiguous()
        else:
            changed.update(_apart(name, tensor))
    return changed


def rewrite(source: Path, folder: Path, layout: ExpertLayout) -> Path:
    """Copy a checkpoint as transformers 5 saves it (packed, output-major) into another layout."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    changed = relayout(tensors, layout)
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _apart(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    prefix, kind = name.rsplit(".", 1)
    tensors = {}
    for expert, weight in enumerate(tensor):
        parts = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
        for projection, part in parts if kind == "gate_up_proj" else [("down_proj", weight)]:
            tensors[f"{prefix}.{expert}.{projection}.weight"] = part.contiguous()
    return tensors
