"""LoRA and DoRA for this model: Megatron-Bridge's classes with separate settings for each component of the model.

`adapter_rows.AdapterSettings.adapts` decides which layers these settings select.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.peft.adapter_rows import LINEAR_LAYERS, AdapterSettings, adaptable_rows, layer_name, suggest_names
from qwen3vl_bridge.peft.insertion import (
    check_dora,
    check_expert_tensor_parallelism,
    model_transform,
    require_grad_on_recompute_inputs,
)
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import Component, component_of, expand, is_expert_layer, shared_name

from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import VLMLoRA
from megatron.bridge.peft.walk_utils import walk
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import unwrap_model
from torch import nn

if TYPE_CHECKING:
    from qwen3vl_bridge.models.common.provider import VisionLanguageProvider

logger = logging.getLogger(__name__)

_ADAPT = {f"adapt_{component.value}": component for component in Component}
_FREEZE = tuple(f"freeze_{component.value}" for component in Component)


@dataclass
class Qwen3VLAdapters:
    """Settings of LoRA and DoRA: which components of the model get adapters, and which base weights are frozen.

    `target_modules` (and `exclude_modules`) select linear layers of these components by a name such as "linear_qkv",
    or a pattern such as "*.layers.0.*.linear_qkv". Layers are linear_qkv and linear_proj of attention, in_proj and
    out_proj of linear attention, linear_fc1 and linear_fc2 of MLPs, shared experts among them; the mergers have
    linear_fc1 and linear_fc2. The default is Megatron-Bridge's: all except those of linear attention. All experts of a
    layer have one name, such as "language_model.decoder.layers.0.mlp.experts.linear_fc1": either all of them are
    adapted, or none.

    Attributes:
        freeze_language_model, freeze_vision_model, freeze_vision_projection: whether the base weights of the component
            are frozen. False leaves the decision to the provider's fields of the same name. The vision projection is
            the patch mergers. Adapters are always trained.
        adapt_language_model, adapt_vision_model, adapt_vision_projection: whether linear layers of the component get
            adapters.
        adapt_experts: whether each expert of the adapted language model gets its own adapters, on both linear layers.
            Not supported for DoRA or with grouped experts (`moe_grouped_gemm`).
    """

    freeze_language_model: bool = True
    freeze_vision_model: bool = True
    freeze_vision_projection: bool = True

    adapt_language_model: bool = True
    adapt_vision_model: bool = False
    adapt_vision_projection: bool = False
    adapt_experts: bool = False

    def __call__(self, model: Any, training: bool = True) -> Any:
        """Freeze base weights and insert adapters in place. Megatron-Bridge calls this before it wraps the model.

        Args:
            model: a VisionLanguageModel, or the list of a rank's virtual pipeline stages.
            training: False to train nothing.

        Raises:
            ValueError: the model already has adapters, or the settings are invalid for it (`check`).
        """
        # `PEFT.__call__` is not called, because it replaces `forward` of every block with recomputation so that inputs
        # require gradients even where nothing is trained. `require_grad_on_recompute_inputs` does less.
        chunks = _chunks(model)
        if adapted := [n for chunk in chunks for n, m in chunk.named_modules() if isinstance(m, AdapterWrapper)]:
            raise ValueError(
                f"the model already has {len(adapted)} adapters, such as {adapted[0]}; expected none: apply peft to a "
                "model only once"
            )
        config = chunks[0].config
        self.check(config)
        self.freeze_model(chunks)
        also = [f"peft.{flag}" for flag in _FREEZE if getattr(self, flag) and not getattr(config, flag)]
        if training and also and (named := [f"model.{flag}" for flag in _FREEZE if getattr(config, flag)]):
            # Whoever freezes one component by name may expect the others to be trained.
            logger.warning(
                "%s is True, and the base weights of the other components are frozen as well, by %s. To train them, "
                "set these to False",
                *(" and ".join(flags) for flags in (named, also)),
            )
        for chunk in chunks:
            walk(chunk, model_transform(chunk, self))
            for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
                # megatron-core would stack the layers of a name, and could not save a stack with missing layers.
                block.config.hetereogenous_dist_checkpoint |= self.layers_differ
        if training:
            for chunk in chunks:
                require_grad_on_recompute_inputs(chunk)
        else:
            self.freeze_model(chunks, training=False)
        for module in model if isinstance(model, list) else [model]:
            module.train(mode=training)
        number = sum(isinstance(module, AdapterWrapper) for chunk in chunks for module in chunk.modules())
        logger.info("adapters on %d linear layers of this rank", number)
        return model

    def match(self, m: nn.Module, name: str | None = None, prefix: str | None = None) -> tuple[str, str] | None:
        """Return the full name of a layer twice, as Megatron-Bridge expects, or None if the layer gets no adapter."""
        layer = f"{prefix}.{name}" if prefix else name or ""
        return (layer, layer) if self.settings.adapts(layer) else None

    def freeze_model(self, model: Any, training: bool = True) -> None:
        """Freeze base weights according to the `freeze_*` settings, or all weights if `training` is False."""
        for chunk in _chunks(model):
            chunk.freeze(**{flag: getattr(self, flag) or not training for flag in _FREEZE})

    def set_params_to_save(self, model: Any) -> None:
        """Record the names of trained parameters, both with the wrapper `to_wrap` and without it, as in checkpoints."""
        super().set_params_to_save(model)
        self.params_to_save |= {name.replace(".to_wrap.", ".") for name in self.params_to_save}

    def adapter_key_filter(self, key: Any) -> bool:
        """Return True if checkpoints contain the parameter `key`. Prefixes of Megatron-FSDP's wrappers are ignored."""
        if isinstance(key, str):
            while key.startswith("module."):
                key = key.removeprefix("module.")
        return super().adapter_key_filter(key)

    @property
    def settings(self) -> AdapterSettings:
        """Return the settings that determine which layers get adapters, as a class that does not import Megatron."""
        return AdapterSettings(
            dim=self.dim,
            alpha=self.alpha,
            dora=isinstance(self, DoRA),
            components=frozenset(component.value for field, component in _ADAPT.items() if getattr(self, field)),
            target_modules=tuple(self.target_modules or ()),
            exclude_modules=tuple(self.exclude_modules or ()),
            experts=self.adapt_experts,
        )

    @property
    def layers_differ(self) -> bool:
        """Return True if the settings may select adapters for only some transformer layers of a component."""
        return any("." in entry or "*" in entry for entry in (*self.target_modules, *self.exclude_modules))

    def to_cfg_dict(self) -> dict[str, Any]:
        """Return the contents of a saved configuration: all settings, without values recorded during a run."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        values["canonical_mapping"] = {name: sorted(modules) for name, modules in self.canonical_mapping.items()}
        module = type(self).__module__.removesuffix(".lora")  # the package, as in users' files
        return {"_target_": f"{module}.{type(self).__qualname__}"} | values

    def check(self, provider: VisionLanguageProvider) -> None:
        """Raise ValueError for settings that are invalid for the model of a finalized provider, or have no effect."""
        if self.canonical_mapping:
            raise ValueError(
                f"canonical_mapping is {dict(self.canonical_mapping)}, expected it to be empty: do not set it; select "
                "layers with target_modules"
            )
        if self.target_modules and self.exclude_modules:
            raise ValueError(
                f"target_modules is {self.target_modules} and exclude_modules {self.exclude_modules}, expected only "
                "one of the two: set target_modules to [] to adapt all linear layers except those in exclude_modules"
            )
        rows = adaptable_rows(expand(family(provider.family).rows(), provider.dimensions()))
        layers = list(dict.fromkeys(shared_name(layer_name(row)) for row in rows))
        adapted = [layer for layer in layers if self.settings.adapts(layer)]
        experts = [layer for layer in adapted if is_expert_layer(layer)]
        if experts and provider.moe_grouped_gemm:
            raise ValueError(
                f"moe_grouped_gemm is True, so that {experts[0]} holds all experts of a rank; expected False, because "
                "each expert has its own adapter"
            )
        if experts:
            check_expert_tensor_parallelism(provider)
        for layer in experts:
            if (other := layer[:-1] + ("2" if layer.endswith("1") else "1")) not in experts:
                raise ValueError(
                    f"{layer} would have adapters and {other} none, expected both or neither: vLLM cannot load "
                    "anything else"
                )
        if self.adapt_experts and not experts:
            raise ValueError(
                f"adapt_experts is True, and none of the {len(adapted)} adapted layers belongs to experts: set "
                "adapt_language_model=True, use a model with experts, and choose target_modules that match their layers"
            )
        adapted_fields = [field for field in _ADAPT if getattr(self, field)]
        asked_for = [] if self.target_modules == list(LINEAR_LAYERS) else self.target_modules or []  # not the default
        separate = {entry: replace(self.settings, target_modules=(entry,)) for entry in asked_for}
        if idle := [entry for entry, settings in separate.items() if not any(map(settings.adapts, layers))]:
            hint = "" if self.adapt_experts else " (layers of experts need adapt_experts=True)"
            raise ValueError(
                f"target_modules {idle} match no linear layer of the adapted components, "
                f"{adapted_fields}{hint}{suggest_names(idle)}"
            )
        if idle := [f for f in adapted_fields if not any(component_of(layer) is _ADAPT[f] for layer in adapted)]:
            raise ValueError(
                f"{', '.join(idle)} is True, but target_modules {self.target_modules} match no layer of that component"
            )
        if not adapted:
            raise ValueError(f"nothing would be adapted; set one of {', '.join(_ADAPT)} to True")


@dataclass
class Qwen3VLLoRA(Qwen3VLAdapters, VLMLoRA):
    """LoRA. Fields that `Qwen3VLAdapters` does not define are Megatron-Bridge's (`dim`, `alpha`, `dropout`, ...)."""

    # Otherwise each tensor-parallel rank keeps the full input of every adapter of linear_qkv and linear_fc1.
    sequence_parallel_input_regather: bool = True

    def check(self, provider: VisionLanguageProvider) -> None:
        """Raise ValueError for invalid settings, see `Qwen3VLAdapters.check`."""
        if self.lora_dtype is not None:
            raise ValueError(f"lora_dtype is {self.lora_dtype}, expected None: adapters take the dtype of their layer")
        for name in ("normalize_moe_lora", "experts_shared_outer_loras"):
            if getattr(self, name):
                raise ValueError(f"{name} is True, expected False: each expert has its own adapters, or none")
        if not self.share_expert_adapters and not self.adapt_experts:
            raise ValueError("share_expert_adapters is False, which requires adapt_experts=True")
        super().check(provider)


@dataclass
class Qwen3VLDoRA(Qwen3VLAdapters, DoRA):
    """DoRA. Fields that `Qwen3VLAdapters` does not define are Megatron-Bridge's (`dim`, `alpha`, ...). Dropout and
    tensor or pipeline parallelism are not supported yet and raise an error.
    """

    def check(self, provider: VisionLanguageProvider) -> None:
        """Raise ValueError for invalid settings, see `Qwen3VLAdapters.check`."""
        if self.adapt_experts:
            raise ValueError(
                "adapt_experts is True, expected False for DoRA: Hugging Face's peft does not support DoRA on experts"
            )
        check_dora(self, provider)
        super().check(provider)


def _chunks(model: Any) -> list[VisionLanguageModel]:
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    for chunk in chunks:
        if not isinstance(chunk, VisionLanguageModel):
            raise TypeError(f"found a {type(chunk).__name__}, expected a Qwen3VLModel or another VisionLanguageModel")
    return chunks
