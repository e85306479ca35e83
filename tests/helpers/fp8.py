"""Models in FP8 as Qwen releases them: a small quantizer, independent of the package's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Of text layers, in released files: attention, MLPs, experts, the wide projections of linear attention.
_QUANTIZED = re.compile(
    r"(model\.language_model|mtp)\.layers\.\d+\..*"
    r"(?:[qkvo]_proj|(?:gate|up|down|gate_up)_proj|in_proj_(?:qkv|z)|out_proj)(\.weight)?"
)


def quantize(weight: torch.Tensor, block: tuple[int, int], scales_in: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., rows, columns] by blocks to e4m3 and return values and scales; a block's maximum maps to 448."""
    *many, rows, columns = weight.shape
    height, width = block
    matrices = weight.float().reshape(-1, rows, columns)
    quantized = torch.empty(matrices.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(matrices), -(-rows // height), -(-columns // width))
    for number, matrix in enumerate(matrices):
        for i in range(scales.shape[1]):
            for j in range(scales.shape[2]):
                here = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scale = matrix[here].abs().max() / 448
                if scales_in is torch.float8_e8m0fnu:
                    scale = scale.log2().ceil().exp2()
                scales[number, i, j] = scale = scale.to(scales_in).float()
                quantized[number][here] = (matrix[here] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantized.reshape(weight.shape), scales.to(scales_in).reshape(*many, *scales.shape[1:])


def values(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the dequantized weight in float32."""
    rows, columns = weight.shape[-2:]
    repeated = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.float() * repeated.repeat_interleave(block[1], -1)[..., :columns]


def read(folder: Path, block: tuple[int, int] = (16, 16)) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder, FP8 ones dequantized to float32."""
    stored = {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith("_scale_inv")}
    whole = {name.removesuffix("_scale_inv"): one for name, one in scales.items()}
    return stored | {name: values(stored[name], one, block) for name, one in whole.items()}


def in_fp8(
    folder: Path,
    target: Path,
    block: tuple[int, int] = (16, 16),
    scales_in: torch.dtype = torch.bfloat16,
    also: tuple[str, ...] = (),
) -> Path:
    """Write a copy of a model with text layers, and the names in `also`, in FP8, as in released files."""
    tensors, kept = {}, []
    for name, tensor in load_file(folder / "model.safetensors").items():
        if _QUANTIZED.fullmatch(name) or name in also:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensor, block, scales_in)
        else:
            tensors[name] = tensor if name.endswith(("A_log", "linear_attn.norm.weight")) else tensor.bfloat16()
            kept.append(name.removesuffix(".weight").removesuffix(".bias"))
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    kept += [f"{name}a" for name in kept if name.endswith("in_proj_b")]
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(set(kept)),
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target
