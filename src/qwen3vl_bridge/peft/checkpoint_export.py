"""Export the adapters in a run's checkpoint: to a folder for `peft` and vLLM, or merged into a full model."""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from qwen3vl_bridge.checkpoint.commands import HFTarget
from qwen3vl_bridge.checkpoint.conversion import Conversion, ConversionOptions, ConversionReport, run_conversion
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, Task, check_vocab_padding, make_plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.huggingface import MAX_SHARD_BYTES, HFWeights, plan_file
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.checkpoint.formats.tensors import (
    ITEMSIZE,
    ByteRange,
    SliceList,
    SliceReader,
    TensorSource,
    TensorSpec,
    cast,
)
from qwen3vl_bridge.checkpoint.stored_models import StoredModel, check_same_model, open_model, open_stored
from qwen3vl_bridge.core.files import CheckpointError, absolute, expanded, write_object
from qwen3vl_bridge.peft.adapter_rows import (
    CONFIG,
    WEIGHTS,
    RankAndAlpha,
    adaptable_rows,
    adapter_config,
    adapter_names,
    adapter_row,
    layer_name,
)
from qwen3vl_bridge.peft.stored_adapters import StoredAdapters, open_adapters
from qwen3vl_bridge.weights.rows import (
    LINEAR_IN,
    LINEAR_OUT,
    MAGNITUDE,
    ExpertLayout,
    PackedExpert,
    TensorSlice,
    WeightRow,
)

import torch
from torch import Tensor

# Number of elements of a weight that are computed at a time.
_BLOCK = 1 << 22


