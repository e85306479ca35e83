"""The provider: methods shared by the providers of all families."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from qwen3vl_bridge import registry
from qwen3vl_bridge.batch.vision_sharding import VisionWork
from qwen3vl_bridge.models import refusals, settings
from qwen3vl_bridge.models.flops import model_costs, operations_of_a_step
from qwen3vl_bridge.models.hf_config import EXPERT_FIELDS, TEXT_FIELDS, model_dimensions
from qwen3vl_bridge.models.rules import Rule, check
from qwen3vl_bridge.weights.rows import Dimensions, Part, part_of

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
class VisionLanguageProvider(settings.VisionLanguageFields):
    """A vision tower and a language model, of any family, which sets the class attributes."""

    family: ClassVar[str]  # its name in the registry
    model_class: ClassVar[type[Any]]  # the `VisionLanguageModel`
    # Dotted names of the two modules on separate ranks under `dist_train`, whose package is above this one; None for a
    # family that does not support it.
    vision_module_class: ClassVar[str | None] = None
    language_module_class: ClassVar[str | None] = None
    rules: ClassVar[tuple[Rule, ...]] = ()  # constraints of the family on its settings, beside those of all families
    # Megatron-Bridge reads it when it logs TFLOP/s.
    _get_num_floating_point_operations_with_runtime_stats = operations_of_a_step

    def finalize(self) -> None:
        """Check the fields and complete them.

        Raises:
            ValueError: fields that contradict each other, or that this model would ignore.
        """
        settings.complete_before_finalize(self)
        experts = refusals.EXPERTS if isinstance(self, ExpertsMixin) else refusals.DENSE
        check((*refusals.SIZES, *experts, *self.rules, *refusals.BEFORE_FINALIZE), self)
        super().finalize()
        settings.complete_on_finalize(self)
        check(refusals.AFTER_FINALIZE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy, as made by layers with experts; the P2P communicator is shared with the original."""
        if hasattr(self, "_super_class"):
            return copy.deepcopy(copy.copy(self), memo)
        if (talks := getattr(self, "_p2p_communicator", None)) is not None:
            memo[id(talks)] = talks
        return super().__deepcopy__(memo)

    def __copy__(self) -> Self:
        """A copy with all attributes, including those that `__getstate__` omits; of a student's settings, whose class
        also sets its teacher's, settings of its own class without a teacher.
        """
        copied = object.__new__(getattr(self, "_super_class", type(self)))
        vars(copied).update(vars(self))
        if "_super_class" in vars(self):
            for name in ("_super_class", "teacher", "kd_config", "distill_submodule", "full_model", "_pre_wrap_hooks"):
                vars(copied).pop(name, None)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The settings, as Megatron-Bridge sends them to other stages. Groups and hooks of a run stay on the rank."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the output layer."""
        if not self.should_pad_vocab:
            return self.vocab_size
        return calculate_padded_vocab_size(
            self.vocab_size, self.make_vocab_size_divisible_by, self.tensor_model_parallel_size
        )

    @property
    def layers_in_16_bits(self) -> tuple[str, ...]:
        """Linear layers of the decoder, as in the weight table, that are not computed in 8 bits with the others."""
        return ()

    def dimensions(self) -> Dimensions:
        """Values of the weight table's symbols; the vocabulary without padding."""
        fields = {**TEXT_FIELDS, **EXPERT_FIELDS}
        config = {
            "text_config": {"vocab_size": self.vocab_size} | {fields[name]: getattr(self, name) for name in fields},
            "vision_config": self.vision_config.to_dict(),
            "tie_word_embeddings": self.share_embeddings_and_output_weights,
        }
        widths = dict(ffn=self.ffn_hidden_size, head_dim=self.kv_channels)
        return model_dimensions(self.family, config, moe_layers=self.moe_layers, **widths)

    def provide(self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None):
        """Build the model of one pipeline stage, or under `dist_train` the module that this rank has.

        `pre_process` (the stage embeds) and `post_process` (it computes logits or losses) are the rank's unless given.
        """
        groups = self._groups()
        pre_process, post_process = self._ends(pre_process, post_process, vp_stage)
        with self._device():
            if not self.add_decoder:
                model = registry.load(self.vision_module_class)(self, groups)
            else:
                kind = self.model_class if self.add_encoder else registry.load(self.language_module_class)
                model = kind(self, groups, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        model.freeze(
            freeze_language_model=self.freeze_language_model,
            freeze_vision_model=self.freeze_vision_model,
            freeze_vision_projection=self.freeze_vision_projection,
        )
        return model

    def provide_language_model(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> GPTModel:
        """Build only the text model of one pipeline stage; arguments as for `provide`."""
        pre_process, post_process = self._ends(pre_process, post_process, vp_stage)
        with self._device():
            return self.model_class.language_model_class(
                self, self._groups(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
            )

    def local_arguments(self, groups: ProcessGroupCollection) -> dict[str, Any]:
        """Keyword arguments of `TokenBatch.local`, which takes this rank's tokens, images and videos out of a batch."""
        return dict(
            vision_work=self.vision_work,
            vision_ranks=None if self.add_encoder else settings.replicas_of(self).vision_per_language,
            cp_size=groups.cp.size(),
            cp_rank=groups.cp.rank(),
            sp_size=groups.tp.size() if self.sequence_parallel else 1,
            sp_rank=groups.tp.rank() if self.sequence_parallel else 0,
            predicts=self.trains_mtp,
        )

    @property
    def vision_work(self) -> VisionWork:
        """The tower's cost of a frame, by which ranks divide frames."""
        costs = model_costs(self.dimensions())
        return VisionWork(costs.patch, costs.patch_pair, self.vision_config.spatial_merge_size**2)

    def _groups(self) -> ProcessGroupCollection:
        """The groups that were set, or megatron-core's global ones: direct callers of `provide` have not set any."""
        if self._pg_collection is None:
            self._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return self._pg_collection

    def _ends(self, pre_process: bool | None, post_process: bool | None, vp_stage: int | None) -> tuple[bool, bool]:
        """Whether a stage embeds, and whether it has the output layer; determined from the rank if not given."""
        groups, vp_size = self._groups(), self.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_first_stage(groups.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_last_stage(groups.pp)
        return pre_process, post_process

    def _device(self) -> contextlib.AbstractContextManager:
        return torch.device("meta") if self.init_model_with_meta_device else contextlib.nullcontext()

    def provide_distributed_model(self, *args: Any, **kwargs: Any) -> list[torch.nn.Module]:
        """Like ModelProviderMixin's; logs the number of trained parameters of each part, including adapters.

        Raises:
            ValueError: the model is to be wrapped for training, and could not be trained with its parallel sizes.
        """
        given = inspect.signature(super().provide_distributed_model).bind(*args, **kwargs).arguments
        if training := given.get("wrap_with_ddp", True):
            check(refusals.ON_TRAIN, self)
            settings.warn_of_unfused_attention(self)
            fsdp = bool(given.get("use_megatron_fsdp"))
            settings.complete_ddp(self, given.get("ddp_config"), fsdp=fsdp)
        settings.complete_groups(self, given.get("pg_collection"), training=training)
        if self.init_model_with_meta_device and self.transformer_impl == "local":
            kwargs["use_cpu_initialization"] = True  # or local layers, which name their device, would be on the GPU
        model = super().provide_distributed_model(*args, **kwargs)
        for chunk, bare in zip(model, unwrap_model(model), strict=True):
            if chunk is not bare:  # runs set up this provider, of which a language model alone may have a copy
                chunk.config = self
        log_trained_parameters(model)
        return model


@dataclass
class ExpertsMixin:
    """Additions for the provider of a model with experts; to be listed before the family's dense provider as a base.

    Attributes:
        moe_layer_freq: 1 for each layer with experts, 0 for each dense one (or megatron-core's other formats).
        moe_grouped_gemm: compute a rank's experts as one grouped matrix product; requires Transformer Engine.
        allow_random_routing: accept `moe_router_force_load_balancing`, which assigns tokens to experts at random. Only
            for measuring speed; weights trained this way are useless.
    """

    moe_router_dtype: str | None = "fp32"
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_grouped_gemm: bool = field(default_factory=settings.has_transformer_engine)
    moe_permute_fusion: bool = field(default_factory=settings.has_transformer_engine)
    allow_random_routing: bool = False

    @property
    def moe_layers(self: Any) -> tuple[int, ...]:
        """Layers with experts, as megatron-core reads `moe_layer_freq`; raises ValueError for another format."""
        frequency, layers = self.moe_layer_freq, self.num_layers
        if isinstance(frequency, int):
            return tuple(range(0, layers, frequency))
        if isinstance(frequency, str):
            raise ValueError(f"moe_layer_freq is the text {frequency!r}, expected a number or a list")
        if len(frequency) != layers:
            raise ValueError(f"moe_layer_freq has {len(frequency)} entries, expected {layers}, one per layer")
        return tuple(layer for layer, has_experts in enumerate(frequency) if has_experts)


def log_trained_parameters(model: list[nn.Module]) -> None:
    """Log how many parameters of each part this rank has, and how many of them are trained."""
    trained, total = Counter(), Counter()
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            part = part_of(name)  # still wrapped by Megatron-FSDP
            total[part] += parameter.numel()
            trained[part] += parameter.numel() * parameter.requires_grad
    parts = ", ".join(f"{part.value} {trained[part]:,} of {total[part]:,}" for part in Part if total[part])
    logger.info("parameters trained on this rank: %s of %s (%s)", f"{trained.total():,}", f"{total.total():,}", parts)
