"""Load model weights: the initial weights of a run, or all weights of a checkpoint, from any format.

Megatron-Bridge's loader reads Hugging Face weights. This module reads both Megatron formats, `torch_dist` and
`fsdp_dtensor`. If weights are missing, unexpected or of another shape, all ranks raise an error that lists them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import check_tensors, tensors_of
from qwen3vl_bridge.checkpoint.formats.dcp import DcpTensors, read_metadata
from qwen3vl_bridge.checkpoint.formats.huggingface import side_files
from qwen3vl_bridge.checkpoint.formats.layouts import TensorLayout
from qwen3vl_bridge.checkpoint.formats.megatron import HF_FILES, find_iteration, format_of, model_keys
from qwen3vl_bridge.checkpoint.formats.tensors import (
    ByteRange,
    Shape,
    Slice,
    SliceList,
    SliceReader,
    TensorSpec,
    ZeroSlice,
)
from qwen3vl_bridge.checkpoint.fp8_export import read_kept_scales, scale_of
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, describe_tool, find_layout, open_model, read_manifest
from qwen3vl_bridge.core.collectives import gather_objects, raise_on_all_ranks
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.qwen4_exp.ngram_embedding import NgramEmbedding, share_scales
from qwen3vl_bridge.peft.stored_adapters import check_complete_model
from qwen3vl_bridge.registry import family, family_of
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.resuming import has_checkpoint
from qwen3vl_bridge.upstream.checkpoint_files import fsdp_chunks, load_quantized_weights, storage_reader
from qwen3vl_bridge.upstream.high_precision_values import set_high_precision_value
from qwen3vl_bridge.upstream.parameter_names import global_name
from qwen3vl_bridge.upstream.provider_groups import provider_groups
from qwen3vl_bridge.upstream.wrap_hooks import pre_wrap_hooks, remove_hooks
from qwen3vl_bridge.weights.fp8 import find_scales
from qwen3vl_bridge.weights.rows import (
    TensorSlice,
    WeightRow,
    expand,
    is_mtp,
    local_name,
    stored_sizes,
    vision_sizes,
    with_former_mtp_name,
    without_former_mtp_name,
)

import torch
import torch.distributed.checkpoint as dcp
from megatron.bridge import AutoBridge
from megatron.bridge.models.distillation_provider import DistillationProvider
from megatron.bridge.training import checkpointing
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.post_training.checkpointing import load_modelopt_state
from megatron.bridge.training.utils.checkpoint_utils import is_hf_checkpoint_dir
from megatron.bridge.utils.common_utils import get_rank_safe
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from megatron.core.utils import get_model_config, unwrap_model
from modelopt.torch.quantization.utils import is_quantized
from torch import Tensor

logger = logging.getLogger(__name__)

Chunks = list[torch.nn.Module]

# Fields of a provider that determine weights and their shapes.
_SIZE_FIELDS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("vocab_size", "share_embeddings_and_output_weights", "moe_layers", "num_moe_experts", "moe_ffn_hidden_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "moe_shared_expert_intermediate_size"),
    # Of Qwen3.8-Flash-Next. Some change no shape, but change which rows of the n-gram table are looked up.
    *("hc_count", "hc_lowrank", "ple_layers", "ple_embed_dim", "ple_conv_kernel_size", "ngram_size"),
    *("heads_per_ngram", "ngram_vocab_size_base", "ngram_seed", "linear_output_gate"),
    *("indexer_n_heads", "indexer_head_dim", "indexer_compress_ratio"),
)
_EXPERT_FIELDS = ("num_moe_experts", "moe_ffn_hidden_size")
# With tied weights, the last pipeline stage has a copy of the embedding, named as the output layer.
_OUTPUT, _EMBEDDING = "language_model.output_layer.weight", "language_model.embedding.word_embeddings.weight"
_SECTION, _OPTIMIZER, _WRAPPER = "model.", "optimizer.", "module."
# Number of elements of an n-gram table that are read at a time.
_TABLE_BLOCK = 1 << 22
# Megatron-FSDP stores gate and up projection separately, and the sections of linear attention's projection.
_SECTION_SUFFIXES = ("_w", "_v", ".query", ".key", ".value", ".z", ".beta", ".alpha")


def load_model(
    hf_path: str | Path, megatron_path: str | Path | None = None, **settings: Any
) -> list[VisionLanguageModel]:
    """Build a Megatron model on all ranks and load its weights, for use without training.

    Args:
        hf_path: Hugging Face folder or hub id, for the configuration, and for the weights if `megatron_path` is None.
        megatron_path: checkpoint in either Megatron format, or the folder of a run, to load weights from.
        settings: fields of the provider, for example `tensor_model_parallel_size`.

    Returns:
        The chunks of this rank: one, or several with a virtual pipeline.

    Raises:
        AttributeError: The provider lacks a field.
        CheckpointError, ValueError: A checkpoint does not exist or does not fit the model, or a setting is wrong.
    """
    bridge = AutoBridge.from_hf_pretrained(str(hf_path))
    family_of(bridge.hf_pretrained.config.to_dict())  # raises ValueError if no family has the model
    provider = bridge.to_megatron_provider(load_weights=megatron_path is None)
    for name, value in settings.items():
        getattr(provider, name)
        setattr(provider, name, value)
    if provider.pipeline_model_parallel_size > 1 and provider.pipeline_dtype is None:
        provider.pipeline_dtype = provider.params_dtype
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=not torch.cuda.is_available(), pg_collection=groups
    )
    if megatron_path is not None:
        load_weights(megatron_path, model, groups)
    return model


def load_weights(folder: str | Path, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Load all weights of a model from a checkpoint in either Megatron format.

    Args:
        folder: folder of a run or of an iteration, visible to all ranks.
        model: this rank's chunks, wrapped or not, without adapters.

    Raises:
        CheckpointError: Tensors are missing, unexpected or of another shape; all are listed.
    """
    chunks = unwrap_model(list(model))
    config = chunks[0].config
    dimensions, rows = config.dimensions(), rows_by_name(config)
    with raise_on_all_ranks():
        folder = find_iteration(Path(folder))
        check_complete_model(folder)
        source, layout, found, expected = _stored_weights(folder, config, rows)
        kept_scales = {name: scale_of(stored) for name, stored in read_kept_scales(folder / HF_FILES).items()}
        longer = {name for row in rows.values() if row.is_vocabulary for name in layout.tensors(row)}
        check_tensors(found, expected, f"{folder} does not fit the model", may_be_longer=longer)
    with raise_on_all_ranks(), torch.no_grad(), SliceReader(source) as reader:
        for stage, chunk in enumerate(chunks):
            for name, parameter in itertools.chain(chunk.named_parameters(), chunk.named_buffers()):
                module = chunk.get_submodule(name.rpartition(".")[0])
                name = global_name(chunks, config, name, stage)
                if name not in rows and not isinstance(parameter, torch.nn.Parameter):
                    continue  # statistics, and the scales of an n-gram table
                tied = name == _OUTPUT and config.share_embeddings_and_output_weights
                row = rows[_EMBEDDING if tied else name]
                if isinstance(module, NgramEmbedding):  # the rank has some columns of a table, with all rows
                    (stored,) = layout.tensors(row)
                    scales = source.specs[stored].scales
                    scale = scales[:2] if scales else kept_scales.get(find_scales(row.hf[0], kept_scales))
                    slices, width = SliceList(layout.slices(row)), row.megatron_shape(dimensions)[1]
                    _read_table(reader, slices, width, module, row.position[1], parameter, scale)
                    continue
                group = groups.expt_tp if "experts" in row.indices else groups.tp
                shape, dimension, ranks, rank = list(parameter.shape), 0, 1, 0
                if group.size() > 1 and getattr(parameter, "tensor_model_parallel", False):
                    dimension, ranks, rank = parameter.partition_dim, group.size(), group.rank()
                    shape[dimension] *= ranks
                slices: list[Slice] = list(layout.slices(row))
                if row.is_vocabulary:  # saved with any number of padding rows; missing rows become zeros
                    (stored,) = layout.tensors(row)
                    kept = min(source.specs[stored].numel, math.prod(shape))
                    slices = [TensorSlice(stored, 0, kept), ZeroSlice(math.prod(shape) - kept)]
                if dimension == 0:
                    # A parameter may concatenate several tensors; a rank has its share of each.
                    full, width, first, slices = SliceList(slices), math.prod(shape[1:]), 0, []
                    for size in stored_sizes(row, shape[0], dimensions):
                        part = size // ranks
                        slices += full.select((first + rank * part) * width, part * width)
                        first += size
                tensor = reader.read_elements(slices, str(parameter.dtype).removeprefix("torch."))
                parameter.copy_(
                    tensor.view_as(parameter) if dimension == 0 else tensor.view(shape).chunk(ranks, dimension)[rank]
                )
    share_scales(chunks)


