"""A model's weights in Megatron-Bridge's loop: a run's initial ones, or all of a checkpoint's, from any format.

Hugging Face weights are read by Megatron-Bridge's own loader; the two Megatron formats are read here, and a weight that
is missing, extra or of another shape is an error on all ranks that lists them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import check_tensors, tensors_of
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.formats.huggingface import side_files
from qwen3vl_bridge.checkpoint.formats.layouts import TensorLayout
from qwen3vl_bridge.checkpoint.formats.megatron import HF_FILES, find_iteration, format_of, model_keys
from qwen3vl_bridge.checkpoint.formats.tensors import Segment, SegmentReader, Segments, Shape, Slice, TensorSpec, Zeros
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, layout_of, open_model, read_manifest, tool
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.models.model import VisionLanguageModel
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.parallel.collectives import fail_together, gather_objects
from qwen3vl_bridge.peft.stored_adapters import refuse_adapters_alone
from qwen3vl_bridge.registry import family, family_of
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.resuming import has_checkpoint
from qwen3vl_bridge.weights.rows import WeightRow, expand, is_of_mtp, local_name, stored_rows, vision_sizes

import torch
import torch.distributed.checkpoint as dcp
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
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
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("vocab_size", "share_embeddings_and_output_weights", "moe_layers", "num_moe_experts", "moe_ffn_hidden_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "moe_shared_expert_intermediate_size"),
)
_WITH_EXPERTS = ("num_moe_experts", "moe_ffn_hidden_size")
# The last pipeline stage of a tied model has its own copy of the embedding by this name.
_OUTPUT, _EMBEDDING = "language_model.output_layer.weight", "language_model.embedding.word_embeddings.weight"
_SECTION, _OPTIMIZER, _WRAPPER = "model.", "optimizer.", "module."
# Megatron-FSDP stores gate and up projection separately, and the sections of linear attention's projection.
_PARTS = ("_w", "_v", ".query", ".key", ".value", ".z", ".beta", ".alpha")


def load_model(hf_path: str | Path, megatron_path: str | Path | None = None) -> list[VisionLanguageModel]:
    """Build the complete Megatron model on this process, or on these processes, and fill it, without training.

    Args:
        hf_path: Hugging Face folder or hub id: the configuration, and the weights if `megatron_path` is None.
        megatron_path: a checkpoint of either format, or a run's folder, from which weights are read.

    Raises:
        CheckpointError, ValueError: the Megatron or the Hugging Face checkpoint does not exist or does not fit.
    """
    bridge = AutoBridge.from_hf_pretrained(str(hf_path))
    importlib.import_module(family_of(bridge.hf_pretrained.config.to_dict()).bridge)  # may not be registered yet
    provider = bridge.to_megatron_provider(load_weights=megatron_path is None)
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=not torch.cuda.is_available(), pg_collection=groups
    )
    if megatron_path is not None:
        load_weights(megatron_path, model, groups)
    return model


def load_weights(folder: str | Path, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Fill all weights of a model, this rank's chunks without adapters, wrapped or not, from a checkpoint of either
    Megatron format: the folder of a run or of an iteration, visible to all ranks.

    Raises:
        CheckpointError: a tensor is missing, extra or of another shape; all are listed.
    """
    chunks = unwrap_model(list(model))
    config = chunks[0].config
    dimensions, rows = config.dimensions(), rows_by_name(config)
    with fail_together():
        folder = find_iteration(Path(folder))
        refuse_adapters_alone(folder)
        source, layout, found, expected = _stored_weights(folder, config, rows)
        longer = {name for row in rows.values() if row.of_vocabulary for name in layout.tensors(row)}
        check_tensors(found, expected, f"{folder} does not fit the model", may_be_longer=longer)
    with fail_together(), torch.no_grad(), SegmentReader(source) as reader:
        for stage, chunk in enumerate(chunks):
            for name, parameter in chunk.named_parameters():
                name = _megatron_local_name_to_global(chunks, config, name, stage)
                tied = name == _OUTPUT and config.share_embeddings_and_output_weights
                row = rows[_EMBEDDING if tied else name]
                group = groups.expt_tp if "experts" in row.indices else groups.tp
                shape, dimension, ranks, rank = list(parameter.shape), 0, 1, 0
                if group.size() > 1 and getattr(parameter, "tensor_model_parallel", False):
                    dimension, ranks, rank = parameter.partition_dim, group.size(), group.rank()
                    shape[dimension] *= ranks
                segments: list[Segment] = [Slice(part.tensor, part.start, part.length) for part in layout.slices(row)]
                if row.of_vocabulary:  # saved with any number of padding rows; missing ones become zeros
                    kept = min(source.specs[segments[0].source].numel, math.prod(shape))
                    segments = [Slice(segments[0].source, 0, kept), Zeros(math.prod(shape) - kept)]
                if dimension == 0:
                    # Of several tensors that are concatenated in a parameter, a rank has its part of each.
                    whole, width, first, segments = Segments(segments), math.prod(shape[1:]), 0, []
                    for size in stored_rows(row, shape[0], dimensions):
                        part = size // ranks
                        segments += whole.cut((first + rank * part) * width, part * width)
                        first += size
                tensor = reader.elements(segments, str(parameter.dtype).removeprefix("torch."))
                parameter.copy_(
                    tensor.view_as(parameter) if dimension == 0 else tensor.view(shape).chunk(ranks, dimension)[rank]
                )


