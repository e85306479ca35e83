"""Write an MoE checkpoint in each layout of experts."""

import shutil
from pathlib import Path

from qwen3vl_bridge.weights.rows import ExpertLayout

import torch
from safetensors.torch import load_file, save_file

# Those of families without multi-token prediction.
LAYOUTS = (ExpertLayout.INPUT_MAJOR, ExpertLayout.OUTPUT_MAJOR, ExpertLayout.PER_EXPERT)


def relayout(tensors: dict[str, torch.Tensor], layout: ExpertLayout) -> dict[str, torch.Tensor]:
    """Convert tensors of a packed, output-major checkpoint to another layout."""
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        apart = ExpertLayout.PER_EXPERT if name.startswith("mtp.") else ExpertLayout.OUTPUT_MAJOR
        layout_here = apart if layout is ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT else layout
        if ".mlp.experts." not in name or layout_here is ExpertLayout.OUTPUT_MAJOR:
            changed[name] = tensor
        elif layout_here is ExpertLayout.INPUT_MAJOR:
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


def joined_experts(tensors: dict[str, torch.Tensor], packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert packed or per-expert tensors to the packed, output-major layout."""
    joined = {}
    for name, tensor in packed.items():
        if name in tensors:
            joined[name] = tensors[name]
            continue
        prefix, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        experts = ([tensors[f"{prefix}.{i}.{part}.weight"] for part in parts] for i in range(len(tensor)))
        joined[name] = torch.stack([torch.cat(one) for one in experts])
    return joined


def _apart(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    prefix, kind = name.rsplit(".", 1)
    tensors = {}
    for expert, weight in enumerate(tensor):
        parts = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
        for projection, part in parts if kind == "gate_up_proj" else [("down_proj", weight)]:
            tensors[f"{prefix}.{expert}.{projection}.weight"] = part.contiguous()
    return tensors
