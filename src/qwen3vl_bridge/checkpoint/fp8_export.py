"""Export in FP8, as the models named -FP8 are released: which tensors, with which scales, and what `config.json` says.

Source: `quantization_config` and tensors of Qwen3-VL-32B-Instruct-FP8, Qwen3.6-35B-A3B-FP8 and Qwen3.8-27B-FP8. The
linear layers of text layers are in FP8, without routers, gates of shared experts and narrow projections of GDN.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import Plan, Task
from qwen3vl_bridge.checkpoint.formats.huggingface import HFWeights, StoredTensor, has_weights, one_file, read_header
from qwen3vl_bridge.checkpoint.formats.tensors import Extent, Quantized, SegmentReader, Segments, Slice, TensorSpec
from qwen3vl_bridge.models.hf_config import fp8_block
from qwen3vl_bridge.weights import fp8

QUANTIZATION = "quantization_config"
# The scales of the model that a Megatron checkpoint was imported from, in its folder of Hugging Face files. It is a
# safetensors file by another name, because the folder would otherwise be taken for a model.
_KEPT = "weight_scales.fp8"
_IN_FP8 = re.compile(
    r"(model\.language_model|mtp)\.layers\.\d+\..*\.([qkvo]_proj|(gate|up|down|gate_up)_proj|in_proj_(qkv|z)|out_proj)"
)


@dataclass(frozen=True)
class Fp8Export:
    """How a model is written in FP8."""

    quantization: Mapping[str, Any]  # the `quantization_config`
    kept: Mapping[str, StoredTensor]  # scales of the model that it comes from, by name

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: Path, names: Collection[str]) -> Fp8Export:
        """As the model in FP8 was whose `config.json` this is, or as the released models are.

        `folder` has that file, and scales of the model or not; `names` are those of all tensors except scales.
        """
        if (quantization := config.get(QUANTIZATION)) is None:
            modules = {module for module in map(_module, names) if not _IN_FP8.fullmatch(module)}
            modules |= {f"{module}a" for module in modules if module.endswith(".in_proj_b")}  # both, as vLLM joins them
            quantization = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": sorted(modules),
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            }
        return cls(quantization, _scales_of(folder))

    def plan(self, plan: Plan) -> Plan:
        """A plan whose weights are written in FP8, each followed by its scales."""
        excluded, block = set(self.quantization.get("modules_to_not_convert") or ()), fp8_block(self.quantization)
        dtype = next((scales.spec.dtype for scales in self.kept.values()), "bfloat16")
        tasks: list[Task] = []
        for task in plan.tasks:
            spec, module = task.target, _module(task.target.name)
            had, parts = self.kept.get(spec.name + fp8.SCALES), module.split(".")
            # What transformers takes for the module's name: its beginnings and its ends.
            names = {".".join(some) for n in range(len(parts)) for some in (parts[: n + 1], parts[n:])}
            if had is None and not (_IN_FP8.fullmatch(module) and excluded.isdisjoint(names)):
                tasks.append(task)
                continue
            size = block or (spec.shape[-2], spec.shape[-1])
            shape = fp8.shape_of_scales(spec.shape, size)
            scales, kept = TensorSpec(spec.name + fp8.SCALES, dtype, shape), None
            if had is not None and had.spec.numel == scales.numel:
                scales, kept = had.spec, Extent(had.path, had.offset, had.spec.nbytes)
            pieces = tuple(task.segments)
            written = Quantized(pieces, spec.shape, size, scales.dtype, kept, False, 0, spec.numel)
            tasks.append(replace(task, target=replace(spec, dtype=fp8.E4M3), segments=Segments([written])))
            tasks.append(Task(scales, Segments([written._replace(of_scales=True, length=math.prod(shape))])))
        made = {task.target.name for task in tasks for segment in task.segments if isinstance(segment, Quantized)}
        return replace(plan, tasks=tuple(tasks), cast=plan.cast | made, transposed=plan.transposed - made)


def keep_scales(source: Path, target: Path) -> None:
    """Copy the scales that a folder has to a folder of Hugging Face files, for an export in FP8."""
    if (source / _KEPT).is_file():
        shutil.copyfile(source / _KEPT, target / _KEPT)
    elif scales := [stored.spec for stored in _scales_of(source).values()]:
        file = one_file(_KEPT, [Task(spec, Segments([Slice(spec.name, 0, spec.numel)])) for spec in scales])
        with (target / _KEPT).open("wb") as out, SegmentReader(HFWeights(source, dequantize=False)) as reader:
            for content in file.contents:
                blocks = [content] if isinstance(content, bytes) else reader.blocks(content.segments, content.dtype)
                for block in blocks:
                    out.write(block)


def _scales_of(folder: Path) -> dict[str, StoredTensor]:
    """The scales in a model's folder or a checkpoint's folder of Hugging Face files, by name."""
    if (folder / _KEPT).is_file():
        return {stored.spec.name: stored for stored in read_header(folder / _KEPT)}
    return HFWeights(folder).scales if has_weights(folder) else {}


def _module(name: str) -> str:
    """The module of a tensor; packed experts and other parameters count as one."""
    return name.removesuffix(".weight").removesuffix(".bias")