def _stored_weights(
    folder: Path, config: VisionLanguageProvider, rows: Mapping[str, WeightRow]
) -> tuple[DcpTensors, TensorLayout, dict[str, TensorSpec], dict[str, Shape]]:
    """A Megatron checkpoint, how weights are stored there, its tensors but for multi-token prediction that the model
    lacks, and the tensors that the model expects.
    """
    ckpt_format, metadata = format_of(folder), read_metadata(folder)
    source = DcpTensors(metadata, model_keys(metadata, ckpt_format))
    layout = layout_of(ckpt_format, rows.values(), config.dimensions(), source.specs)
    expected = tensors_of(rows.values(), layout)
    predicts = any(map(is_of_mtp, expected))
    found = {name: spec for name, spec in source.specs.items() if predicts or not is_of_mtp(name)}
    return source, layout, found, expected


def _check_quantised(folder: Path, model: Sequence[torch.nn.Module]) -> None:
    """Compare a checkpoint that ModelOpt has quantised with a model by their norms, which it leaves as they are."""
    config = unwrap_model(list(model))[0].config
    with fail_together():
        _, _, *both = _stored_weights(folder, config, rows_by_name(config))
        found, expected = ({name: one for name, one in tensors.items() if "norm" in name} for tensors in both)
        check_tensors(found, expected, f"{folder} does not fit the model", may_be_longer=())