def export_adapters(
    megatron_path: str | Path,
    hf_path: str | Path,
    *,
    base_model: str | Path | None = None,
    torch_dtype: str | None = None,
    iteration: int | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> ConversionReport:
    """Write the adapters of a run as a folder for `peft`, from a torch_dist or fsdp_dtensor checkpoint.

    Args:
        megatron_path: the run's folder, or the folder of an iteration.
        hf_path: the folder of adapters, to be created.
        base_model: folder or hub id of the base model; None for the model that the run names.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the adapters; None to keep their dtypes.
        trust_remote_code: whether the base model may contain code. It is never run here.

    Raises:
        CheckpointError: the checkpoint, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        stored = open_adapters(megatron_path, iteration, base_model, trust_remote_code=trust_remote_code)
        if trained := sorted(stored.base_tensors):
            raise CheckpointError(
                f"{stored.folder}: the run also trained {len(trained)} base tensors, such as {trained[0]}. "
                "A folder of adapters cannot store them; use `merge`, which writes a full model"
            )
        plan = stored.plan(torch_dtype)
        tasks = {task.target.name: task for task in plan.tasks}
        for layer in stored.layers():
            # The `linear_in` of a layer is the `lora_A` of each of its Hugging Face layers.
            first, *others = adapter_names(layer, LINEAR_IN)
            tasks |= {name: replace(tasks[first], target=replace(tasks[first].target, name=name)) for name in others}
        plan = replace(plan, tasks=tuple(tasks.values()))
        output = _AdapterOutput(plan, stored, str(base_model or stored.hf_model or stored.base))
        path, folders = absolute(hf_path), (stored.folder, stored.config.folder)
        return Conversion("export", str(megatron_path), path, plan, stored.tensors, folders, output, [])

    return run_conversion(planned, ConversionOptions(**options))


class _AdapterOutput:
    """The adapter folder that `export_adapters` writes. This class implements the protocol `conversion.Output`."""

    inner: ClassVar[str] = "."

    def __init__(self, plan: Plan, run: StoredAdapters, base_model: str) -> None:
        self._run, self._base_model = run, base_model
        self.files = [plan_file(WEIGHTS, plan.tasks)]
        self.settings = {"format": "peft", "from": run.ckpt_format, "base": base_model}

    def finish(self, root: Path, digest: str) -> None:
        adapted = (name for layer in self._run.layers() for name in layer.hf)
        tensors = (name for row in self._run.config.rows() for name in row.hf)
        settings = self._run.settings
        usual = RankAndAlpha(settings.dim, settings.alpha)
        write_object(root / CONFIG, adapter_config(usual, adapted, tensors, self._base_model, dora=settings.dora))

    def open(self, root: Path) -> HFWeights:
        return HFWeights(root, WEIGHTS)


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
    **options: Any,
) -> ConversionReport:
    """Write a full Hugging Face model: the base model with the adapters merged in.

    Base weights that the run has trained are taken from the run.

    Args:
        megatron_path: the run's folder, or the folder of an iteration.
        hf_path: the model's folder, to be created.
        base_model: folder or hub id of a Hugging Face model, or a Megatron checkpoint: the run's initial weights. None
            for the weights that the run names.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None for the dtypes of `base_model`.
        drop_vocab_padding: whether to drop embedding rows beyond the vocabulary that are not zero, as after training
            with a padded vocabulary; otherwise they are an error.
        trust_remote_code: whether `base_model` may contain code. It is never run here.

    Raises:
        CheckpointError: a checkpoint, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        run = open_adapters(megatron_path, iteration, base_model, trust_remote_code=trust_remote_code)
        base = _open_base(run, base_model, trust_remote_code=trust_remote_code)
        plan, source = _plan(run, base, torch_dtype)
        padding = _padding(run, base, drop=drop_vocab_padding)
        settings = {"from": run.ckpt_format, "base": str(base.folder)}
        output = HFTarget(base.config, base.experts, settings, max_shard_bytes)
        output.plan_files(plan)
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

    return run_conversion(planned, ConversionOptions(**options))


def _open_base(run: StoredAdapters, base_model: str | Path | None, *, trust_remote_code: bool) -> StoredModel:
    name = str(base_model or run.base)
    if not name:
        raise CheckpointError(
            f"{run.folder}: its run_config.yaml does not name the initial weights; set --base-model to them"
        )
    path = expanded(name)
    try:
        if megatron.is_megatron_checkpoint(path):
            base = open_stored(path)
        else:
            base = open_model(name, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        if base_model is None:
            raise CheckpointError(f"the run's initial weights: {error}; set --base-model to use others") from error
        raise
    check_same_model(base.config, run.config)
    return base


def _padding(run: StoredAdapters, base: StoredModel, *, drop: bool) -> list[str]:
    """Check that vocabulary padding in both checkpoints is zero, unless `drop` is True, and return notes on it."""
    trained, vocabulary = run.trained if run.base_tensors else set(), base.config.dimensions["vocab"]
    of_base = [row for row in base.rows if row.megatron not in trained]
    of_run = [row for row in base.rows if row.megatron in trained]
    return [
        *check_vocab_padding(base.tensors, of_base, base.layout, vocabulary, where=base.folder, drop=drop),
        *check_vocab_padding(run.tensors, of_run, run.layout(of_run), vocabulary, where=run.folder, drop=drop),
    ]


def _plan(run: StoredAdapters, base: StoredModel, dtype: str | None) -> tuple[Plan, TensorSource]:
    """Return the conversion plan of the merged model, and the `TensorSource` that the plan reads from."""
    target, rows = HuggingFace(base.config.dimensions), base.rows
    dtypes = dict(dtype=dtype, float32_as=base.float32_in_export(dtype))
    plan = make_plan(rows, base.layout, target, base.tensors.specs, where=str(base.folder), **dtypes)
    tasks = {task.target.name: task for task in plan.tasks}
    if trained_tensors := run.base_tensors:
        names = run.trained
        trained = [row for row in rows if row.megatron in names]
        for task in make_plan(trained, run.layout(trained), target, trained_tensors, where=str(run.folder)).tasks:
            cast_as = replace(task.target, dtype=tasks[task.target.name].target.dtype)
            tasks[cast_as.name] = replace(task, target=cast_as)
    merges: dict[str, list[MergedWeight]] = defaultdict(list)  # by tensor, in order
    for name, merge in _merged_weights(run, adaptable_rows(rows), tasks):
        merges[name].append(merge)
    for name, parts in merges.items():
        runs = (TensorSlice(merge.name, 0, merge.weight.target.numel) for merge in parts)
        tasks[name] = replace(tasks[name], slices=SliceList(runs))
    # A tensor in both checkpoints has been trained; the run is last, so it is read from there.
    source = MergedTensorSource((base.tensors, run.tensors), itertools.chain.from_iterable(merges.values()))
    return replace(plan, tasks=tuple(tasks.values())), source


def _merged_weights(
    run: StoredAdapters, weights: Iterator[WeightRow], tasks: dict[str, Task]
) -> Iterator[tuple[str, MergedWeight]]:
    """Yield (name of the Hugging Face tensor, weight with its adapter) for each adapted weight."""
    per_expert = ExpertLayout.PER_EXPERT  # so that each row of an adapter belongs to one expert
    adapters = {task.target.name: task for task in run.plan(experts=per_expert).tasks}
    settings = run.settings
    scale = settings.alpha / settings.dim
    layers = (row for row in weights if settings.adapts(layer_name(row)))
    for weight, layer in zip(layers, run.layers(per_expert), strict=True):
        rows = {kind: adapter_row(layer, kind, settings.dim) for kind in settings.kinds}
        parts = {kind: [adapters[name] for name in row.hf] for kind, row in rows.items()}
        a, *_ = parts[LINEAR_IN]
        if isinstance(weight, PackedExpert):
            packed = tasks[weight.hf[0]]
            spec = replace(packed.target, name=f"{weight.hf[0]}[{weight.expert}]", shape=packed.target.shape[1:])
            expert = Task(spec, SliceList(packed.slices.select(weight.expert * spec.numel, spec.numel)))
            yield (
                weight.hf[0],
                MergedWeight(expert, a, tuple(parts[LINEAR_OUT]), None, scale, transposed=weight.transposed),
            )
            continue
        for number, name in enumerate(weight.hf):
            magnitude = parts[MAGNITUDE][number] if settings.dora else None
            yield name, MergedWeight(tasks[name], a, (parts[LINEAR_OUT][number],), magnitude, scale)


@dataclass(frozen=True)
class MergedWeight:
    """A weight and its adapter, which are merged when the weight is read."""

    weight: Task  # [out, in], or [in, out] if transposed; its target is the merged weight
    a: Task  # [dim, in]
    b: tuple[Task, ...]  # [out, dim], possibly in several tensors of rows
    magnitude: Task | None  # [out] under DoRA
    scale: float
    transposed: bool = False

    @property
    def name(self) -> str:
        """Return the name of the merged weight in the conversion plan. The name contains the adapter's scale."""
        return f"{self.weight.target.name}, merged with {self.scale!r}"


class MergedTensorSource:
    """A `TensorSource` that combines the tensors of several sources with merged weights.

    If several sources contain a tensor of the same name, the last source is read. A merged weight is computed when it
    is read, and stored in an unnamed file until the next merged weight is read. Reading two merged weights in turn
    computes them repeatedly.
    """

    def __init__(self, sources: Sequence[TensorSource], merges: Iterable[MergedWeight]) -> None:
        self._sources = {name: source for source in sources for name in source.specs}
        self._merges = {merge.name: merge for merge in merges}
        self.specs: dict[str, TensorSpec] = {
            **{name: source.specs[name] for name, source in self._sources.items()},
            **{name: replace(merge.weight.target, name=name) for name, merge in self._merges.items()},
        }
        self.files: list[Path] = [path for source in sources for path in source.files]
        # A separate reader, because the caller's is in the middle of filling a buffer.
        self._reader = SliceReader(self)
        # One file for all weights: readers cache open files by path, and a second file might get the same path.
        self._file, self._latest = tempfile.TemporaryFile(), ""  # noqa: SIM115

    def byte_ranges(self, wanted: TensorSlice) -> Iterator[ByteRange]:
        """Yield the byte ranges that store the elements of a slice. First compute a merged weight and store it."""
        if wanted.tensor not in self._merges:
            yield from self._sources[wanted.tensor].byte_ranges(wanted)
            return
        if wanted.tensor != self._latest:
            self._latest = ""
            self._compute(self._merges[wanted.tensor])
            self._latest = wanted.tensor
        size = ITEMSIZE[self.specs[wanted.tensor].dtype]
        yield ByteRange(Path(f"/proc/self/fd/{self._file.fileno()}"), wanted.start * size, wanted.length * size)

    def _compute(self, merge: MergedWeight) -> None:
        target = merge.weight.target
        count, width = target.shape
        right, left = self._matrix(merge.a), torch.cat([self._matrix(part) for part in merge.b])
        if merge.transposed:
            left, right = right.t(), left.t()
        magnitude = None if merge.magnitude is None else self._matrix(merge.magnitude)
        self._file.seek(0)
        self._file.truncate()
        step = max(1, _BLOCK // width)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            slices = merge.weight.slices.select(start * width, (rows.stop - start) * width)
            weight = self._reader.read_elements(slices, "float32").view(-1, width)
            weight += merge.scale * (left[rows] @ right)
            if magnitude is not None:
                weight *= (magnitude[rows] / torch.linalg.norm(weight, dim=1))[:, None]
            data = memoryview(weight.view(torch.uint8).numpy()).cast("B")
            self._file.write(cast(data, "float32", target.dtype, target.name))
        self._file.flush()

    def _matrix(self, task: Task) -> Tensor:
        return self._reader.read_elements(task.slices, "float32").view(task.target.shape)
