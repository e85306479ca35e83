"""The provider: methods shared by the providers of all families."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from qwen3vl_bridge import registry
from qwen3vl_bridge.models import refusals, settings
from qwen3vl_bridge.models.flops import operations_of_a_step, provider_sizes
from qwen3vl_bridge.models.rules import Row, Rule, check
from qwen3vl_bridge.models.vision_config import vision_work
from qwen3vl_bridge.weights.dimensions import Dimensions, indices_of

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


@dataclass
class VisionLanguageProvider(settings.VisionLanguageFields):
    """A vision tower and a language model, of any family.

    Class attributes, which a family sets:
        family: its name in the registry.
        fixed: settings that the model does not support, each with the only value it may have.
        rules: further constraints of the family on its settings.
        model_class, language_model_class: dotted names of the classes that `provide` and `provide_language_model`
            build.
        encoder_class, decoder_class: dotted names of the two modules on separate ranks under `dist_train`; None for a
            family that does not support it.
    """

    family: ClassVar[str]
    model_class: ClassVar[str]
    language_model_class: ClassVar[str]
    encoder_class: ClassVar[str | None] = None
    decoder_class: ClassVar[str | None] = None
    fixed: ClassVar[Mapping[str, Row]]
    rules: ClassVar[tuple[Rule, ...]] = ()
    # Megatron-Bridge reads it when it logs TFLOP/s.
    _get_num_floating_point_operations_with_runtime_stats = operations_of_a_step

    def finalize(self) -> None:
        """Check the fields and complete them.

        Raises:
            ValueError: fields that contradict each other, or that this model would ignore.
        """
        settings.complete_on_construct(self)
        experts = refusals.EXPERTS_ON_CONSTRUCT if isinstance(self, ExpertsMixin) else ()
        check((*refusals.SIZES, *experts, *self.rules, *self.fixed.values(), *refusals.ON_CONSTRUCT), self)
        super().finalize()
        settings.complete_on_finalize(self)
        check(refusals.ON_FINALIZE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy, as made by layers with experts; the P2P communicator is shared with the original."""
        if (talks := getattr(self, "_p2p_communicator", None)) is not None:
            memo[id(talks)] = talks
        return super().__deepcopy__(memo)

    def __copy__(self) -> Self:
        """A copy with all attributes, including those that `__getstate__` omits."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
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

    def dimensions(self) -> Dimensions:
        """Values of the weight table's symbols; the vocabulary without padding."""
        indices = indices_of(
            layers=self.num_layers,
            moe_layers=self.moe_layers,
            experts=self.num_moe_experts or 0,
            vision_layers=self.vision_config.depth,
            deepstack_layers=self.deepstack_layers,
        )
        return Dimensions(provider_sizes(self), indices, self.family)

    def provide(self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None):
        """Build the model of one pipeline stage, or under `dist_train` the module that this rank has.

        Args:
            pre_process: whether the stage embeds; None to determine it from the rank.
            post_process: whether the stage computes logits or losses; None to determine it from the rank.
            vp_stage: virtual pipeline stage, or None.
        """
        groups = self._groups()
        pre_process, post_process = self._ends(pre_process, post_process, vp_stage)
        with self._device():
            if not self.add_decoder:
                model = registry.load(self.encoder_class)(self, groups)
            else:
                kind = registry.load(self.model_class if self.add_encoder else self.decoder_class)
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
            return registry.load(self.language_model_class)(
                self, self._groups(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
            )

    def sequence_ranks(self, groups: ProcessGroupCollection) -> dict[str, Any]:
        """The arguments of `PackedBatch.local` that select a rank's tokens, images and videos."""
        return dict(
            vision_work=vision_work(self),
            encoders=None if self.add_encoder else settings.replicas_of(self).encoders,
            cp_size=groups.cp.size(),
            cp_rank=groups.cp.rank(),
            sp_size=groups.tp.size() if self.sequence_parallel else 1,
            sp_rank=groups.tp.rank() if self.sequence_parallel else 0,
            predicts=self.trains_mtp,
        )

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
        from qwen3vl_bridge.models.freezing import log_trained_parameters

        given = inspect.signature(super().provide_distributed_model).bind(*args, **kwargs).arguments
        if training := given.get("wrap_with_ddp", True):
            check(refusals.ON_TRAIN, self)
            fsdp = bool(given.get("use_megatron_fsdp"))
            settings.complete_ddp(self, given.get("ddp_config"), fsdp=fsdp)
        settings.complete_groups(self, given.get("pg_collection"), training=training)
        model = super().provide_distributed_model(*args, **kwargs)
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
