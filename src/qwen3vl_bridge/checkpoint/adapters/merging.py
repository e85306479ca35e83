"""Merges a run's adapters into their base model, and writes a Hugging Face model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from qwen3vl_bridge.checkpoint.adapters.merged_tensors import JoinedTensors, Merge, MergedTensors, prefixed
from qwen3vl_bridge.checkpoint.adapters.stored_adapters import StoredAdapters, open_adapters
from qwen3vl_bridge.checkpoint.conversion import Conversion, ConversionOptions, ConversionReport, run_conversion
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, Task, check_vocab_padding, make_plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.huggingface import MAX_SHARD_BYTES
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.checkpoint.formats.tensors import Segments, Slice, TensorSource
from qwen3vl_bridge.checkpoint.stored_models import StoredModel, check_same_model, open_model, open_stored
from qwen3vl_bridge.checkpoint.targets import HFOutput
from qwen3vl_bridge.io.files import CheckpointError, absolute, expanded
from qwen3vl_bridge.weights.adapter_rows import IN, MAGNITUDE, OUT, adapter_row, layer_of, linear_rows
from qwen3vl_bridge.weights.expert_layout import ExpertLayout
from qwen3vl_bridge.weights.rows import PackedExpert, Row

_BASE, _RUN = "base/", "run/"


def merge_adapters(
    megatron_path: str | Path,
    hf_path: str | Path,
    *,
    base_model: str | Path | None = None,
    torch_dtype: str | None = None,
    iteration: int | None = None,
    drop_vocab_padding: bool = False,
    trust_remote_code: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **options: Unpack[ConversionOptions],
) -> ConversionReport:
    """Write a whole Hugging Face model: the base model, with the adapters merged in.

    Weights of the model that the run has trained are included.

    Args:
        megatron_path: the run's folder, or an iteration's.
        hf_path: the model's folder, to be created.
        base_model: folder or hub id of a Hugging Face model, or a Megatron checkpoint: the run's initial weights. None
            for those that it names itself.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None for the dtypes of `base_model`.
        iteration: the iteration; None for the latest.
        drop_vocab_padding: whether to drop rows beyond the vocabulary that are not zero, as after training with a
            padded vocabulary; otherwise they are an error.
        trust_remote_code: whether `base_model` may contain code. It is never run here.
        max_shard_bytes: maximum size of a weight file.
        options: overwrite, resume, verify and more, see `ConversionOptions`.

    Returns:
        A report of the conversion.

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        run = open_adapters(megatron_path, iteration, base_model, trust_remote_code=trust_remote_code)
        base = _open_base(run, base_model, trust_remote_code=trust_remote_code)
        plan, source = _plan(run, base, torch_dtype)
        padding = _padding(run, base, drop=drop_vocab_padding)
        output = HFOutput(plan, base.config, {"from": run.ckpt_format, "base": str(base.folder)}, max_shard_bytes)
        return Conversion(
            name="merge",
            origin=str(megatron_path),
            target=absolute(hf_path),
            plan=plan,
            source=source,
            folders=(run.folder, base.folder),
            output=output,
            notes=[*base.notes, *padding],
            threads=1,  # merged weights are computed one at a time
        )

    return run_conversion(planned, options)


