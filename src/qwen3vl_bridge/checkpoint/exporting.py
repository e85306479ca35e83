"""Export: an fsdp_dtensor checkpoint becomes a Hugging Face model.

What lives here: the order of the steps, and what is written besides the tensors. What may not: how anything is done.
"""

from __future__ import annotations

import os
from pathlib import Path

from qwen3vl_bridge.checkpoint import megatron_folder as megatron
from qwen3vl_bridge.checkpoint import staging
from qwen3vl_bridge.checkpoint.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.hf_config import ModelConfig, with_dtype
from qwen3vl_bridge.checkpoint.hf_files import copy_side_files, find_model
from qwen3vl_bridge.checkpoint.hf_reader import HFWeights
from qwen3vl_bridge.checkpoint.hf_writer import MAX_SHARD_BYTES, Shard, layout, write_index, write_shard
from qwen3vl_bridge.checkpoint.json_files import write_object
from qwen3vl_bridge.checkpoint.plan import Plan, plan_export
from qwen3vl_bridge.checkpoint.progress import Progress
from qwen3vl_bridge.checkpoint.reports import ConversionReport
from qwen3vl_bridge.checkpoint.streams import RunReader

_OVERHEAD = 64 << 20


def export_checkpoint(
    megatron_path: str | Path,
    hf_path: str | Path,
    *,
    hf_model: str | Path | None = None,
    torch_dtype: str | None = None,
    iteration: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: bool = False,
    sync: bool = True,
) -> ConversionReport:
    """Write a Hugging Face model from an fsdp_dtensor checkpoint; optimizer state in it is left aside.

    Args:
        megatron_path: the checkpoint's root folder, or an iteration's folder.
        hf_path: the model's folder, to be made.
        hf_model: folder or hub id of a model whose configuration, tokenizer and processor to take; None for those
            that an import put into the checkpoint.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None to leave their bytes as they are.
        iteration: which iteration; None for the latest.
        max_shard_bytes: how large a file of weights may be.
        overwrite: whether to replace an earlier model at that place.
        dry_run: whether to stop before anything is written.
        progress: whether to show progress on standard error.
        sync: whether to wait until everything is on disk.

    Returns:
        What was done.

    Raises:
        CheckpointError: the source, the target or an option is not as it must be. Nothing is left behind.
    """
    target = Path(os.path.abspath(Path(hf_path).expanduser()))
    folder = megatron.find_iteration(Path(megatron_path).expanduser(), iteration)
    config = _config(folder, hf_model)
    metadata = read_metadata(folder)
    stored = DcpTensors(metadata, megatron.model_keys(metadata))
    plan = plan_export(config.rows, config.dimensions, stored.specs, where=str(folder), dtype=torch_dtype)
    staging.check_target(target, overwrite=overwrite, is_ours=_is_model, sources=(folder, config.folder))
    staging.check_space(target, plan.nbytes + _OVERHEAD)
    notes, seconds = _dropped_rows(plan, stored), 0.0
    if not dry_run:
        shards = layout([task.target for task in plan.tasks], max_shard_bytes)
        with staging.staged(target, notes.append, replace=overwrite, sync=sync) as work:
            seconds = _write(work, shards, plan, stored, config, progress=progress, sync=sync)
            _check_written(work, plan)
    return ConversionReport.of(megatron_path, target, plan, notes, seconds, dry_run=dry_run)


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file()


def _config(folder: Path, hf_model: str | Path | None) -> ModelConfig:
    if hf_model is not None:
        return ModelConfig(find_model(hf_model, weights=False))
    if not (folder / megatron.HF_FILES / "config.json").is_file():
        raise CheckpointError(f"{folder} has no {megatron.HF_FILES}/config.json; name the model with --hf-model")
    return ModelConfig(folder / megatron.HF_FILES)


def _dropped_rows(plan: Plan, stored: DcpTensors) -> list[str]:
    notes = []
    for task in plan.tasks:
        rows = stored.specs[task.runs[0].source].shape[:1]
        if len(task.runs) == 1 and rows > task.target.shape[:1]:
            dropped = rows[0] - task.target.shape[0]
            notes.append(f"{task.runs[0].source} has {dropped} rows beyond the vocabulary; they are padding, left out")
    return notes


def _write(
    work: Path,
    shards: tuple[Shard, ...],
    plan: Plan,
    stored: DcpTensors,
    config: ModelConfig,
    *,
    progress: bool,
    sync: bool,
) -> float:
    tasks = {task.target.name: task for task in plan.tasks}
    with RunReader(stored) as reader, Progress("export", plan.nbytes, shown=progress) as meter:
        for shard in shards:
            contents = (meter.counted(reader.blocks(tasks[spec.name].runs, spec.dtype)) for spec in shard.tensors)
            write_shard(work, shard, contents, sync=sync)
        seconds = meter.seconds
    write_index(work, shards)
    copy_side_files(config.folder, work)
    if len(plan.dtypes) == 1:
        raw = with_dtype(config.raw, plan.dtypes[0])
        if raw != config.raw:
            write_object(work / "config.json", raw)
    return seconds


def _check_written(work: Path, plan: Plan) -> None:
    """Read back the headers: every tensor is there, whole.

    Raises:
        CheckpointError: it is not so.
    """
    if HFWeights(work).specs != {task.target.name: task.target for task in plan.tasks}:
        raise CheckpointError(f"{work}: what is there is not what was to be written")