def _stored_weights(
    folder: Path, config: VisionLanguageProvider, rows: Mapping[str, WeightRow]
) -> tuple[DcpTensors, TensorLayout, dict[str, TensorSpec], dict[str, Shape]]:
    """Open a Megatron checkpoint.

    Returns:
        The reader of the checkpoint's tensors, the format of the weights in the checkpoint, the tensors to load
        (without multi-token prediction if the model has none), and the tensors that the model expects.
    """
    ckpt_format, metadata = format_of(folder), read_metadata(folder)
    source = DcpTensors(metadata, model_keys(metadata, ckpt_format))
    layout = find_layout(ckpt_format, rows.values(), config.dimensions(), source.specs)
    expected = tensors_of(rows.values(), layout)
    predicts = any(map(is_mtp, expected))
    found = {name: spec for name, spec in source.specs.items() if predicts or not is_mtp(name)}
    return source, layout, found, expected


def _check_quantized(folder: Path, model: Sequence[torch.nn.Module]) -> None:
    """Raise CheckpointError if the norms in a checkpoint quantized by ModelOpt do not fit the model.

    Norms are not quantized. The other weights cannot be compared.
    """
    config = unwrap_model(list(model))[0].config
    with raise_on_all_ranks():
        _, _, *both = _stored_weights(folder, config, rows_by_name(config))
        found, expected = ({name: one for name, one in tensors.items() if "norm" in name} for tensors in both)
        check_tensors(found, expected, f"{folder} does not fit the model", may_be_longer=())


