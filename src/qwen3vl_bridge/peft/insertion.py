"""Inserting adapters into a chunk, by our classes or by Megatron-Bridge's own: LoRA, VLMLoRA, DoRA, CanonicalLoRA.

Megatron-Bridge inserts adapters by walking over modules, and delegates the walk to a module that has a method `map`
(`megatron.bridge.peft.walk_utils.map`). `VisionLanguageModel.map` is `map_modules`, so all callers use it, before they
wrap the model and before the first step. Which layers are adapted is the `transform`'s own choice: that of our classes
is `adapter_rows.AdapterSettings.adapts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from qwen3vl_bridge.peft.adapter_rows import layer_of, names_meant
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import (
    OUTPUT_LAYER,
    Part,
    expand,
    is_of_experts,
    is_of_mtp,
    part_of,
    shared_name,
)

import torch
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.canonical_lora import LoRALinearSplitFC1UpGate, LoRALinearSplitQKV
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.bridge.peft.lora import VLMLoRA
from megatron.bridge.peft.utils import is_grouped_expert_linear, wildcard_match
from megatron.bridge.peft.walk_utils import walk
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

Transform = Callable[..., nn.Module]

_TEXT_LAYER = re.compile(r"(?<=^language_model\.decoder\.layers\.)\d+")


def map_modules(chunk: MegatronModule, func: Callable[..., Any], *, leaf_only: bool) -> nn.Module:
    """Megatron-Bridge's walk over a chunk's modules, by their names in the chunk without wrappers.

    If `func` is the `transform` of one of Megatron-Bridge's own classes, its adapters are corrected for this model.

    Raises:
        ValueError: adapters that would be trained, merged or saved wrongly.
    """
    peft = getattr(func, "__self__", None)
    if not isinstance(peft, PEFT) or func.__name__ != "transform":
        return walk(chunk, func, leaf_only=leaf_only, _skip_map=True)
    if isinstance(peft, DoRA):
        refuse_dora(peft, chunk.config)
    _refuse_idle_targets(chunk, peft)
    if isinstance(peft, VLMLoRA):
        # It freezes only a rank's first chunk, and freezes the mergers with the vision model, which contains them.
        chunk.freeze(**{flag: getattr(peft, flag) for flag in (f"freeze_{part.value}" for part in Part)})
        if not peft.freeze_vision_projection and not chunk.config.freeze_vision_projection:
            for parameter in () if chunk.vision_projection is None else chunk.vision_projection.parameters():
                parameter.requires_grad = True
    adapted = walk(chunk, transform_in(chunk, peft.transform), leaf_only=leaf_only, _skip_map=True)
    _refuse_wrong_adapters(chunk, peft)
    let_recompute_see_gradients(chunk)
    return adapted


def transform_in(chunk: MegatronModule, transform: Transform) -> Transform:
    """A configuration's `transform`, called with names of the whole model, so that patterns match on every stage."""

    def transform_whole(m: nn.Module, name: str | None = None, prefix: str | None = None) -> nn.Module:
        if is_of_mtp(prefix or ""):
            return m
        adapted = transform(m, name, _whole_name(prefix or "", chunk))
        return MagnitudeLinear(adapted.to_wrap, adapted.adapter) if type(adapted) is DoRALinear else adapted

    return transform_whole


def _whole_name(name: str, chunk: MegatronModule) -> str:
    """A module's name in the whole model. A chunk numbers its text layers from 0."""
    layers = chunk.language_model.decoder.layers
    return _TEXT_LAYER.sub(lambda number: str(layers[int(number[0])].layer_number - 1), name)


class MagnitudeLinear(DoRALinear):
    """A linear layer under DoRA: rows of W + BA are scaled to learned norms, the bias is unchanged.

    Megatron-Bridge's own also scales the bias if the layer has added it, and expects inputs of three dimensions.
    """

    def _get_weight_norm(self) -> Tensor:
        with torch.no_grad():
            return super()._get_weight_norm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., in] -> [..., out], and the bias if the layer leaves adding it to the caller."""
        output, bias_to_add, normed = self.base_linear_forward(x)
        if not self._adapter_enabled:
            return output, bias_to_add
        bias = getattr(self.to_wrap, "bias", None)
        added = bias if bias_to_add is None and bias is not None and bias.numel() else None
        product = output if added is None else output - added
        length = self.adapter.get_weight_magnitude() / self._get_weight_norm()
        scaled = length * (product + self.adapter(normed.contiguous()).view_as(product))
        return scaled if added is None else scaled + added, bias_to_add


def let_recompute_see_gradients(chunk: MegatronModule) -> None:
    """Let the inputs of blocks that recompute and have trained parameters require a gradient.

    A recomputed function, and so its parameters, gets no gradient if none of its inputs requires one. Megatron-Bridge
    handles this only if the text model recomputes and no base weight is trained, and then for both towers.
    """
    for block in chunk.modules():
        if isinstance(block, TransformerBlock) and block.config.recompute_granularity is not None:
            block.register_forward_pre_hook(_require_gradient, with_kwargs=True)


def _require_gradient(
    block: TransformerBlock, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    hidden, *rest = args or (kwargs["hidden_states"],)
    if not torch.is_grad_enabled() or hidden is None or hidden.requires_grad:
        return None
    if not any(parameter.requires_grad for parameter in block.layers.parameters()):
        return None
    hidden = hidden.detach().requires_grad_()
    return ((hidden, *rest), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def refuse_dora(peft: DoRA, config: TransformerConfig) -> None:
    """Refuse DoRA that would be trained or saved wrongly: with dropout, or weights split over ranks."""
    if peft.dropout:
        # Megatron-Bridge would pass the difference due to dropout through a fused norm, and apply dropout twice.
        raise ValueError(f"dropout is {peft.dropout}, expected 0: DoRA does not support dropout here")
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        # The norm of a rank's columns is not the norm of the row, and magnitudes are read from one rank.
        if (size := getattr(config, name)) > 1:
            raise ValueError(f"{name} is {size}, expected 1 for DoRA")


def refuse_cut_experts(config: TransformerConfig) -> None:
    """Refuse adapters of experts whose weights are split: the ranks' parts of the inner product are not summed."""
    if (size := config.expert_tensor_parallel_size or 1) > 1:
        raise ValueError(f"expert_tensor_parallel_size is {size}, expected 1 where experts have adapters")


