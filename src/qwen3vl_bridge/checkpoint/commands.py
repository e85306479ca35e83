"""Import, export and reformat checkpoints. Each command opens the source, and plans all files of the target."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from qwen3vl_bridge.checkpoint.conversion import Conversion, ConversionOptions, ConversionReport, run_conversion
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, drop_unexpected, make_plan, tensors_of
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp import DcpTensors, DcpWriter, read_metadata
from qwen3vl_bridge.checkpoint.formats.huggingface import (
    HUGGINGFACE,
    MAX_SHARD_BYTES,
    HFWeights,
    copy_side_files,
    plan_file,
    split_into_shards,
    write_index,
)
from qwen3vl_bridge.checkpoint.formats.layouts import (
    TRANSFORMER_ENGINE,
    FsdpDtensor,
    HuggingFace,
    Topology,
    TorchDist,
    find_row_owners,
)
from qwen3vl_bridge.checkpoint.formats.output_files import OutputFile, Task
from qwen3vl_bridge.checkpoint.formats.tensors import (
    ConstantSlice,
    SharedScaleSlice,
    SliceList,
    TensorSpec,
    main_dtype,
)
from qwen3vl_bridge.checkpoint.fp8_export import QUANTIZATION, Fp8Export, keep_scales
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, StoredModel, open_model, open_stored
from qwen3vl_bridge.core.files import CheckpointError, absolute
from qwen3vl_bridge.weights.fp8 import E4M3
from qwen3vl_bridge.weights.rows import ExpertLayout, WeightRow

# Modules that store an `_extra_state` in addition to their weights. megatron-core requires it on loading; conversions
# write None. Linear layers have it in both layer specs, norms only in Transformer Engine's.
_LINEAR = re.compile(r"linear_(qkv|proj|fc1|fc2)|(in|out|eh)_proj")
_NORM = re.compile(r"(\w+_layernorm|patch_norm|out_norm|enorm|hnorm)")


@dataclass
class HFTarget:
    """A Hugging Face model that a conversion writes. After a call of `plan_files` it is a `conversion.Output`."""

    config: ModelConfig
    experts: ExpertLayout
    settings: dict[str, Any]  # for the manifest
    max_shard_bytes: int  # maximum size of a weight file
    float32_as: str | None = None  # dtype of parameters that Megatron keeps in float32; None: as the other parameters
    fp8: Fp8Export | None = None  # None to write no FP8
    inner: ClassVar[str] = "."

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes is {self.max_shard_bytes}, expected 1 or more")
        self.settings = {"format": HUGGINGFACE} | self.settings
        self.layout = HuggingFace(self.config.dimensions)

    def complete(self, plan: Plan) -> Plan:
        """Return a plan that also writes the constants of the model, and that writes weights in FP8 if `fp8` is set."""
        constants = self.config.family.constants(self.config.raw)
        tasks = (
            Task(TensorSpec(name, "int64", (len(values),)), SliceList([ConstantSlice(values)]))
            for name, values in constants.items()
        )
        plan = replace(plan, tasks=(*plan.tasks, *tasks))
        return self.fp8.quantize(plan) if self.fp8 else plan

    def plan_files(self, plan: Plan) -> None:
        """Divide the tensors of a plan into safetensors files."""
        self._shards = split_into_shards(plan.tasks, self.max_shard_bytes)
        self.files = [plan_file(name, tasks) for name, tasks in self._shards.items()]

    def finish(self, root: Path, digest: str) -> None:
        """Write the files without weights: the index, the configuration, and the tokenizer and processor."""
        write_index(root, self._shards)
        copy_side_files(self.config.folder, root)
        tasks = [task for tasks in self._shards.values() for task in tasks]
        dtype = main_dtype(task.target for task in tasks if task.target.dtype != E4M3)
        table = any(isinstance(part, SharedScaleSlice) for task in tasks for part in task.slices)
        self.config.write(root, dtype, self.fp8 and self.fp8.quantization, has_fp8_table=table)

    def open(self, root: Path) -> HFWeights:
        """Open the written weights. FP8 weights are not multiplied by their scales."""
        return HFWeights(root, dequantize=False)


@dataclass
class MegatronTarget:
    """A Megatron checkpoint that a conversion writes. After a call of `plan_files` it is a `conversion.Output`."""

    ckpt_format: str  # "fsdp_dtensor" or "torch_dist"
    naming: str  # layer spec of the parameter names, "transformer_engine" or "local"
    topology: Topology  # parallel layout that the chunks are made for
    config: ModelConfig
    hf_model: str  # folder or hub id that the configuration comes from
    experts: ExpertLayout  # how the Hugging Face model stores experts, for a later export
    vocab_divisor: int | None = None  # each tensor-parallel rank's vocabulary rows are padded to a multiple of it
    float32_of_hf: str | None = None  # dtype in the Hugging Face model of the parameters that Megatron keeps in float32
    inner: ClassVar[str] = megatron.iteration_folder(Path(), 0).name
    float32_as: ClassVar = "float32"

    def __post_init__(self) -> None:
        """Raise CheckpointError if the options contradict each other or do not fit the model."""
        self.dimensions, divisor = self.config.dimensions, self.vocab_divisor
        vocabulary = self.dimensions["vocab"]
        if self.ckpt_format not in megatron.FORMATS:
            raise CheckpointError(f"ckpt_format is {self.ckpt_format!r}, expected {' or '.join(megatron.FORMATS)}")
        if divisor is not None and not 1 <= divisor <= vocabulary:
            raise CheckpointError(
                f"--make-vocab-size-divisible-by is {divisor}, expected 1 to {vocabulary}, the vocabulary size"
            )
        if divisor is not None:
            step = divisor * self.topology.tp
            self.dimensions = self.dimensions.with_vocab(-(-vocabulary // step) * step)
        self.topology.check(self.dimensions, stages=self.ckpt_format == megatron.TORCH_DIST)
        by_parameter = FsdpDtensor(self.dimensions, self.naming)  # raises an error for an unknown naming
        is_torch_dist = self.ckpt_format == megatron.TORCH_DIST
        self.layout = TorchDist.for_model(self.dimensions) if is_torch_dist else by_parameter

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that are recorded in the manifest."""
        return {
            "format": self.ckpt_format,
            "layer_spec": self.naming,
            "hf_model": self.hf_model,
            "expert_layout": self.experts.name if self.dimensions.indices["moe_layers"] else None,
            "float32_as": self.float32_of_hf,
            "vocab_divisor": self.vocab_divisor,
            "topology": asdict(self.topology),
        }

    @property
    def files(self) -> list[OutputFile]:
        """Return the planned files that contain tensors."""
        return self.dcp.files

    def plan_files(self, plan: Plan) -> None:
        """Plan the files with tensors, and the other items that a loader needs."""
        self.dcp = DcpWriter()
        owned, chunks = find_row_owners(self.config.rows(), self.layout, self.topology), []
        for task in plan.tasks:
            name, position = task.target.name, 0
            spec = replace(task.target, name=megatron.key_of(name, self.ckpt_format))
            for owner, offsets, sizes in self.topology.split_into_chunks(spec, task.leading, owned.get(name)):
                chunks.append((owner, spec, offsets, sizes, task.slices, position))
                position += math.prod(sizes)
        # The chunks that one rank reads are stored together, in few files.
        for _, *chunk in sorted(chunks, key=itemgetter(0)):
            self.dcp.add_chunk(*chunk)
        items = megatron.BYTE_ITEMS
        if isinstance(self.layout, TorchDist):
            with_norms = self.naming == TRANSFORMER_ENGINE
            states = _extra_states(self.config.rows(), self.layout, with_norms=with_norms)
            items = dict([megatron.COMMON_STATE]) | {key: [None] for key in states}
        for key, value in items.items():
            self.dcp.add_bytes(key, value)

    def finish(self, root: Path, digest: str) -> None:
        """Write all files that contain no tensors, except the manifest."""
        folder, config = megatron.iteration_folder(root, 0), self.config
        self.dcp.write_metadata(folder, megatron.path_of, digest)
        copy_side_files(config.folder, folder / megatron.HF_FILES)
        config.write(folder / megatron.HF_FILES)
        if config.raw.get(QUANTIZATION) is not None:
            keep_scales(config.folder, folder / megatron.HF_FILES)
        contents = megatron.run_config(
            config.raw,
            self.hf_model,
            self.ckpt_format,
            provider=config.family.provider_target,
            vocabulary=config.vocabulary,
            rows=self.dimensions["vocab"],
            vocab_divisor=self.vocab_divisor,
        )
        megatron.write_run_files(root, folder, contents, self.ckpt_format)

    def open(self, root: Path) -> DcpTensors:
        """Open the tensors of the written checkpoint `root`.

        Raises:
            CheckpointError: the metadata of the checkpoint lists other items than `plan_files` has planned.
        """
        metadata = read_metadata(megatron.iteration_folder(root, 0))
        if set(metadata.byte_items) != set(self.dcp.byte_items):
            raise CheckpointError(
                f"{metadata.folder}: .metadata lists other items than this conversion writes; run the conversion again"
            )
        return DcpTensors(metadata, megatron.model_keys(metadata, self.ckpt_format))


