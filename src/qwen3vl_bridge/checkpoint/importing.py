"""Import: a Hugging Face model becomes an fsdp_dtensor checkpoint.

What lives here: the order of the steps, and what is written besides the tensors. What may not: how anything is done.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.checkpoint import megatron_folder as megatron
from qwen3vl_bridge.checkpoint import staging
from qwen3vl_bridge.checkpoint.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.hf_files import copy_side_files
from qwen3vl_bridge.checkpoint.hf_model import HFModel, open_model
from qwen3vl_bridge.checkpoint.json_files import write_object
from qwen3vl_bridge.checkpoint.plan import Plan, Task, plan_import
from qwen3vl_bridge.checkpoint.progress import Progress
from qwen3vl_bridge.checkpoint.reports import ConversionReport
from qwen3vl_bridge.checkpoint.run_config import run_config
from qwen3vl_bridge.checkpoint.spans import TRANSFORMER_ENGINE
from qwen3vl_bridge.checkpoint.streams import RunReader
from qwen3vl_bridge.checkpoint.tensors import TensorSpec, slice_runs
from qwen3vl_bridge.checkpoint.topology import Topology
from qwen3vl_bridge.checkpoint.verifying import compare_all

if TYPE_CHECKING:
    from qwen3vl_bridge.checkpoint.dcp_writer import DcpWriter

# An item's archive takes 1.6 kB around its tensor; this leaves room for the files beside the tensors too.
_OVERHEAD_PER_CHUNK, _OVERHEAD = 4096, 64 << 20


def import_checkpoint(
    hf_model: str | Path,
    megatron_path: str | Path,
    *,
    torch_dtype: str | None = None,
    topology: Topology | None = None,
    naming: str = TRANSFORMER_ENGINE,
    overwrite: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    progress: bool = False,
    sync: bool = True,
) -> ConversionReport:
    """Write an fsdp_dtensor checkpoint from a Hugging Face model.

    Args:
        hf_model: its folder, or a hub id.
        megatron_path: the checkpoint's root folder, to be made.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None to leave their bytes as they are.
        topology: parallel sizes the checkpoint is meant for; it loads at any other too.
        naming: layer spec whose parameter names to use, "transformer_engine" or "local".
        overwrite: whether to replace an earlier checkpoint at that place.
        verify: whether to compare what was written with the source, bit for bit, before it is put into place.
        dry_run: whether to stop before anything is written.
        progress: whether to show progress on standard error.
        sync: whether to wait until everything is on disk.

    Returns:
        What was done.

    Raises:
        CheckpointError: the source, the target or an option is not as it must be. Nothing is left behind.
    """
    target = Path(os.path.abspath(Path(megatron_path).expanduser()))
    topology = topology or Topology()
    model = open_model(hf_model)
    topology.check(model.config.dimensions)
    plan = plan_import(
        model.config.rows,
        model.config.dimensions,
        model.weights.specs,
        where=str(model.folder),
        dtype=torch_dtype,
        naming=naming,
    )
    staging.check_target(target, overwrite=overwrite, is_ours=megatron.is_megatron_checkpoint, sources=(model.folder,))
    chunks = sum(1 for task in plan.tasks for _ in topology.chunks(task.target))
    staging.check_space(target, plan.nbytes + chunks * _OVERHEAD_PER_CHUNK + _OVERHEAD)
    notes, seconds = list(model.notes), 0.0
    if not dry_run:
        with staging.staged(target, notes.append, replace=overwrite, sync=sync) as root:
            seconds = _write(root, str(hf_model), model, plan, topology, progress=progress, sync=sync)
            _check_written(megatron.iteration_folder(root, 0), plan, model, verify=verify, progress=progress)
    return ConversionReport.of(hf_model, target, plan, notes, seconds, dry_run=dry_run)


def _write(
    root: Path, hf_model: str, model: HFModel, plan: Plan, topology: Topology, *, progress: bool, sync: bool
) -> float:
    from qwen3vl_bridge.checkpoint.dcp_writer import DcpWriter, write_metadata

    folder = megatron.iteration_folder(root, 0)
    folder.mkdir()
    with Progress("import", plan.nbytes, shown=progress) as meter:
        with DcpWriter(folder, sync=sync) as writer, RunReader(model.weights) as reader:
            for task in plan.tasks:
                _write_task(writer, reader, task, topology, meter)
            for key, value in megatron.BYTE_ITEMS.items():
                writer.write_bytes(key, value)
        seconds = meter.seconds
    paths = {megatron.key_of(task.target.name): megatron.path_of(task.target.name) for task in plan.tasks}
    write_metadata(folder, [writer.part], paths)
    copy_side_files(model.folder, folder / megatron.HF_FILES)
    write_object(folder / megatron.MANIFEST, _manifest(hf_model, plan, topology))
    megatron.write_run_files(root, folder, run_config(model.config.raw, hf_model))
    return seconds


def _write_task(writer: DcpWriter, reader: RunReader, task: Task, topology: Topology, meter: Progress) -> None:
    spec = TensorSpec(megatron.key_of(task.target.name), task.target.dtype, task.target.shape)
    position = 0
    for offsets, sizes in topology.chunks(spec):
        chunk = TensorSpec(spec.name, spec.dtype, sizes)
        blocks = reader.blocks(slice_runs(task.runs, position, chunk.numel), spec.dtype)
        writer.write_chunk(spec, offsets, sizes, meter.counted(blocks))
        position += chunk.numel


def _manifest(hf_model: str, plan: Plan, topology: Topology) -> dict[str, Any]:
    try:
        version = metadata.version("qwen3vl-bridge")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "tool": "qwen3vl_bridge",
        "version": version,
        "source": hf_model,
        "format": "fsdp_dtensor",
        "layer_spec": plan.naming,
        "dtypes": plan.dtypes,
        "tensors": len(plan.tasks),
        "parameters": plan.numel,
        "bytes": plan.nbytes,
        "topology": asdict(topology),
    }


def _check_written(folder: Path, plan: Plan, model: HFModel, *, verify: bool, progress: bool) -> None:
    """Read back what was written: every tensor is there, whole, and where the metadata says.

    Raises:
        CheckpointError: it is not so.
    """
    found = read_metadata(folder)
    tensors = DcpTensors(found, megatron.model_keys(found))
    wanted = {task.target.name: task.target for task in plan.tasks}
    if tensors.specs != wanted or set(found.byte_items) != set(megatron.BYTE_ITEMS):
        raise CheckpointError(f"{folder}: what is there is not what was to be written")
    tensors.check_items()
    if verify:
        differences = compare_all(model.weights, tensors, model.config, progress=progress)
        if differences:
            raise CheckpointError(f"{folder}: was not written as it should be: {differences[0]}")
