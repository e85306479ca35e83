"""Export in FP8, like the released models named -FP8: which tensors to quantize, their scales, and `config.json`.

The linear layers of text layers are in FP8, except routers, gates of shared experts and narrow projections of GDN. In
Qwen3.8-Flash-Next only routed experts are in FP8 (`Family.fp8_only_experts`).
An n-gram table is written in FP8 only if it was in FP8 in the imported model. Its tensors keep their shared scale.
Source: `quantization_config` and tensors of Qwen3-VL-32B-Instruct-FP8, Qwen3.6-35B-A3B-FP8 and Qwen3.8-27B-FP8.
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
from qwen3vl_bridge.checkpoint.formats.huggingface import HFWeights, StoredTensor, has_weights, plan_file, read_header
from qwen3vl_bridge.checkpoint.formats.tensors import (
    ByteRange,
    QuantizedSlice,
    SharedScaleSlice,
    SliceList,
    SliceReader,
    TensorSpec,
)
from qwen3vl_bridge.config.hf_config import fp8_block
from qwen3vl_bridge.weights import fp8
from qwen3vl_bridge.weights.rows import TensorSlice

QUANTIZATION = "quantization_config"
# File with the scales of the imported model, in the folder `hf` of a Megatron checkpoint. It is a safetensors file with
# another extension: otherwise the folder would be mistaken for a model.
_KEPT_SCALES = "weight_scales.fp8"
_IN_FP8 = re.compile(
    r"(model\.language_model|mtp)\.layers\.\d+\..*\.([qkvo]_proj|(gate|up|down|gate_up)_proj|in_proj_(qkv|z)|out_proj)"
)


@dataclass(frozen=True)
class Fp8Export:
    """Settings of an export in FP8: which modules are quantized, and the scales of the imported model."""

    quantization: Mapping[str, Any]  # the `quantization_config`
    kept: Mapping[str, StoredTensor]  # scales of the imported model, by name

    @classmethod
    def for_model(
        cls, config: Mapping[str, Any], folder: Path, names: Collection[str], *, only_experts: bool = False
    ) -> Fp8Export:
        """Return the FP8 settings for exporting a model.

        If the imported model was in FP8, return its settings. Otherwise return the settings of the released models
        with names that end in -FP8.

        Args:
            config: contents of the model's `config.json`.
            folder: the folder with `config.json`, and with scales if the model was in FP8.
            names: names of all tensors except scales.
            only_experts: True if the released FP8 models of the family store only routed experts in FP8.
        """
        if (quantization := config.get(QUANTIZATION)) is None:
            modules = {
                module
                for module in map(_module, names)
                if not _IN_FP8.fullmatch(module) or (only_experts and ".experts." not in module)
            }
            modules |= {f"{module}a" for module in modules if module.endswith(".in_proj_b")}  # both, as vLLM joins them
            quantization = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": sorted(modules),
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            }
        return cls(quantization, read_kept_scales(folder))

    def quantize(self, plan: Plan) -> Plan:
        """Return a copy of `plan` in which the selected weights are written in FP8, each followed by its scales."""
        excluded, block = set(self.quantization.get("modules_to_not_convert") or ()), fp8_block(self.quantization)
        dtype = next((scales.spec.dtype for scales in self.kept.values()), "bfloat16")
        experts = {_expert_layout(name) for name in self.kept if ".experts." in name}
        tasks: list[Task] = []
        shared: dict[str, StoredTensor] = {}  # scales of n-gram tables, by name
        for task in plan.tasks:
            scales_name = fp8.find_scales(task.target.name, self.kept)
            if scales_name != task.target.name + fp8.SCALES:
                shared[scales_name] = self.kept[scales_name]
                tasks.append(_with_shared_scale(task, self.kept[scales_name]))
                continue
            spec, module = task.target, _module(task.target.name)
            had, parts = self.kept.get(spec.name + fp8.SCALES), module.split(".")
            # transformers compares excluded names with the beginnings and the ends of a module's name.
            names = {".".join(some) for n in range(len(parts)) for some in (parts[: n + 1], parts[n:])}
            # If the imported model has scales, a layer without scales was not in FP8 there, even if config.json says
            # so. Experts in another layout are an exception: their scales had other names.
            may_be_new = not self.kept or (".experts." in module and experts and _expert_layout(module) not in experts)
            if had is None and not (may_be_new and _IN_FP8.fullmatch(module) and excluded.isdisjoint(names)):
                tasks.append(task)
                continue
            size = block or (spec.shape[-2], spec.shape[-1])
            shape = fp8.scales_shape(spec.shape, size)
            scales, kept = TensorSpec(spec.name + fp8.SCALES, dtype, shape), None
            if had is not None and had.spec.numel == scales.numel:
                scales, kept = had.spec, ByteRange(had.path, had.offset, had.spec.nbytes)
            weights = QuantizedSlice(tuple(task.slices), spec.shape, size, scales.dtype, kept, False, 0, spec.numel)
            tasks.append(replace(task, target=replace(spec, dtype=fp8.E4M3), slices=SliceList([weights])))
            tasks.append(Task(scales, SliceList([weights._replace(is_scales=True, length=math.prod(shape))])))
        tasks += (
            Task(stored.spec, SliceList([SharedScaleSlice((), *scale_of(stored), 0, stored.spec.numel)]))
            for stored in shared.values()
        )
        computed = QuantizedSlice, SharedScaleSlice
        quantized = {task.target.name for task in tasks for part in task.slices if isinstance(part, computed)}
        return replace(plan, tasks=tuple(tasks), cast=plan.cast | quantized, transposed=plan.transposed - quantized)


def _with_shared_scale(task: Task, scale: StoredTensor) -> Task:
    """Return the task for one tensor of an n-gram table, changed to write it in FP8 with the table's scale."""
    spec = task.target
    weights = SharedScaleSlice(tuple(task.slices), *scale_of(scale), 0, spec.numel)
    return replace(task, target=replace(spec, dtype=fp8.E4M3), slices=SliceList([weights]))