@dataclass(frozen=True)
class Pretrained:
    """Initial weights of a run, in a Hugging Face folder or in the folder of one iteration of a Megatron checkpoint."""

    folder: Path
    is_hf: bool

    @classmethod
    def find(cls, path: str | Path) -> Pretrained:
        """Return the weights at a path. Raise CheckpointError if there are none in a known format."""
        if is_hf_checkpoint_dir(str(path)):
            return cls(Path(path), is_hf=True)
        return cls(find_iteration(Path(path)), is_hf=False)

    def check(self, provider: VisionLanguageProvider) -> None:
        """Check that the weights fit the model, without reading them.

        Raises:
            CheckpointError: Sizes differ from the model's, or tensors do not match the folder's config.json; the
                message lists all. Or the folder contains adapters without base weights.
        """
        if not self.is_hf:
            # One file contains all names and shapes. `load_weights` compares them before it reads weights.
            check_complete_model(self.folder)
            return
        config = ModelConfig(self.folder).raw
        stored = family_of(config).build_provider(config)
        theirs, ours = _model_sizes(stored), _model_sizes(provider)
        if provider.rope_parameters is None and stored.rope_parameters is not None:
            # A run may add RoPE scaling to a checkpoint, but not remove it: the export would still be scaled.
            ours["rope_parameters"], theirs["rope_parameters"] = None, stored.rope_parameters
        differ = [
            f"{name} is {theirs.get(name)}, expected {ours[name]}" for name in ours if theirs.get(name) != ours[name]
        ]
        if differ:
            advice = "Change checkpoint.pretrained_checkpoint, or the model"
            raise CheckpointError(
                "\n  ".join([f"{self.folder} holds a different model from the run's. {advice}:", *differ])
            )
        if get_rank_safe() == 0:  # reads the header of each file
            open_model(self.folder, trust_remote_code=True).check()

    def load(self, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
        """Load the weights into a model; see `load_weights`. For a model quantized by ModelOpt, load its scales too."""
        if self.is_hf:
            AutoBridge.from_hf_pretrained(str(self.folder)).load_hf_weights(list(model))
        elif is_quantized(model[0]):
            _check_quantized(self.folder, model)  # Megatron-Bridge ignores layers that the model does not have
            load_quantized_weights(self.folder, list(model))
        else:
            load_weights(self.folder, model, groups)

    def export_files(self) -> ExportFiles:
        """Return the files, besides weights, for exporting the run's checkpoints to Hugging Face."""
        if self.is_hf:
            files = {str(name): self.folder / name for name in side_files(self.folder)}
            config, experts, float32_as = ModelConfig(self.folder), None, None
            has_experts = config.dimensions.indices["moe_layers"]
            if has_experts or any(row.float32 for row in family(config.dimensions.family).rows()):
                model = open_model(self.folder, trust_remote_code=True)
                experts, float32_as = model.experts.name if has_experts else None, model.float32_as
        else:
            hf = self.folder / HF_FILES
            files = {str(path.relative_to(hf)): path for path in hf.rglob("*") if path.is_file()}
            before = read_manifest(self.folder)
            experts, float32_as = before.get("expert_layout"), before.get("float32_as")
        manifest = describe_tool() | {"source": str(self.folder), "expert_layout": experts, "float32_as": float32_as}
        return ExportFiles(self.folder, files, manifest)


@dataclass(frozen=True)
class ExportFiles:
    """Files of a Hugging Face export besides tensors (configuration, tokenizer, processor), and its manifest."""

    source: Path  # the checkpoint that contains the files
    files: dict[str, Path]  # relative path in the `HF_FILES` folder of a checkpoint -> file to copy
    manifest: dict[str, Any]


def _model_sizes(provider: VisionLanguageProvider) -> dict[str, object]:
    names = [name for name in _SIZE_FIELDS if provider.moe_layers or name not in _EXPERT_FIELDS]
    vision = provider.vision_config
    return {
        **{name: getattr(provider, name, None) for name in names},
        **vision_sizes(vision.to_dict()),
        "vision layers": vision.depth,
        "deepstack_visual_indexes": list(provider.deepstack_layers),
        "family": provider.family,
    }


class InitialWeights:
    """Pre-wrap hook of a provider that loads a run's initial weights.

    Megatron-Bridge loads initial weights into the wrapped model, and only in the format of the run's checkpoints. It
    cannot load Hugging Face weights into Megatron-FSDP's shards. Before wrapping, each rank has the unsharded model on
    the GPU. With `model.init_model_with_meta_device` it is on the host, and Megatron-FSDP moves its parameters group by
    group.

    This hook also inserts adapters. Megatron-Bridge's own hook for adapters runs later and would load weights in one
    format only. That hook does nothing while `cfg.peft` is None, so this hook sets `cfg.peft` to None until the model
    is wrapped.
    """

    def __init__(self, cfg: ConfigContainer) -> None:
        self.cfg = cfg
        self.peft = None  # the run's adapters, while `cfg.peft` is None

    def __deepcopy__(self, memo: dict) -> InitialWeights:
        """Return this object. Layers copy the provider with its hooks, but must not copy the run's configuration."""
        return self

    def __call__(self, chunks: Chunks) -> Chunks:
        """Load initial weights into this rank's chunks, unless the run resumes from its own complete checkpoint.

        Raises:
            CheckpointError: Weights are missing or do not fit.
        """
        cfg = self.cfg
        peft = cfg.peft or self.peft  # already moved here if a failed setup is repeated
        # A checkpoint of a run with adapters contains no base weights, so these are loaded again when the run resumes.
        resumes = peft is None and has_checkpoint(cfg.checkpoint)
        with raise_on_all_ranks():
            for chunk in chunks:
                _allocate_on_host(chunk)
        if cfg.model.restore_modelopt_state:
            # Megatron-Bridge's hook would restore this state too late: after scales are loaded and a student is joined
            # with its teacher.
            own = cfg.checkpoint.load, cfg.checkpoint.ckpt_step
            load_modelopt_state(chunks, *(own if resumes else (cfg.checkpoint.pretrained_checkpoint, None)))
        if resumes:
            return chunks
        with raise_on_all_ranks():
            pretrained = Pretrained.find(cfg.checkpoint.pretrained_checkpoint)
            pretrained.check(cfg.model)
        with load_in_high_precision(chunks):
            pretrained.load(chunks, provider_groups(cfg.model))
        if peft is not None:
            chunks = peft(chunks, training=True)
            peft.set_params_to_save(chunks)
            self.peft, cfg.peft = peft, None
        return chunks

    def after_wrap(self, chunks: Chunks) -> Chunks:
        """Restore `cfg.peft` after the model is wrapped, and return `chunks` unchanged, as a hook must."""
        self.restore_peft()
        return chunks

    def restore_peft(self) -> None:
        """Restore `cfg.peft`, if this hook has set it to None."""
        if self.peft is not None:
            self.cfg.peft, self.peft = self.peft, None


def register_initial_weights(cfg: ConfigContainer, manager: str) -> None:
    """Register hooks that load a run's initial weights, if there are any and the checkpoint manager is `manager`.

    Other checkpoint managers load initial weights by themselves.
    """
    for hook in pre_wrap_hooks(cfg.model):
        if isinstance(hook, InitialWeights):
            remove_hooks(cfg.model, before=hook, after=hook.after_wrap)
            hook.restore_peft()
    if cfg.checkpoint.pretrained_checkpoint is not None and cfg.checkpoint.custom_manager_class == manager:
        hook = InitialWeights(cfg)
        # For a student of distillation the hook must run first, because the last hook joins student and teacher.
        cfg.model.register_pre_wrap_hook(hook, prepend=isinstance(cfg.model, DistillationProvider))
        cfg.model.register_post_wrap_hook(hook.after_wrap)


@contextlib.contextmanager
def load_in_high_precision(chunks: Chunks) -> Iterator[None]:
    """Replace quantized (FP8, FP4) parameters by high-precision parameters inside the `with` block, to load weights.

    After the block, the loaded values are quantized into the original parameters.
    """
    stored = []
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_float8tensor(parameter):
                plain = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))
                copy_tensor_model_parallel_attributes(plain, parameter)
                stored.append((module, name, parameter))
                _set_parameter(module, name, plain)
    yield
    for module, name, parameter in stored:
        plain = module.get_parameter(name).detach()
        _set_parameter(module, name, parameter)
        with torch.no_grad():
            parameter.copy_(plain)
        set_high_precision_value(parameter, plain)