def _extra_states(rows: Collection[WeightRow], layout: TorchDist, *, with_norms: bool) -> Iterable[str]:
    """Return the keys of the `_extra_state` items that megatron-core stores in addition to the weights.

    Source: megatron-core 0.19, `make_sharded_tensors_for_checkpoint` and the modules' own `_extra_state`.
    """
    keys: dict[str, None] = {}
    for row in rows:
        if row.replicated:  # a plain torch module
            continue
        name, stacked = layout.name(row)
        module = name.rpartition(".")[0]
        last = module.rpartition(".")[2]
        if _LINEAR.fullmatch(last) or (with_norms and _NORM.fullmatch(last)):
            numbers, counts = zip(*stacked or ((0, 1),), strict=True)
            shard = "_".join(".".join(map(str, values)) for values in (numbers, counts))
            keys[f"{module}._extra_state/shard_{shard}"] = None
    return keys


def import_checkpoint(
    hf_model: str | Path,
    megatron_path: str | Path,
    *,
    ckpt_format: str = megatron.FSDP_DTENSOR,
    torch_dtype: str | None = None,
    topology: Topology | None = None,
    naming: str = TRANSFORMER_ENGINE,
    vocab_divisor: int | None = None,
    strict: bool = True,
    trust_remote_code: bool = False,
    **options: Any,
) -> ConversionReport:
    """Write a Megatron checkpoint from a Hugging Face model.

    Args:
        hf_model: folder or hub id of the Hugging Face model.
        megatron_path: root folder of the checkpoint, to be created.
        ckpt_format: "fsdp_dtensor" or "torch_dist".
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None to keep their dtypes.
        topology: parallel layout that the files are made for. The checkpoint can be loaded with any other.
        naming: layer spec of parameter names, "transformer_engine" or "local".
        vocab_divisor: pad the vocabulary to a multiple of this number times the tensor-parallel size, as Megatron does
            with `make_vocab_size_divisible_by`; None for no padding. A model can load an fsdp_dtensor checkpoint only
            if both have the same number of rows.
        strict: whether tensors that the model does not have are an error; otherwise they are ignored.
        trust_remote_code: whether to copy code that the model's configuration refers to. It is never run here.
        options: fields of `ConversionOptions`: overwrite, resume, verify, ...

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def make_conversion() -> Conversion:
        model = open_model(hf_model, strict=strict, trust_remote_code=trust_remote_code)
        origin, experts = str(hf_model), model.experts
        target = MegatronTarget(
            *(ckpt_format, naming, topology or Topology(), model.config, origin, experts, vocab_divisor),
            model.float32_as,
        )
        return _plan_conversion("import", hf_model, megatron_path, model, target, torch_dtype)

    return run_conversion(make_conversion, ConversionOptions(**options))


def export_checkpoint(
    megatron_path: str | Path,
    hf_path: str | Path,
    *,
    hf_model: str | Path | None = None,
    torch_dtype: str | None = None,
    iteration: int | None = None,
    expert_layout: str | None = None,
    quantize: str | None = None,
    strict: bool = True,
    drop_vocab_padding: bool = False,
    trust_remote_code: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **options: Any,
) -> ConversionReport:
    """Write a Hugging Face model from a Megatron checkpoint of either format; its optimizer state is ignored.

    Args:
        megatron_path: the checkpoint's root folder, or an iteration's folder.
        hf_path: the model's folder, to be created.
        hf_model: folder or hub id of a model with configuration, tokenizer and processor; None for the files that an
            import has copied into the checkpoint.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None to keep their dtypes.
        iteration: the iteration; None for the latest.
        expert_layout: "input_major" as in released models, "output_major" as transformers 5 saves models, or
            "per_expert"; None for the layout of the imported model.
        quantize: "fp8" to write the linear layers of text layers in FP8, like the released models named -FP8; None for
            no quantization.
        strict: whether tensors that the model does not have are an error; otherwise they are ignored.
        drop_vocab_padding: True drops the padding rows of the vocabulary even if they are not zero, as after training.
            False raises an error for them.
        trust_remote_code: whether to copy code that the configuration of `hf_model` refers to. It is never run here.
        max_shard_bytes: maximum size of a weight file.
        options: fields of `ConversionOptions`: overwrite, resume, verify, ...

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def make_conversion() -> Conversion:
        stored = open_stored(megatron_path, iteration, hf_model, trust_remote_code=trust_remote_code)
        config, experts = stored.config, stored.experts
        if quantize not in (None, "fp8"):
            raise CheckpointError(f"quantize is {quantize!r}, expected 'fp8' or None")
        if quantize and config.raw.get(QUANTIZATION) is None:
            experts = config.family.fp8_experts or experts
        if expert_layout is not None:
            if expert_layout.upper() not in ExpertLayout.__members__:
                names = ", ".join(layout.name.lower() for layout in ExpertLayout)
                raise CheckpointError(f"expert_layout is {expert_layout!r}, expected {names}")
            experts = ExpertLayout[expert_layout.upper()]
        if not strict:
            stored.notes[:0] = drop_unexpected(stored.tensors, config.rows(experts), stored.layout)
        moe = bool(config.dimensions.indices["moe_layers"])
        settings = {"from": stored.ckpt_format, "expert_layout": experts.name if moe else None}
        target = HFTarget(config, experts, settings, max_shard_bytes, stored.float32_in_export(torch_dtype))
        if quantize:
            names = tensors_of(config.rows(experts), target.layout)
            only_experts = config.family.fp8_only_experts
            target.fp8 = Fp8Export.for_model(config.raw, config.folder, names, only_experts=only_experts)
        return _plan_conversion("export", megatron_path, hf_path, stored, target, torch_dtype, drop=drop_vocab_padding)

    return run_conversion(make_conversion, ConversionOptions(**options))