@dataclass(frozen=True)
class Pretrained:
    """Initial weights, in the folder of a Hugging Face model or of an iteration."""

    folder: Path
    is_hf: bool

    @classmethod
    def find(cls, path: str | Path) -> Pretrained:
        """The weights at a path; raises CheckpointError if there are none in a known format."""
        if is_hf_checkpoint_dir(str(path)):
            return cls(Path(path), is_hf=True)
        return cls(find_iteration(Path(path)), is_hf=False)

    def check(self, provider: VisionLanguageProvider) -> None:
        """Refuse weights of another model, as far as possible without reading them.

        Raises:
            CheckpointError: sizes that differ, or tensors that are not those of the folder's own config.json; all are
                listed. Or they are only adapters, without their base weights.
        """
        if not self.is_hf:
            # There all names and shapes are in one file, and compared before weights are read.
            refuse_adapters_alone(self.folder)
            return
        config = ModelConfig(self.folder).raw
        stored = family_of(config).build_provider(config)
        theirs, ours = _sizes(stored), _sizes(provider)
        if provider.rope_parameters is None and stored.rope_parameters is not None:
            # A run may scale what its checkpoint does not, never the other way: the exported model would say otherwise.
            ours["rope_parameters"], theirs["rope_parameters"] = None, stored.rope_parameters
        differ = [
            f"{name} is {theirs.get(name)}, expected {ours[name]}" for name in ours if theirs.get(name) != ours[name]
        ]
        if differ:
            raise CheckpointError("\n  ".join([f"{self.folder} holds a different model from the run's:", *differ]))
        if get_rank_safe() == 0:  # it reads the header of each file
            open_model(self.folder, trust_remote_code=True).check()

    def load(self, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
        """Fill a model; arguments and errors as for `load_weights`. One that ModelOpt has quantised is filled by
        Megatron-Bridge, with its scales.
        """
        if self.is_hf:
            AutoBridge.from_hf_pretrained(str(self.folder)).load_hf_weights(list(model))
        elif is_quantized(model[0]):
            _check_quantised(self.folder, model)  # Megatron-Bridge would leave out layers that the model lacks
            checkpointing._load_model_weights_from_checkpoint(str(self.folder), list(model))
        else:
            load_weights(self.folder, model, groups)

    def export_files(self) -> ExportFiles:
        """What checkpoints of a run that starts from these weights need in order to be exported."""
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
        manifest = tool() | {"source": str(self.folder), "expert_layout": experts, "float32_as": float32_as}
        return ExportFiles(self.folder, files, manifest)


@dataclass(frozen=True)
class ExportFiles:
    """What an export needs beside tensors: configuration, tokenizer, processor, and the format of experts."""

    source: Path  # the checkpoint that has them
    files: dict[str, Path]  # by the path relative to the folder of Hugging Face files in a checkpoint
    manifest: dict[str, Any]


def _sizes(provider: VisionLanguageProvider) -> dict[str, object]:
    names = [name for name in _SIZES if provider.moe_layers or name not in _WITH_EXPERTS]
    vision = provider.vision_config
    return {
        **{name: getattr(provider, name, None) for name in names},
        **vision_sizes(vision.to_dict()),
        "vision layers": vision.depth,
        "deepstack_visual_indexes": list(provider.deepstack_layers),
        "family": provider.family,
    }


class InitialWeights:
    """A hook of a provider: reads a run's initial weights into its chunks before they are wrapped.

    Megatron-Bridge reads them into the wrapped model, in the format in which the run saves; Hugging Face weights cannot
    be read into Megatron-FSDP's shards this way. Before it is wrapped the model is whole on each rank: on the GPU, or
    with `model.init_model_with_meta_device` on the host, from where Megatron-FSDP moves one group of parameters after
    the other.

    If the run trains adapters they are inserted too. Megatron-Bridge's own hook for that comes later, and would read
    the weights in only one format; it does nothing if `cfg.peft` is None, which is so from here until the model is
    wrapped.
    """

    def __init__(self, cfg: ConfigContainer) -> None:
        self.cfg = cfg
        self.peft = None  # the run's adapters, while the configuration has none

    def __deepcopy__(self, memo: dict) -> InitialWeights:
        """Itself: layers copy their provider, and must not copy the whole run's configuration."""
        return self

    def __call__(self, chunks: Chunks) -> Chunks:
        """Fill this rank's chunks, on any device and in any precision, unless the run resumes from a checkpoint of its
        own that has all weights; raises CheckpointError if weights are missing or do not fit.
        """
        cfg = self.cfg
        peft = cfg.peft or self.peft  # already ours if a failed set-up is repeated
        resumes = peft is None and has_checkpoint(cfg.checkpoint)
        with fail_together():
            for chunk in chunks:
                _allocate_on_host(chunk)
        if cfg.model.restore_modelopt_state:
            # Megatron-Bridge's hook is the last: after scales are read, and a student is joined with its teacher.
            own = cfg.checkpoint.load, cfg.checkpoint.ckpt_step
            load_modelopt_state(chunks, *(own if resumes else (cfg.checkpoint.pretrained_checkpoint, None)))
        if resumes:
            return chunks
        with fail_together():
            pretrained = Pretrained.find(cfg.checkpoint.pretrained_checkpoint)
            pretrained.check(cfg.model)
        with in_high_precision(chunks):
            pretrained.load(chunks, cfg.model._pg_collection)
        if peft is not None:
            chunks = peft(chunks, training=True)
            peft.set_params_to_save(chunks)
            self.peft, cfg.peft = peft, None
        return chunks

    def after(self, chunks: Chunks) -> Chunks:
        """A hook for when chunks are wrapped: restores the configuration's adapters."""
        self.restore_peft()
        return chunks

    def restore_peft(self) -> None:
        """Restore the configuration's adapters, if this hook has them."""
        if self.peft is not None:
            self.cfg.peft, self.peft = self.peft, None


def read_initial_weights(cfg: ConfigContainer, manager: str) -> None:
    """Make Megatron-Bridge's set-up read a run's initial weights, if it has any, by our loader.

    Only with our checkpoint manager, which does not load them: a user's own is left to do it.
    """
    for hook in [hook for hook in getattr(cfg.model, "_pre_wrap_hooks", ()) if isinstance(hook, InitialWeights)]:
        cfg.model._pre_wrap_hooks.remove(hook)
        cfg.model._post_wrap_hooks.remove(hook.after)
        hook.restore_peft()
    if cfg.checkpoint.pretrained_checkpoint is not None and cfg.checkpoint.custom_manager_class == manager:
        hook = InitialWeights(cfg)
        # A student's last hook joins it with its teacher.
        cfg.model.register_pre_wrap_hook(hook, prepend=isinstance(cfg.model, DistillationProvider))
        cfg.model.register_post_wrap_hook(hook.after)


@contextlib.contextmanager
def in_high_precision(chunks: Chunks) -> Iterator[None]:
    """Load parameters that are stored in 8 or 4 bits in the precision of the others.

    megatron-core's optimizer makes their main weights of values that Transformer Engine has kept on the host: those
    that the model was initialised with, which the first step would write back. They are replaced by what is loaded.
    """
    stored = []
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_float8tensor(parameter):
                plain = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))
                copy_tensor_model_parallel_attributes(plain, parameter)
                stored.append((module, name, parameter))
                module._parameters[name] = plain
    yield
    for module, name, parameter in stored:
        plain, module._parameters[name] = module._parameters[name].detach(), parameter
        with torch.no_grad():
            parameter.copy_(plain)
        if hasattr(parameter, "get_high_precision_init_val"):
            parameter._high_precision_init_val = plain.cpu()


