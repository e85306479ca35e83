"""Verify and inspect: compare a checkpoint with its source bit for bit, and show what a checkpoint contains.

Inspecting reads headers and metadata only, and does not import numpy or torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import Task, find_naming, make_plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp import read_metadata
from qwen3vl_bridge.checkpoint.formats.huggingface import HUGGINGFACE, HFWeights, has_weights
from qwen3vl_bridge.checkpoint.formats.output_files import Progress, Ranks
from qwen3vl_bridge.checkpoint.formats.tensors import SliceList, SliceReader, TensorSource, TensorSpec, compare_streams
from qwen3vl_bridge.checkpoint.stored_models import (
    MANIFEST,
    ModelConfig,
    StoredModel,
    open_model,
    open_stored,
    own_config,
    read_manifest,
)
from qwen3vl_bridge.core.files import CheckpointError, expanded
from qwen3vl_bridge.weights import fp8
from qwen3vl_bridge.weights.rows import TensorSlice, WeightRow


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two checkpoints."""

    name: str  # in the Hugging Face model, if one side is a Hugging Face model
    elements: int | None  # number of elements that differ; None if only checksums were compared
    first: int | None  # row-major index of the first element that differs
    numel: int

    def __str__(self) -> str:
        if self.elements is None:
            return f"{self.name}: its {self.numel} elements have another checksum"
        return f"{self.name}: {self.elements} of {self.numel} elements differ, the first is number {self.first}"


@dataclass(frozen=True)
class VerifyReport:
    """The result of comparing a Megatron checkpoint with another checkpoint or with its checksums.

    Attributes:
        tensors: number of tensors compared.
        nbytes: number of bytes of these tensors, as the checkpoint stores them.
        differences: the tensors that differ.
        notes: information for the user.
    """

    tensors: int
    nbytes: int
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Return True if all compared tensors are equal."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict that can be written as JSON."""
        return {"same": self.same, **asdict(self)}


def compare_tensors(
    tasks: Iterable[Task], source: TensorSource, target: TensorSource, progress: Progress
) -> Iterator[Difference]:
    """Yield a `Difference` for each task whose tensor in `target` differs from the slices that it reads from `source`.

    Tensors are compared bit for bit, in the dtype of the task.
    """
    with SliceReader(source) as expected, SliceReader(target) as actual:
        for task in tasks:
            name, dtype, numel = task.target.name, task.target.dtype, task.target.numel
            stored = progress.count_blocks(actual.read_tensor(name, dtype))
            if found := compare_streams(expected.read_blocks(task.slices, dtype), stored, dtype):
                yield Difference(name, *found, numel)


def compute_checksums(names: Iterable[str], source: TensorSource, progress: Progress) -> dict[str, str]:
    """Return a dict from tensor name to the SHA-256 of the tensor's row-major, little-endian bytes as stored."""
    found = {}
    with SliceReader(source) as reader:
        for name in names:
            digest = hashlib.sha256()
            for block in progress.count_blocks(reader.read_tensor(name)):
                digest.update(block)
            found[name] = digest.hexdigest()
    return found


def verify_checkpoint(
    hf_model: str | Path,
    megatron_path: str | Path,
    *,
    iteration: int | None = None,
    drop_vocab_padding: bool = False,
    progress: bool = False,
    ranks: Ranks | None = None,
) -> VerifyReport:
    """Compare a checkpoint of either format with the model that it was imported from or exported to.

    If the checkpoint has another dtype, the model's weights are cast to it as in an import. So a checkpoint in float32
    that was exported to bfloat16 differs wherever the export rounded. Some norm weights are stored minus 1 on one side;
    they are equal if adding or subtracting 1, rounded once, gives the other side.

    Args:
        hf_model: the model's folder, or a hub id.
        megatron_path: the checkpoint's root folder or an iteration's folder.
        iteration: the iteration; None for the latest.
        drop_vocab_padding: whether the checkpoint's rows beyond the vocabulary may be other than zero.
        progress: whether to show progress on standard error.
        ranks: the processes that share the work. All of them must make the call with equal arguments.

    Raises:
        CheckpointError: one side is damaged, or the two sides are different models or have different tensors.
    """
    model = open_model(hf_model, trust_remote_code=True)  # no files are copied
    stored = open_stored(megatron_path, iteration, model.folder, trust_remote_code=True)
    return _compare_models(stored, model, model.rows, drop_vocab_padding, progress, ranks or Ranks())


def verify_reformatted(
    megatron_path: str | Path,
    new_path: str | Path,
    *,
    hf_model: str | Path | None = None,
    iteration: int | None = None,
    drop_vocab_padding: bool = False,
    progress: bool = False,
    ranks: Ranks | None = None,
) -> VerifyReport:
    """Compare a checkpoint with a second one that was made from it, in either format.

    The report uses the tensor names of the second checkpoint. See `verify_checkpoint` for arguments that are not listed
    here.

    Args:
        new_path: the second checkpoint's root folder or an iteration's folder.
        hf_model: folder or hub id of a model with the configuration; None for the first checkpoint's configuration.
        iteration: iteration of the first checkpoint; None for the latest.
        drop_vocab_padding: whether vocabulary rows that only the first checkpoint has may be other than zero.
    """
    source = open_stored(megatron_path, iteration, hf_model, trust_remote_code=True).with_padding()
    target = open_stored(new_path, None, hf_model or source.config.folder, trust_remote_code=True).with_padding()
    return _compare_models(source, target, source.config.rows(), drop_vocab_padding, progress, ranks or Ranks())