def reformat_checkpoint(
    megatron_path: str | Path,
    new_path: str | Path,
    *,
    ckpt_format: str,
    hf_model: str | Path | None = None,
    torch_dtype: str | None = None,
    topology: Topology | None = None,
    naming: str = TRANSFORMER_ENGINE,
    vocab_divisor: int | None = None,
    iteration: int | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> ConversionReport:
    """Write the weights of a Megatron checkpoint in another format, layer spec or dtype.

    Optimizer state is ignored. See `import_checkpoint` and `export_checkpoint` for arguments that are not listed here.

    Args:
        new_path: the new checkpoint's root folder, to be created.
        hf_model: folder or hub id of a model with configuration, tokenizer and processor; None for the files in the
            checkpoint.
        vocab_divisor: pad the vocabulary to a multiple of this number times the tensor-parallel size; None to keep the
            present padding.

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def make_conversion() -> Conversion:
        stored = open_stored(megatron_path, iteration, hf_model, trust_remote_code=trust_remote_code).with_padding()
        origin = stored.manifest.get("hf_model") or hf_model or megatron_path
        divisor = stored.vocab_divisor if vocab_divisor is None else vocab_divisor
        target = MegatronTarget(
            *(ckpt_format, naming, topology or Topology(), stored.config, str(origin), stored.experts, divisor),
            stored.float32_as,
        )
        return _plan_conversion("reformat", megatron_path, new_path, stored, target, torch_dtype)

    return run_conversion(make_conversion, ConversionOptions(**options))


def _plan_conversion(
    name: str,
    origin: str | Path,
    path: str | Path,
    source: StoredModel,
    target: HFTarget | MegatronTarget,
    torch_dtype: str | None,
    *,
    drop: bool = False,
) -> Conversion:
    """Return the planned conversion of `source` to `target`.

    If `drop` is False, raise CheckpointError for padding rows of the vocabulary that are not zero.
    """
    rows, dtypes = source.config.rows(target.experts), dict(dtype=torch_dtype, float32_as=target.float32_as)
    plan = make_plan(rows, source.layout, target.layout, source.tensors.specs, where=str(source.folder), **dtypes)
    padding = source.check_padding(source.config.dimensions["vocab"], drop=drop)
    if isinstance(target, HFTarget):
        plan = target.complete(plan)
    target.plan_files(plan)
    folders, notes = (source.folder, source.config.folder), [*padding, *source.notes]
    return Conversion(name, str(origin), absolute(path), plan, source.tensors, folders, target, notes)
