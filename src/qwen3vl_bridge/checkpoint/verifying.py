"""Verify: whether a Megatron checkpoint is, bit for bit, what importing a Hugging Face model gives.

What lives here: the comparison, tensor by tensor, streaming. What may not: writing anything.
"""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.checkpoint import megatron_folder as megatron
from qwen3vl_bridge.checkpoint.compare import difference
from qwen3vl_bridge.checkpoint.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.hf_config import ModelConfig
from qwen3vl_bridge.checkpoint.hf_model import open_model
from qwen3vl_bridge.checkpoint.hf_reader import HFWeights
from qwen3vl_bridge.checkpoint.plan import plan_export, plan_import
from qwen3vl_bridge.checkpoint.progress import Progress
from qwen3vl_bridge.checkpoint.reports import Difference, VerifyReport
from qwen3vl_bridge.checkpoint.streams import RunReader
from qwen3vl_bridge.checkpoint.tensors import Run


def verify_checkpoint(
    hf_model: str | Path, megatron_path: str | Path, *, iteration: int | None = None, progress: bool = False
) -> VerifyReport:
    """Compare a checkpoint with the model it was imported from, or exported to.

    Where the checkpoint has another dtype, the model's weights are cast to it as an import would. So a checkpoint in
    float32 that was exported to bfloat16 counts as different wherever that export rounded.

    Args:
        hf_model: the model's folder, or a hub id.
        megatron_path: the checkpoint's root folder or an iteration's folder.
        iteration: which iteration; None for the latest.
        progress: whether to show progress on standard error.

    Returns:
        What differs.

    Raises:
        CheckpointError: one of them is damaged, or they do not even have the same tensors.
    """
    folder = megatron.find_iteration(Path(megatron_path).expanduser(), iteration)
    metadata = read_metadata(folder)
    stored = DcpTensors(metadata, megatron.model_keys(metadata))
    model = open_model(hf_model)
    # Both sides must be complete before a comparison means anything.
    plan_import(
        model.config.rows, model.config.dimensions, model.weights.specs, where=str(model.folder), dtype="float32"
    )
    differences = compare_all(model.weights, stored, model.config, progress=progress)
    nbytes = sum(spec.nbytes for spec in stored.specs.values())
    return VerifyReport(len(model.weights.specs), nbytes, tuple(differences), tuple(model.notes))


def compare_all(
    weights: HFWeights, stored: DcpTensors, config: ModelConfig, *, progress: bool = False
) -> list[Difference]:
    """The Hugging Face tensors that differ from what a checkpoint stores.

    Args:
        weights: the model's tensors.
        stored: the checkpoint's.
        config: the model's.
        progress: whether to show progress on standard error.
    """
    plan = plan_export(config.rows, config.dimensions, stored.specs, where=str(stored.folder))
    found = []
    with (
        RunReader(weights) as ours,
        RunReader(stored) as theirs,
        Progress("verify", plan.nbytes, shown=progress) as meter,
    ):
        for task in plan.tasks:
            name, dtype, numel = task.target.name, task.target.dtype, task.target.numel
            one = ours.blocks([Run(name, 0, numel)], dtype)
            other = meter.counted(theirs.blocks(task.runs, dtype))
            found.append(difference(name, numel, dtype, one, other))
    return [entry for entry in found if entry is not None]