def _refuse_idle_targets(chunk: MegatronModule, peft: PEFT) -> None:
    """Refuse target modules that match nothing in the whole model, of which Megatron-Bridge warns for each stage."""
    rows = expand(family(chunk.config.family).rows(), chunk.config.dimensions())
    layers = {layer for row in rows for layer in (layer_of(row), shared_name(layer_of(row)))}
    layers |= {_whole_name(name, chunk) for name, _ in chunk.named_modules()}

    def matches(pattern: str) -> bool:
        return any(layer.rpartition(".")[2] == pattern or wildcard_match(pattern, layer) for layer in layers)

    # By what a user has written: CanonicalLoRA's "linear_q" is matched by "linear_qkv".
    patterns = getattr(peft, "_alias_to_pattern", {})
    if idle := [target for target, pattern in patterns.items() if not matches(pattern)]:
        raise ValueError(
            f"{type(peft).__name__} has target_modules {idle}, which match no layer of the model{names_meant(idle)}"
        )


def _refuse_wrong_adapters(chunk: MegatronModule, peft: PEFT) -> None:
    kind, config = type(peft).__name__, chunk.config
    adapted = {name: module for name, module in chunk.named_modules() if isinstance(module, AdapterWrapper)}
    if OUTPUT_LAYER in adapted and chunk.share_embeddings_and_output_weights:
        raise ValueError(
            f"{kind} adapts {OUTPUT_LAYER}, whose weight is tied to the embedding here, so that nothing can be merged "
            "into it; expected it in exclude_modules, or target_modules without it"
        )
    for local, module in adapted.items():
        name, part = _whole_name(local, chunk), part_of(local)
        if isinstance(module, LoRALinearSplitQKV) and part is Part.LANGUAGE_MODEL and config.attention_output_gate:
            raise ValueError(
                f"{kind} adapts queries, keys and values of {name} separately, but its weight also holds the rows of "
                "gates: expected another kind, such as qwen3vl_bridge.Qwen3VLLoRA, or target_modules without linear_q, "
                "linear_k, linear_v"
            )
        if isinstance(module, LoRALinearSplitQKV | LoRALinearSplitFC1UpGate):
            missing = [key.removeprefix("adapter_") for key, adapter in module.adapter.items() if adapter is None]
            targets = (f"{name.rpartition('.')[2]}_{key}".replace("linear_qkv_", "linear_") for key in missing)
            if missing:
                raise ValueError(
                    f"{kind} adapts a part of {name}, whose forward needs adapters on all of them; expected "
                    f"target_modules with {', '.join(targets)} too, or none of its parts"
                )
        if is_of_experts(name):
            if isinstance(peft, DoRA):
                raise ValueError(
                    f"{kind} adapts {name}, and Hugging Face's peft does not support DoRA on experts; expected "
                    "target_modules that match no layer of experts, or qwen3vl_bridge.Qwen3VLDoRA, which skips them"
                )
            refuse_cut_experts(config)
            if getattr(peft, "experts_shared_outer_loras", False) and not is_grouped_expert_linear(name):
                raise ValueError(
                    f"experts_shared_outer_loras is True, and {name} belongs to a single expert (moe_grouped_gemm is "
                    f"{config.moe_grouped_gemm}); expected False, because each expert has its own adapter"
                )
        if any(parameter.requires_grad for parameter in module.to_wrap.parameters()):
            flag = f"freeze_{part.value}"
            raise ValueError(
                f"{flag} is False, and {name} has an adapter: its base weight would be trained but not saved in "
                f"Megatron-Bridge's checkpoints; expected {flag}=True, target_modules of other parts (such as "
                "'*language_model*.linear_qkv'), or qwen3vl_bridge.Qwen3VLLoRA, which saves both"
            )