def _allocate_on_host(chunk: torch.nn.Module) -> None:
    """Move parameters from the meta device to the host, with the attributes that megatron-core has set on them."""
    if lost := [name for name, buffer in chunk.named_buffers() if buffer.is_meta]:
        raise CheckpointError(
            f"model.init_model_with_meta_device is True, expected False: {', '.join(lost)} would have no values"
        )
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for parameter in chunk.parameters():  # tied parameters once
        if parameter.is_meta:
            data = torch.empty_like(parameter, device="cpu")
            made[parameter] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
            vars(made[parameter]).update(vars(parameter))
    for module in chunk.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in made:
                setattr(module, name, made[parameter])


def rows_by_name(provider: VisionLanguageProvider) -> dict[str, WeightRow]:
    """The whole model's rows under the parameter names of both layer specs, which experts and other layers may use."""
    rows = list(expand(family(provider.family).rows(), provider.dimensions()))
    return {name: row for row in rows for name in (row.megatron, local_name(row.megatron))}


def load_every_weight(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Like Megatron-Bridge's `load_fsdp_dtensor_checkpoint`, which returns after skipping what it does not find.

    Under Megatron-FSDP a model asks for its own parameter names, which follow its layer spec: norms are parts of linear
    layers or separate modules, experts are grouped or not. Unless `checkpoint.strict_fsdp_dtensor_load` is set, a name
    that a checkpoint lacks is skipped, and the parameter keeps its initial value. Here it is found under the other
    spec's name.

    Raises:
        CheckpointError: weights of one of our models are in the checkpoint under neither name; all are listed. Or
            optimizer state is requested, which is under names that this model's optimizer does not have.
    """
    given = inspect.signature(theirs).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    state = asked["sharded_state_dict"]
    if state and state.get("rng_state", state) is None:
        del state["rng_state"]  # finetuning, or load_rng=False: a strict loader would look for the missing state
    chunks = None if asked["rank0"] or state is None or "model" not in state else state.get("_model")
    if not chunks or not isinstance(provider := get_model_config(chunks[0]), VisionLanguageProvider):
        return theirs(*args, **kwargs)
    folder = asked["checkpoint_path_override"] or checkpointing.get_checkpoint_name(
        asked["load_dir"], asked["iteration"], asked["release"]
    )
    weights = checkpointing.preprocess_fsdp_dtensor_state_dict(asked["cfg"], {"model": dict(state["model"])}, chunks[0])
    with fail_together():
        stored = checkpointing._get_filesystem_reader(folder).read_metadata().state_dict_metadata
        renamed, problems = other_names(weights["model"], stored, provider)
        if renamed and "optimizer" in state and any(key.startswith(_OPTIMIZER) for key in stored):
            raise CheckpointError(
                f"{folder} was saved with another layer spec than this model's, and its optimizer state uses that "
                "spec's names: expected checkpoint.load_optim=False, or the transformer_impl and moe_grouped_gemm "
                "that it was saved with"
            )
    if problems := sorted(set().union(*gather_objects(problems))):
        raise CheckpointError("\n  ".join([f"{folder} does not fit the model:", *problems]))
    loaded = theirs(*args, **kwargs)
    if any(gather_objects(bool(renamed))):
        logger.info("%d weights of %s are loaded under the parameter names of another layer spec", len(renamed), folder)
        dcp.load({"model": renamed}, storage_reader=checkpointing._get_filesystem_reader(folder))
    return loaded


def other_names(
    weights: Mapping[str, Any], stored: Mapping[str, Any], provider: VisionLanguageProvider
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights (with Megatron-FSDP's names) that a checkpoint has under the other layer spec's name, by that name; and a
    line on each that it has under neither.
    """
    rows, renamed, problems = rows_by_name(provider), {}, []
    for key, tensor in weights.items():
        if not isinstance(tensor, Tensor) or key.endswith("_extra_state") or _SECTION + key in stored:
            continue
        name = key[key.rfind(_WRAPPER) + len(_WRAPPER) :] if _WRAPPER in key else key
        part = next((part for part in _PARTS if name.endswith(part)), "")
        row = rows.get(name.removesuffix(part))
        spellings = [] if row is None else [row.megatron, local_name(row.megatron)]
        prefix = key[: len(key) - len(name)]
        known = [spelt for spelling in spellings if _SECTION + (spelt := f"{prefix}{spelling}{part}") in stored]
        if known:
            renamed[known[0]] = tensor
        else:
            problems.append(f"missing: {_SECTION}{key} {list(tensor.shape)}")
    return renamed, problems