def _compare_models(
    source: StoredModel, target: StoredModel, rows: list[WeightRow], drop: bool, progress: bool, ranks: Ranks
) -> VerifyReport:
    """Convert `source` to the format of `target`, compare the tensors of both, and return the report.

    `rows` is the expanded weight table. With `drop`, vocabulary padding of the source may be other than zero.
    """
    specs = source.tensors.specs
    plan = make_plan(rows, source.layout, target.layout, specs, where=str(source.folder))
    # Both sides must be complete before a comparison means anything.
    make_plan(rows, target.layout, source.layout, target.tensors.specs, where=str(target.folder), dtype="float32")
    # If the target has more rows than the source, the plan compares them with zeros.
    padding = source.check_padding(target.config.dimensions["vocab"], drop=drop)
    tasks = plan.assign_tasks(ranks)

    def compare() -> list[Difference]:
        nbytes = sum(task.target.nbytes for task in tasks)
        with Progress("verify", nbytes, shown=progress and ranks.first) as meter:
            return list(compare_tensors(tasks, source.tensors, target.tensors, meter))

    found = [entry for part in ranks.all_gather(compare) for entry in part]
    # A target tensor that is a source tensor plus a number is also equal if subtracting the number gives the source.
    inverse: dict[str, Task] = {}
    for task in plan.tasks:
        match list(task.slices):
            case [TensorSlice(name, 0, length, added=number)] if number and length == specs[name].numel:
                slices = SliceList([TensorSlice(task.target.name, 0, length, added=-number)])
                inverse[task.target.name] = Task(specs[name], slices)
    meter = Progress("verify", 0, shown=False)
    different = [
        entry
        for entry in found
        if entry.name not in inverse
        or any(compare_tensors([inverse[entry.name]], target.tensors, source.tensors, meter))
    ]
    notes = (*padding, *source.notes, *target.notes)
    return VerifyReport(len(plan.tasks), sum(spec.nbytes for spec in specs.values()), tuple(different), notes)


def verify_checksums(
    megatron_path: str | Path, *, iteration: int | None = None, progress: bool = False, ranks: Ranks | None = None
) -> VerifyReport:
    """Compare a checkpoint with the checksums in its own manifest. See `verify_checkpoint` for the arguments.

    Raises:
        CheckpointError: the checkpoint is damaged, or was written without checksums.
    """
    stored, ranks = open_stored(megatron_path, iteration), ranks or Ranks()
    specs, expected = stored.tensors.specs, stored.manifest.get("sha256")
    if not isinstance(expected, dict) or expected.keys() != specs.keys():
        found = "no checksums" if not expected else "checksums of other tensors"
        raise CheckpointError(
            f"{stored.folder / MANIFEST} holds {found}, expected checksums of all {len(specs)} tensors; "
            "convert with --checksums to write them, or give --hf-model to compare the checkpoint with its source"
        )
    mine = ranks.assign(list(specs), [spec.nbytes for spec in specs.values()])

    def check() -> dict[str, str]:
        nbytes = sum(specs[name].nbytes for name in mine)
        with Progress("checksums", nbytes, shown=progress and ranks.first) as meter:
            return compute_checksums(mine, stored.tensors, meter)

    found = {name: value for part in ranks.all_gather(check) for name, value in part.items()}
    different = (Difference(name, None, None, specs[name].numel) for name in specs if found[name] != expected[name])
    return VerifyReport(len(specs), sum(spec.nbytes for spec in specs.values()), tuple(different))


def inspect_checkpoint(path: str | Path, *, iteration: int | None = None) -> dict[str, Any]:
    """Return a dict for JSON that describes a checkpoint: its format, model, sizes, dtypes and manifest.

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
    naming = find_naming(config.rows(), specs) if config and ckpt_format == megatron.FSDP_DTENSOR else None
    return {
        "format": ckpt_format,
        "path": str(folder),
        "model": config.raw.get("model_type") if config else None,
        "files": len(list(folder.glob("*.distcp"))),
        **_summarize(specs.values()),
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
    """Return a dict for JSON that describes the folder of a Hugging Face model: its format, model, sizes and dtypes.

    Raises:
        CheckpointError: the folder has no model, or a damaged one.
    """
    config, weights, experts = ModelConfig(folder), HFWeights(folder), None
    if config.dimensions.indices["moe_layers"]:
        shapes = {name: spec.shape for name, spec in weights.specs.items()}
        experts = config.for_tensors(shapes).expert_layout(shapes).name.lower()
    return {
        "format": HUGGINGFACE,
        "path": str(folder),
        "model": config.raw.get("model_type"),
        "files": len(weights.files),
        **_summarize(replace(spec, dtype=fp8.E4M3) if spec.scales else spec for spec in weights.specs.values()),
        "experts": experts,
    }


def _summarize(specs: Iterable[TensorSpec]) -> dict[str, Any]:
    specs = list(specs)
    return {
        "tensors": len(specs),
        "parameters": sum(spec.numel for spec in specs),
        "bytes": sum(spec.nbytes for spec in specs),
        "dtypes": dict(sorted(Counter(spec.dtype for spec in specs).items())),
    }