def _open_base(run: StoredAdapters, base_model: str | Path | None, *, trust_remote_code: bool) -> StoredModel:
    name = str(base_model or run.base)
    if not name:
        raise CheckpointError(
            f"{run.folder}: its run_config.yaml names no initial weights; name them with --base-model"
        )
    path = expanded(name)
    try:
        if megatron.is_megatron_checkpoint(path):
            base = open_stored(path)
        else:
            base = open_model(name, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        if base_model is None:
            raise CheckpointError(f"the run's initial weights: {error}; give --base-model to name others") from error
        raise
    check_same_model(base.config, run.config)
    return base


def _padding(run: StoredAdapters, base: StoredModel, *, drop: bool) -> list[str]:
    """Notes on rows beyond the vocabulary, for all sources of the kept rows."""
    rows, names, notes = base.rows, run.trained if run.own else set(), []
    for part, layout, source, where in (
        ([row for row in rows if row.megatron not in names], base.layout, base.tensors, base.folder),
        ([row for row in rows if row.megatron in names], None, run.tensors, run.folder),
    ):
        layout, vocabulary = layout or run.layout(part), base.config.dimensions["vocab"]
        notes += check_vocab_padding(source, part, layout, vocabulary, where=where, drop=drop)
    return notes


def _plan(run: StoredAdapters, base: StoredModel, dtype: str | None) -> tuple[Plan, TensorSource]:
    """Every tensor of the model: from the base, trained by the run, or merged from a weight and its adapter."""
    target, rows = HuggingFace(base.config.dimensions), base.rows
    dtypes = dict(dtype=dtype, float32_as=base.float32_in_export(dtype))
    plan = make_plan(rows, base.layout, target, base.tensors.specs, where=str(base.folder), **dtypes)
    tasks = {task.target.name: prefixed(task, _BASE) for task in plan.tasks}
    if own := run.own:
        names = run.trained
        trained = [row for row in rows if row.megatron in names]
        for task in make_plan(trained, run.layout(trained), target, own, where=str(run.folder)).tasks:
            cast = replace(task.target, dtype=tasks[task.target.name].target.dtype)
            tasks[cast.name] = prefixed(replace(task, target=cast), _RUN)
    merges: dict[str, list[Merge]] = defaultdict(list)  # by tensor, in order
    for name, merge in _merges(run, linear_rows(rows), tasks):
        merges[name].append(merge)
    for name, parts in merges.items():
        runs = (Slice(merge.name, 0, merge.weight.target.numel) for merge in parts)
        tasks[name] = replace(tasks[name], segments=Segments(runs))
    joined = JoinedTensors({_BASE: base.tensors, _RUN: run.tensors})
    source = MergedTensors(joined, itertools.chain.from_iterable(merges.values()))
    return replace(plan, tasks=tuple(tasks.values())), source


def _merges(run: StoredAdapters, weights: Iterator[Row], tasks: dict[str, Task]) -> Iterator[tuple[str, Merge]]:
    """Weights and their adapters; every adapter is used."""
    each = ExpertLayout.PER_EXPERT  # in which each row of an adapter belongs to one expert
    adapters = {task.target.name: prefixed(task, _RUN) for task in run.plan(experts=each).tasks}
    used: set[str] = set()
    settings = run.settings
    layers = (row for row in weights if settings.adapts(layer_of(row)))
    for weight, layer in zip(layers, run.layers(each), strict=True):
        names = {kind: adapter_row(layer, kind, settings.dim).hf for kind in settings.kinds}
        found = {kind: [adapters[name] for name in those] for kind, those in names.items()}
        used.update(task.target.name for parts in found.values() for task in parts)
        scale = settings.alpha / settings.dim
        if isinstance(weight, PackedExpert):
            name = weight.hf[0]
            one, (a,) = _expert(tasks[name], weight), found[IN]
            yield name, Merge(one, a, tuple(found[OUT]), None, scale, transposed=weight.transposed)
            continue
        for number, name in enumerate(weight.hf):
            magnitude = found[MAGNITUDE][number] if settings.dora else None
            yield name, Merge(tasks[name], found[IN][0], (found[OUT][number],), magnitude, scale)
    if used != adapters.keys():
        raise AssertionError(f"adapters without a weight to merge into: {sorted(adapters.keys() ^ used)[:4]}")


def _expert(packed: Task, row: PackedExpert) -> Task:
    """One expert of a tensor that contains all of a layer."""
    shape = packed.target.shape[1:]
    target = replace(packed.target, name=f"{packed.target.name}[{row.expert}]", shape=shape)
    return Task(target, Segments(packed.segments.cut(row.expert * target.numel, target.numel)))