def _read_table(
    reader: SliceReader,
    slices: SliceList,
    width: int,
    table: NgramEmbedding,
    head: int,
    weight: Tensor,
    scale: tuple[ByteRange, str] | None,
) -> None:
    """Fill a tensor with this rank's columns of the n-gram table of a hash head, in blocks of rows.

    Args:
        reader: the reader of the checkpoint.
        slices: the elements of the stored table.
        width: number of columns of the stored table.
        table: the module.
        head: index of the hash head.
        weight: the tensor to fill.
        scale: where the scale of the FP8 model is stored that the values come from, and its dtype; or None.
    """
    in_fp8, step = table.weight_scale is not None, max(1, _TABLE_BLOCK // width)
    dtype = "float32" if in_fp8 else str(weight.dtype).removeprefix("torch.")

    def read_blocks() -> Iterator[Tensor]:
        for first in range(0, len(weight), step):
            count = min(step, len(weight) - first)
            yield reader.read_elements(slices.select(first * width, count * width), dtype).view(count, width)

    if in_fp8:
        blocks = table.encode(head, read_blocks, None if scale is None else reader.read_scale(*scale))
    else:
        blocks = (block[:, table.columns] for block in read_blocks())
    try:
        for part, block in zip(weight.split(step), blocks, strict=True):
            part.copy_(block)
    except ValueError as error:  # a trained table may have outgrown the scale of the imported model
        raise CheckpointError(f"the n-gram table of hash head {head}: {error}; set ngram_table_dtype=None") from error


def _set_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    # Call torch's method, because Transformer Engine's method would lose how the parameter is initialized.
    torch.nn.Module.register_parameter(module, name, parameter)


def _allocate_on_host(chunk: torch.nn.Module) -> None:
    """Replace parameters on the meta device by uninitialized parameters on the host.

    Attributes that megatron-core has set are kept. Raises CheckpointError for a buffer on the meta device.
    """
    if lost := [name for name, buffer in chunk.named_buffers() if buffer.is_meta]:
        raise CheckpointError(
            f"model.init_model_with_meta_device is True, with no values for the buffers {', '.join(lost)}; set "
            "it to False"
        )
    allocated: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for parameter in chunk.parameters():  # yields tied parameters once
        if parameter.is_meta:
            data = torch.empty_like(parameter, device="cpu")
            allocated[parameter] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
            vars(allocated[parameter]).update(vars(parameter))
    for module in chunk.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in allocated:
                setattr(module, name, allocated[parameter])


def rows_by_name(provider: VisionLanguageProvider) -> dict[str, WeightRow]:
    """Return the weight-table rows of the unsharded model, by the name of the Megatron parameter.

    A row is listed under the parameter's names in both layer specs, with and without Transformer Engine.
    """
    # The rows of any expert layout would do: layouts differ only in Hugging Face tensors, which are not read here.
    rows = list(expand(family(provider.family).rows(), provider.dimensions()))
    return {name: row for row in rows for name in (row.megatron, local_name(row.megatron))}


def load_fsdp_weights(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load an `fsdp_dtensor` checkpoint, even if it was saved with another layer spec.

    Parameter names depend on the layer spec: norms are separate or fused into linear layers, and experts may be
    grouped. Megatron-Bridge skips a parameter whose name is missing, which then keeps its initial value.

    Args:
        theirs: Megatron-Bridge's `load_fsdp_dtensor_checkpoint`, which is called with `args` and `kwargs`.

    Raises:
        CheckpointError: Weights of this package's model are missing under the names of both layer specs; the message
            lists them. Or the optimizer state to load was saved with another layer spec.
    """
    bound = inspect.signature(theirs).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    state = arguments["sharded_state_dict"]
    if state and state.get("rng_state", state) is None:
        del state["rng_state"]  # finetuning, or load_rng=False: a strict loader expects the state
    chunks = None if arguments["rank0"] or state is None or "model" not in state else fsdp_chunks(state)
    if not chunks or not isinstance(provider := get_model_config(chunks[0]), VisionLanguageProvider):
        return theirs(*args, **kwargs)
    folder = arguments["checkpoint_path_override"] or checkpointing.get_checkpoint_name(
        arguments["load_dir"], arguments["iteration"], arguments["release"]
    )
    weights = checkpointing.preprocess_fsdp_dtensor_state_dict(
        arguments["cfg"], {"model": dict(state["model"])}, chunks[0]
    )
    with raise_on_all_ranks():
        stored = storage_reader(folder).read_metadata().state_dict_metadata
        renamed, problems = find_renamed_weights(weights["model"], stored, provider)
        if renamed and "optimizer" in state and any(key.startswith(_OPTIMIZER) for key in stored):
            raise CheckpointError(
                f"{folder} was saved with another layer spec, and its optimizer state uses the parameter names of that "
                "spec: set checkpoint.load_optim=False, or use the checkpoint's transformer_impl and moe_grouped_gemm"
            )
    if problems := sorted(set().union(*gather_objects(problems))):
        raise CheckpointError("\n  ".join([f"{folder} does not fit the model:", *problems]))
    loaded = theirs(*args, **kwargs)
    if any(gather_objects(bool(renamed))):
        logger.info("%d weights of %s are loaded under the parameter names of another layer spec", len(renamed), folder)
        dcp.load({"model": renamed}, storage_reader=storage_reader(folder))
    return loaded


def find_renamed_weights(
    weights: Mapping[str, Any], stored: Mapping[str, Any], provider: VisionLanguageProvider
) -> tuple[dict[str, Tensor], list[str]]:
    """Find weights that a checkpoint does not store under their own name, but under the name of another layer spec.

    Args:
        weights: tensors of the model, by their own name.
        stored: items of the checkpoint, by key.
        provider: configuration of the model.

    Returns:
        The weights that were found, by their name in the checkpoint. And a message for each weight that is missing
        under all names.
    """
    rows, renamed, problems = rows_by_name(provider), {}, []
    for key, tensor in weights.items():
        if not isinstance(tensor, Tensor) or key.endswith("_extra_state") or _SECTION + key in stored:
            continue
        name = key[key.rfind(_WRAPPER) + len(_WRAPPER) :] if _WRAPPER in key else key
        suffix = next((suffix for suffix in _SECTION_SUFFIXES if name.endswith(suffix)), "")
        row = rows.get(without_former_mtp_name(name).removesuffix(suffix))
        names = [] if row is None else [row.megatron, local_name(row.megatron)]
        # Releases of megatron-core have different names for multi-token prediction.
        names += [with_former_mtp_name(name) for name in names]
        prefix = key[: len(key) - len(name)]
        found = [full for other in names if _SECTION + (full := f"{prefix}{other}{suffix}") in stored]
        if found:
            renamed[found[0]] = tensor
        else:
            problems.append(f"missing: {_SECTION}{key} {list(tensor.shape)}")
    return renamed, problems
