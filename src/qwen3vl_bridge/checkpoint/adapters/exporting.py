"""Exports a run's adapters as a folder that `peft.PeftModel.from_pretrained` and vLLM can load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from qwen3vl_bridge.checkpoint.adapters.stored_adapters import StoredAdapters, open_adapters
from qwen3vl_bridge.checkpoint.conversion import Conversion, ConversionOptions, ConversionReport, run_conversion
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, Task
from qwen3vl_bridge.checkpoint.formats.huggingface import HFWeights, one_file
from qwen3vl_bridge.io.files import CheckpointError, absolute, write_object
from qwen3vl_bridge.weights.adapter_rows import Scaled, adapter_config, hf_targets, input_names

# With the names of `peft`.
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapters(
    megatron_path: str | Path,
    hf_path: str | Path,
    *,
    base_model: str | Path | None = None,
    torch_dtype: str | None = None,
    iteration: int | None = None,
    trust_remote_code: bool = False,
    **options: Unpack[ConversionOptions],
) -> ConversionReport:
    """Write the adapters of a run, from its checkpoint of either format.

    Args:
        megatron_path: the run's folder, or an iteration's.
        hf_path: the folder of adapters, to be created.
        base_model: folder or hub id of their base model; None for the one that the run names.
        torch_dtype: "float32", "float16" or "bfloat16" to cast them; None to keep their dtypes.
        iteration: the iteration; None for the latest.
        trust_remote_code: whether that model may contain code. It is never run here.
        options: overwrite, resume, verify and more, see `ConversionOptions`.

    Returns:
        A report of the conversion.

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        stored = open_adapters(megatron_path, iteration, base_model, trust_remote_code=trust_remote_code)
        if own := sorted(stored.own):
            raise CheckpointError(
                f"{stored.folder}: the run also trained {len(own)} tensors of the base model, such as {own[0]}, "
                "which a folder of adapters cannot store; `merge` makes a whole model"
            )
        plan = stored.plan(torch_dtype)
        plan = replace(plan, tasks=(*plan.tasks, *_shared_inputs(stored, plan)))
        output = _AdapterOutput(plan, stored, str(base_model or stored.hf_model or stored.base))
        path, folders = absolute(hf_path), (stored.folder, stored.config.folder)
        return Conversion("export", str(megatron_path), path, plan, stored.tensors, folders, output, [])

    return run_conversion(planned, options)


class _AdapterOutput:
    """The output folder of adapters."""

    inner = "."

    def __init__(self, plan: Plan, run: StoredAdapters, base_model: str) -> None:
        self._run, self._base_model = run, base_model
        self.files = [one_file(WEIGHTS, plan.tasks)]
        self.settings = {"format": "peft", "from": run.ckpt_format, "base": base_model}

    def finish(self, root: Path, digest: str) -> None:
        tensors = (name for row in self._run.config.rows() for name in row.hf)
        adapted = (name for layer in self._run.layers() for name in layer.hf)
        its = self._run.settings
        scaled, targets = Scaled(its.dim, its.alpha), hf_targets(adapted, tensors)
        write_object(root / CONFIG, adapter_config(scaled, targets, self._base_model, dora=its.dora))

    def open(self, root: Path) -> HFWeights:
        return HFWeights(root, WEIGHTS)


def _shared_inputs(stored: StoredAdapters, plan: Plan) -> Iterator[Task]:
    """A layer that is several in Hugging Face has one `linear_in`, which is equal to the `lora_A` of each of them."""
    tasks = {task.target.name: task for task in plan.tasks}
    for layer in stored.layers():
        first, *others = input_names(layer)
        for name in others:
            yield replace(tasks[first], target=replace(tasks[first].target, name=name))
