"""LoRA and DoRA: Megatron-Bridge's, with parts of the model that can be frozen and adapted one by one.

Which layers these settings select is in `adapter_rows.AdapterSettings.adapts`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.models.model import VisionLanguageModel
from qwen3vl_bridge.peft.adapter_rows import LINEAR_LAYERS, AdapterSettings, layer_of, linear_rows, names_meant
from qwen3vl_bridge.peft.insertion import let_recompute_see_gradients, refuse_cut_experts, refuse_dora, transform_in
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import Part, expand, is_of_experts, part_of, shared_name

from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import VLMLoRA
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import unwrap_model
from torch import nn

if TYPE_CHECKING:
    from qwen3vl_bridge.models.provider import VisionLanguageProvider

logger = logging.getLogger(__name__)

_ADAPT = {f"adapt_{part.value}": part for part in Part}
_FREEZE = tuple(f"freeze_{part.value}" for part in Part)


@dataclass
class Qwen3VLParts:
    """What LoRA and DoRA share: which parts get adapters, and which parts' own weights are frozen.

    `target_modules` (and `exclude_modules`) select linear layers of the adapted parts by a name such as "linear_qkv",
    or a pattern such as "*.layers.0.*.linear_qkv". Layers are linear_qkv and linear_proj of attention, in_proj and
    out_proj of linear attention, linear_fc1 and linear_fc2 of MLPs, shared experts among them; the mergers have
    linear_fc1 and linear_fc2. The default is Megatron-Bridge's: all except those of linear attention. All experts of a
    layer have one name, such as "language_model.decoder.layers.0.mlp.experts.linear_fc1": either all of them are
    adapted, or none.

    Attributes:
        freeze_language_model, freeze_vision_model, freeze_vision_projection: whether the part's base weights are
            frozen. False leaves the decision to the provider's fields of the same name. The vision projection is the
            mergers. Adapters are always trained.
        adapt_language_model, adapt_vision_model, adapt_vision_projection: whether that part's linear layers get
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
        """Freeze parts and insert adapters in place. Megatron-Bridge calls this before it wraps the model, a
        VisionLanguageModel or the list of a rank's virtual stages. Unless `training`, nothing is trained.

        Raises:
            ValueError: it already has adapters, or `check` refuses this configuration.
        """
        # Not `PEFT.__call__`: it also replaces `forward` of every block that recomputes, so that inputs require
        # gradients even where nothing is trained; `let_recompute_see_gradients` does that where something is.
        chunks = _chunks(model)
        if adapted := [n for chunk in chunks for n, m in chunk.named_modules() if isinstance(m, AdapterWrapper)]:
            raise ValueError(f"the model already has {len(adapted)} adapters, such as {adapted[0]}; expected none")
        self.check(chunks[0].config)
        self.freeze_model(chunks)
        for chunk in chunks:
            self._walk_model(chunk, transform_in(chunk, self.transform))
            for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
                # megatron-core would stack layers of one name, and refuse to save a stack with missing parts.
                block.config.hetereogenous_dist_checkpoint |= self.layers_differ
        if training:
            for chunk in chunks:
                let_recompute_see_gradients(chunk)
        else:
            self.freeze_model(chunks, training=False)
        for module in model if isinstance(model, list) else [model]:
            module.train(mode=training)
        number = sum(isinstance(module, AdapterWrapper) for chunk in chunks for module in chunk.modules())
        logger.info("adapters on %d linear layers of this rank", number)
        return model

    def match(self, m: nn.Module, name: str | None = None, prefix: str | None = None) -> tuple[str, str] | None:
        """The whole name of a linear layer that gets an adapter; twice, in place of Megatron-Bridge's entry too."""
        layer = f"{prefix}.{name}" if prefix else name or ""
        return (layer, layer) if self.settings.adapts(layer) else None

    def freeze_model(self, model: Any, training: bool = True) -> None:
        """Stop training of the parts' own weights; of everything if nothing is to be trained."""
        for chunk in _chunks(model):
            chunk.freeze(**{flag: getattr(self, flag) or not training for flag in _FREEZE})

    def set_params_to_save(self, model: Any) -> None:
        """Record what is trained, for checkpoints: they know an adapted layer's own weights by their plain names."""
        super().set_params_to_save(model)
        self.params_to_save |= {name.replace(".to_wrap.", ".") for name in self.params_to_save}

    def adapter_key_filter(self, key: Any) -> bool:
        """Whether checkpoints hold a parameter; Megatron-FSDP asks by names that begin with those of its wrappers."""
        if isinstance(key, str):
            while key.startswith("module."):
                key = key.removeprefix("module.")
        return super().adapter_key_filter(key)

    @property
    def settings(self) -> AdapterSettings:
        """The values that determine which adapters there are, without Megatron."""
        return AdapterSettings(
            dim=self.dim,
            alpha=self.alpha,
            dora=isinstance(self, DoRA),
            parts=frozenset(part.value for field, part in _ADAPT.items() if getattr(self, field)),
            target_modules=tuple(self.target_modules or ()),
            exclude_modules=tuple(self.exclude_modules or ()),
            experts=self.adapt_experts,
        )

    @property
    def layers_differ(self) -> bool:
        """Whether some layers of a tower may have adapters that others lack."""
        return any("." in entry or "*" in entry for entry in (*self.target_modules, *self.exclude_modules))

    def to_cfg_dict(self) -> dict[str, Any]:
        """Contents of a saved configuration: all settings, without values recorded during a run."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        values["canonical_mapping"] = {name: sorted(modules) for name, modules in self.canonical_mapping.items()}
        module = type(self).__module__.removesuffix(".lora")  # of the package, as in users' files
        return {"_target_": f"{module}.{type(self).__qualname__}"} | values

    def check(self, provider: VisionLanguageProvider) -> None:
        """Refuse settings that are invalid for the model of a finalised provider, or would have no effect on it."""
        if self.canonical_mapping:
            raise ValueError(f"canonical_mapping is {dict(self.canonical_mapping)}, expected it to be empty")
        if self.target_modules and self.exclude_modules:
            raise ValueError(
                f"target_modules is {self.target_modules} and exclude_modules {self.exclude_modules}, expected only "
                "one of the two: set target_modules to [] to adapt all linear layers except those in exclude_modules"
            )
        rows = linear_rows(expand(family(provider.family).rows(), provider.dimensions()))
        layers = list(dict.fromkeys(shared_name(layer_of(row)) for row in rows))
        adapted = [layer for layer in layers if self.settings.adapts(layer)]
        experts = [layer for layer in adapted if is_of_experts(layer)]
        if experts and provider.moe_grouped_gemm:
            raise ValueError(
                f"moe_grouped_gemm is True, so that {experts[0]} holds all experts of a rank; expected False, because "
                "each expert has its own adapter"
            )
        if experts:
            refuse_cut_experts(provider)
        for layer in experts:
            if (other := layer[:-1] + ("2" if layer.endswith("1") else "1")) not in experts:
                raise ValueError(
                    f"{layer} would have adapters and {other} none, expected both or neither: vLLM cannot load "
                    "anything else"
                )
        if self.adapt_experts and not experts:
            raise ValueError(
                f"adapt_experts is True, and none of the {len(adapted)} adapted layers belongs to experts: expected "
                "adapt_language_model=True, a model with experts, and target_modules that match theirs"
            )
        parts = [part for part in _ADAPT if getattr(self, part)]
        asked_for = [] if self.target_modules == list(LINEAR_LAYERS) else self.target_modules or []  # not the default
        separate = {entry: replace(self.settings, target_modules=(entry,)) for entry in asked_for}
        if idle := [entry for entry, settings in separate.items() if not any(map(settings.adapts, layers))]:
            hint = "" if self.adapt_experts else " (experts' need adapt_experts=True)"
            raise ValueError(
                f"target_modules {idle} match no linear layer of the adapted parts, {parts}{hint}{names_meant(idle)}"
            )
        if idle := [part for part in parts if not any(part_of(layer) is _ADAPT[part] for layer in adapted)]:
            raise ValueError(
                f"{', '.join(idle)} is True, but target_modules {self.target_modules} match no layer there"
            )
        if not adapted:
            raise ValueError(f"nothing would be adapted; expected one of {', '.join(_ADAPT)} to be True")


@dataclass
class Qwen3VLLoRA(Qwen3VLParts, VLMLoRA):
    """LoRA. The fields other than those of `Qwen3VLParts` are Megatron-Bridge's (`dim`, `alpha`, `dropout`, ...)."""

    # Otherwise a tensor-parallel rank keeps the whole inputs of each layer's adapters of linear_qkv and linear_fc1.
    sequence_parallel_input_regather: bool = True

    def check(self, provider: VisionLanguageProvider) -> None:
        """Like Qwen3VLParts', with LoRA's own fields."""
        if self.lora_dtype is not None:
            raise ValueError(f"lora_dtype is {self.lora_dtype}, expected None: adapters take the dtype of their layer")
        for name in ("normalize_moe_lora", "experts_shared_outer_loras"):
            if getattr(self, name):
                raise ValueError(f"{name} is True, expected False: each expert has its own adapters, or none")
        if not self.share_expert_adapters and not self.adapt_experts:
            raise ValueError("share_expert_adapters is False, expected adapt_experts=True with it")
        super().check(provider)


@dataclass
class Qwen3VLDoRA(Qwen3VLParts, DoRA):
    """DoRA. The fields other than those of `Qwen3VLParts` are Megatron-Bridge's (`dim`, `alpha`, ...). Dropout and
    tensor or pipeline parallelism are not supported yet and raise an error.
    """

    def check(self, provider: VisionLanguageProvider) -> None:
        """Like Qwen3VLParts', with what DoRA does not support."""
        if self.adapt_experts:
            raise ValueError(
                "adapt_experts is True, expected False for DoRA: Hugging Face's peft does not support DoRA on experts"
            )
        refuse_dora(self, provider)
        super().check(provider)


def _chunks(model: Any) -> list[VisionLanguageModel]:
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    for chunk in chunks:
        if not isinstance(chunk, VisionLanguageModel):
            raise TypeError(f"found a {type(chunk).__name__}, expected a Qwen3VLModel or another VisionLanguageModel")
    return chunks