def scale_of(stored: StoredTensor) -> tuple[ByteRange, str]:
    """Return where scales are stored, and their dtype."""
    return ByteRange(stored.path, stored.offset, stored.spec.nbytes), stored.spec.dtype


def keep_scales(source: Path, target: Path) -> None:
    """Copy the FP8 scales of the model in `source` to the checkpoint's folder `target`, for a later export in FP8."""
    if (source / _KEPT_SCALES).is_file():
        shutil.copyfile(source / _KEPT_SCALES, target / _KEPT_SCALES)
    elif scales := [stored.spec for stored in read_kept_scales(source).values()]:
        tasks = [Task(spec, SliceList([TensorSlice(spec.name, 0, spec.numel)])) for spec in scales]
        file = plan_file(_KEPT_SCALES, tasks)
        with (target / _KEPT_SCALES).open("wb") as out, SliceReader(HFWeights(source, dequantize=False)) as reader:
            for content in file.contents:
                blocks = [content] if isinstance(content, bytes) else reader.read_blocks(content.slices, content.dtype)
                for block in blocks:
                    out.write(block)


def read_kept_scales(folder: Path) -> dict[str, StoredTensor]:
    """Return the FP8 scales in the folder of a model, or in the folder `hf` of a checkpoint, by tensor name."""
    if (folder / _KEPT_SCALES).is_file():
        return {stored.spec.name: stored for stored in read_header(folder / _KEPT_SCALES)}
    return HFWeights(folder).scales if has_weights(folder) else {}


def _expert_layout(name: str) -> tuple[str, bool]:
    """Return how the experts to which a tensor belongs are stored, given the tensor's name.

    Returns:
        The part of the name before the first dot ("model", or "mtp" for multi-token prediction), and whether each
        expert has its own tensors.
    """
    return name.partition(".")[0], re.search(r"\.experts\.\d+\.", name) is not None


def _module(name: str) -> str:
    """Return the name of the module that a tensor belongs to.

    For packed experts and other parameters without a module of their own, return the name of the tensor.
    """
    return name.removesuffix(".weight").removesuffix(".bias")
