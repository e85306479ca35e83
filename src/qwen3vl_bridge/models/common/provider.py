"""Base classes of the providers of all families, and the construction of a provider from a saved configuration.

Megatron-Bridge rebuilds a checkpoint's model from the class that its `run_config.yaml` names. Its own models and ours
have the same parameters under the same names, so a checkpoint of one can be loaded by the other (`provider_builder`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from qwen3vl_bridge import registry
from qwen3vl_bridge.config import fields, model_validation
from qwen3vl_bridge.config.checks import Check, run_checks
from qwen3vl_bridge.config.flops import model_costs, operations_of_a_step
from qwen3vl_bridge.config.hf_config import EXPERT_FIELDS, TEXT_FIELDS, model_dimensions
from qwen3vl_bridge.core.vision_sharding import VisionWork
from qwen3vl_bridge.upstream.config_classes import is_student, own_class, remove_teacher
from qwen3vl_bridge.upstream.provider_flops import CountsOperations
from qwen3vl_bridge.upstream.provider_groups import p2p_communicator, provider_groups, set_provider_groups
from qwen3vl_bridge.weights.rows import Component, Dimensions, component_of

import torch
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import nn

logger = logging.getLogger(__name__)


@dataclass
class VisionLanguageProvider(CountsOperations, fields.VisionLanguageFields):
    """Base class of the providers of all families. A family's provider sets the class attributes.

    Class attributes:
        family: name of the family in the registry.
        model_class: the `VisionLanguageModel`.
        vision_module_class, language_module_class: dotted names of the modules on separate ranks under `dist_train`;
            None for a family without `dist_train`. Importing the modules here would be circular.
        checks: checks of the family, in addition to those of all families.
    """

    family: ClassVar[str]
    model_class: ClassVar[type[Any]]
    vision_module_class: ClassVar[str | None] = None
    language_module_class: ClassVar[str | None] = None
    checks: ClassVar[tuple[Check, ...]] = ()
    operations_of_step = operations_of_a_step

    def finalize(self) -> None:
        """Check the fields, fill in missing values, and turn off kernels that cannot run here.

        Raises:
            ValueError: fields contradict each other, or would be ignored.
        """
        fields.complete_before_finalize(self)
        experts = model_validation.MOE if isinstance(self, ExpertsMixin) else model_validation.DENSE
        run_checks((*model_validation.PARALLEL_SIZES, *experts, *self.checks, *model_validation.BEFORE_FINALIZE), self)
        self.finalize_megatron_fields()
        fields.complete_after_finalize(self)
        run_checks(model_validation.AFTER_FINALIZE, self)

    def finalize_megatron_fields(self) -> None:
        """Call `finalize` of Megatron-Bridge's provider, which also checks and fills in megatron-core's fields."""
        super().finalize()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a deep copy that shares the P2P communicator with the original."""
        if is_student(self):
            return copy.deepcopy(copy.copy(self), memo)
        if (communicator := p2p_communicator(self)) is not None:
            memo[id(communicator)] = communicator
        return super().__deepcopy__(memo)

    def __copy__(self) -> Self:
        """Return a copy with all attributes, including those that `__getstate__` omits.

        The provider of a student (ModelOpt distillation) has a class that also configures its teacher. The copy has the
        student's own class and no teacher.
        """
        copied = object.__new__(own_class(self))
        vars(copied).update(vars(self))
        remove_teacher(vars(copied))
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Setting a public attribute increments `changes`."""
        super().__setattr__(name, value)
        if not name.startswith("_"):
            vars(self)["_changes"] = self.changes + 1

    @property
    def changes(self) -> int:
        """Return the number of assignments to public attributes so far. Models check settings again after a change."""
        return vars(self).get("_changes", 0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle, such as for other pipeline stages, without process groups and hooks."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of rows of the embedding and the output layer."""
        if not self.should_pad_vocab:
            return self.vocab_size
        return calculate_padded_vocab_size(
            self.vocab_size, self.make_vocab_size_divisible_by, self.tensor_model_parallel_size
        )

    @property
    def layers_in_16_bits(self) -> tuple[str, ...]:
        """Return the decoder's linear layers that never use FP8, by their weight-table names, such as "in_proj"."""
        return ()

    def dimensions(self) -> Dimensions:
        """Return the dimensions that the weight table uses. The vocabulary size does not include padding rows."""
        fields = {**TEXT_FIELDS, **EXPERT_FIELDS}
        config = {
            "text_config": {"vocab_size": self.vocab_size} | {fields[name]: getattr(self, name) for name in fields},
            "vision_config": self.vision_config.to_dict(),
            "tie_word_embeddings": self.share_embeddings_and_output_weights,
        }
        widths = dict(ffn=self.ffn_hidden_size, head_dim=self.kv_channels)
        return model_dimensions(self.family, config, moe_layers=self.moe_layers, **widths)

    def provide(self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None):
        """Build the model of one pipeline stage, or with `dist_train` the module of this rank.

        Args:
            pre_process: whether the stage embeds tokens and images; None: determined by the rank.
            post_process: whether the stage computes logits or losses; None: determined by the rank.
            vp_stage: virtual pipeline stage.
        """
        groups = self._process_groups()
        pre_process, post_process = self._stage_ends(pre_process, post_process, vp_stage)
        _log_model_class(self.model_class)
        with self._init_device():
            if not self.add_decoder:
                model = registry.load(self.vision_module_class)(self, groups)
            else:
                model_class = self.model_class if self.add_encoder else registry.load(self.language_module_class)
                model = model_class(self, groups, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        model.freeze(
            freeze_language_model=self.freeze_language_model,
            freeze_vision_model=self.freeze_vision_model,
            freeze_vision_projection=self.freeze_vision_projection,
        )
        return model

    def provide_language_model(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> GPTModel:
        """Build only the text model of one pipeline stage. The arguments are the same as for `provide`."""
        pre_process, post_process = self._stage_ends(pre_process, post_process, vp_stage)
        with self._init_device():
            return self.model_class.language_model_class(
                self, self._process_groups(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
            )

    def local_arguments(self, groups: ProcessGroupCollection) -> dict[str, Any]:
        """Return the arguments with which `TokenBatch.local` selects the tokens and images of this rank."""
        return dict(
            vision_work=self.vision_work,
            vision_ranks=None if self.add_encoder else fields.dist_train_replicas(self).vision_per_language,
            cp_size=groups.cp.size(),
            cp_rank=groups.cp.rank(),
            sp_size=groups.tp.size() if self.sequence_parallel else 1,
            sp_rank=groups.tp.rank() if self.sequence_parallel else 0,
            with_next_tokens=self.trains_mtp,
        )

    @property
    def vision_work(self) -> VisionWork:
        """Return the cost model of the vision tower by which frames are assigned to ranks."""
        costs = model_costs(self.dimensions())
        return VisionWork(costs.patch, costs.patch_pair, self.vision_config.spatial_merge_size**2)

    def _process_groups(self) -> ProcessGroupCollection:
        """Return the provider's process groups. If there are none, set megatron-core's global groups first."""
        if (groups := provider_groups(self)) is None:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            set_provider_groups(self, groups)
        return groups

    def _stage_ends(
        self, pre_process: bool | None, post_process: bool | None, vp_stage: int | None
    ) -> tuple[bool, bool]:
        """Return (`pre_process`, `post_process`), in which the value for this rank replaces None."""
        groups, vp_size = self._process_groups(), self.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_first_stage(groups.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_last_stage(groups.pp)
        return pre_process, post_process

    def _init_device(self) -> contextlib.AbstractContextManager:
        return torch.device("meta") if self.init_model_with_meta_device else contextlib.nullcontext()

    def check_wrapping(self, *, fsdp: bool) -> None:
        """Raise ValueError if the model cannot be trained with Megatron-FSDP (`fsdp=True`) or DDP (`fsdp=False`).

        By default both are accepted; families override the method.
        """

    def provide_distributed_model(self, *args: Any, **kwargs: Any) -> list[torch.nn.Module]:
        """Build and wrap the model as ModelProviderMixin does, and log the trained parameters of each component.

        Raises:
            ValueError: the model is wrapped for training and cannot be trained with these settings.
        """
        given = inspect.signature(super().provide_distributed_model).bind(*args, **kwargs).arguments
        if training := given.get("wrap_with_ddp", True):
            run_checks(model_validation.MODEL_CAN_TRAIN, self)
            fields.warn_of_unfused_attention(self)
            fsdp = bool(given.get("use_megatron_fsdp"))
            self.check_wrapping(fsdp=fsdp)
            fields.complete_ddp(self, given.get("ddp_config"), fsdp=fsdp)
        fields.complete_groups(self, given.get("pg_collection"), training=training)
        if self.init_model_with_meta_device and self.transformer_impl == "local":
            # Local layers would otherwise name the GPU as their device.
            kwargs["use_cpu_initialization"] = True
        model = super().provide_distributed_model(*args, **kwargs)
        for chunk, bare in zip(model, unwrap_model(model), strict=True):
            if chunk is not bare:  # a run configures this provider, and a language model alone may have a copy of it
                chunk.config = self
        log_trained_parameters(model)
        return model


@dataclass
class ExpertsMixin:
    """Additions to the provider of a model with experts. List it before the dense provider among the base classes.

    Attributes:
        moe_layer_freq: a list with 1 for each layer with experts and 0 for each dense layer; or n, if every n-th layer
            has experts.
        moe_grouped_gemm: compute the experts of a rank as one grouped matrix product; requires Transformer Engine.
        allow_random_routing: allow `moe_router_force_load_balancing`, which assigns tokens to experts at random. It is
            only for measuring speed; weights trained this way are useless.
    """

    moe_router_dtype: str | None = "fp32"
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_grouped_gemm: bool = field(default_factory=fields.has_transformer_engine)
    moe_permute_fusion: bool = field(default_factory=fields.has_transformer_engine)
    allow_random_routing: bool = False

    @property
    def moe_layers(self: Any) -> tuple[int, ...]:
        """Return the indices of the layers with experts. Raise ValueError if `moe_layer_freq` is malformed."""
        frequency, layers = self.moe_layer_freq, self.num_layers
        if isinstance(frequency, int):
            return tuple(range(0, layers, frequency))
        if isinstance(frequency, str):
            raise ValueError(f"moe_layer_freq is the text {frequency!r}, expected a number or a list")
        if len(frequency) != layers:
            raise ValueError(f"moe_layer_freq has {len(frequency)} entries, expected {layers}, one per layer")
        return tuple(layer for layer, has_experts in enumerate(frequency) if has_experts)


@functools.cache
def _log_model_class(model_class: type[nn.Module]) -> None:
    """Log the class of the model once, on the first rank."""
    if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        # RL frameworks leave Python's log level at WARNING, which would hide an INFO message.
        level = logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING
        logger.log(level, "the model is %s of qwen3vl_bridge, not Megatron-Bridge's", model_class.__name__)


def log_trained_parameters(model: list[nn.Module]) -> None:
    """Log how many parameters each component has on this rank, and how many of them are trained."""
    trained, total = Counter(), Counter()
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            component = component_of(name)  # accepts the names of Megatron-FSDP, which `unwrap_model` does not remove
            total[component] += parameter.numel()
            trained[component] += parameter.numel() * parameter.requires_grad
    counts = ", ".join(f"{part.value} {trained[part]:,} of {total[part]:,}" for part in Component if total[part])
    logger.info("parameters trained on this rank: %s of %s (%s)", f"{trained.total():,}", f"{total.total():,}", counts)


# Kernel settings that depend on the machine which saved the checkpoint. They change results only by rounding.
_KERNEL_FIELDS = {
    *("transformer_impl", "gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("apply_rope_fusion", "masked_softmax_fusion", "persist_layer_norm"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "cp_comm_type"),
}
# Saved fields of Megatron-Bridge's providers that are not taken over. No weight depends on these fields, and their
# defaults differ (loss, CUDA graphs) or they would be ignored. Megatron-Bridge's own models have Transformer Engine's
# layers for every `transformer_impl`.
_EXCLUDED_FIELDS = {
    *(row.name for row in model_validation.IGNORED_SETTINGS),
    *("transformer_impl", "apply_rope_fusion", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    *("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules", "cuda_graph_warmup_steps"),
    *("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "enable_cuda_graph", "external_cuda_graph"),
    *("vision_cuda_graph_impl", "vision_cuda_graph_scope", "max_vision_cuda_graph_seq_length"),
}

# Megatron-Bridge's provider class -> function that builds our provider from saved fields.
_REPLACEMENTS: dict[type, Callable[..., Any]] = {}


def register_replacement(
    theirs: type,
    ours: type[fields.VisionLanguageFields],
    *,
    exclude: Collection[str] = (),
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda saved: {},
) -> None:
    """Build the provider `ours` where a saved configuration names Megatron-Bridge's provider `theirs`.

    `ours` also becomes a virtual subclass (`abc`) of `theirs`, for callers that use `isinstance`. No fields or defaults
    are inherited.

    Args:
        theirs: Megatron-Bridge's class.
        ours: class of this package.
        exclude: saved fields to ignore in this family, in addition to those of all families.
        convert: saved fields -> values of fields that have other names in Megatron-Bridge's provider.
    """
    theirs.register(ours)  # type: ignore[attr-defined]  # its metaclass is ABCMeta

    def build(**saved: Any) -> fields.VisionLanguageFields:
        if saved.get("use_hf_vision_model"):
            raise ValueError(
                "the checkpoint was saved with use_hf_vision_model=True, expected False: its vision tower has "
                "parameters that this model lacks. Export the checkpoint to Hugging Face without the plugin first"
            )
        excluded = {*_EXCLUDED_FIELDS, *exclude}
        if not saved.get("num_moe_experts"):
            excluded.add("moe_token_dispatcher_type")
        logger.info("the checkpoint names %s of Megatron-Bridge; %s is used instead", theirs.__name__, ours.__name__)
        kept = {name: value for name, value in saved.items() if name not in excluded}
        kept = {"transformer_impl": "transformer_engine", **kept, **convert(saved)}
        return _build_on_this_machine(ours, kept, ignorable=_init_fields(theirs))

    _REPLACEMENTS[theirs] = build


def provider_builder(target: Any) -> Any:
    """Return the function that builds a provider from the saved fields of the class `target`.

    Return `target` if this package has no provider for the class.
    """
    if not isinstance(target, type):
        return target
    if issubclass(target, fields.VisionLanguageFields):
        return lambda **saved: _build_on_this_machine(target, saved)
    return _REPLACEMENTS.get(target, target)


def _build_on_this_machine(
    provider_class: type[fields.VisionLanguageFields], saved: Mapping[str, Any], ignorable: Collection[str] = ()
) -> fields.VisionLanguageFields:
    """Build a provider from saved fields, with this machine's kernels if Transformer Engine cannot run here.

    Unknown fields are dropped, with a warning unless they are `ignorable`.
    """
    values = dict(saved)
    if saved.get("transformer_impl") == "transformer_engine" != fields.default_transformer_impl():
        logger.info(
            "the checkpoint was saved with Transformer Engine's layers, which cannot run here: the local layer spec is "
            "used instead"
        )
        values = {name: value for name, value in saved.items() if name not in _KERNEL_FIELDS}
    known = _init_fields(provider_class)
    if unknown := sorted(values.keys() - known - set(ignorable)):
        logger.warning(
            "the saved configuration has fields that %s lacks, which are ignored: %s",
            *(provider_class.__name__, ", ".join(unknown)),
        )
    return provider_class(**{name: value for name, value in values.items() if name in known})


def _init_fields(dataclass_type: type) -> set[str]:
    return {field.name for field in dataclasses.fields(dataclass_type) if field.init}
