"""The layers of both towers: specs with and without Transformer Engine, and torch's norms."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from qwen3vl_bridge.models.compilation import run_by_token
from qwen3vl_bridge.models.core_attention import SegmentAttention
from qwen3vl_bridge.models.experts import GroupedExperts
from qwen3vl_bridge.models.rope import RotarySelfAttention
from qwen3vl_bridge.models.router import BalancedRouter, ReleasingMoELayer

import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def _with_config(base: type[nn.Module]) -> type[nn.Module]:
    class Norm(base):
        """torch's norm with megatron-core's constructor; its gradients are reduced under sequence parallelism."""

        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel

    Norm.__name__ = Norm.__qualname__ = base.__name__
    return Norm


RMSNorm = _with_config(nn.RMSNorm)
LayerNorm = _with_config(nn.LayerNorm)


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm times 1 + weight, in float32. Source: transformers, Qwen3_5RMSNorm."""

    zero_centered_gamma = True  # as Transformer Engine's says it; ModelOpt's exporter asks

    def reset_parameters(self) -> None:
        """Initialise for a factor of one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return run_by_token(_zero_centered, x.flatten(0, -2), others=(self.weight, self.eps)).view(x.shape)


def _zero_centered(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


class LocalBackend(LocalSpecProvider):
    """Modules without Transformer Engine: torch norms and our core attention, even if it is installed."""

    def __init__(self, config: TransformerConfig) -> None:
        """Choose the modules for a model."""
        self.config = config

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type[nn.Module]:
        """RMSNorm, zero-centred if the model's are, or LayerNorm."""
        if not rms_norm:
            return LayerNorm
        return ZeroCenteredRMSNorm if self.config.layernorm_zero_centered_gamma else RMSNorm

    def core_attention(self) -> type[SegmentAttention]:
        """Attention by torch's kernels."""
        return SegmentAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> functools.partial[GroupedExperts]:
        """megatron-core's experts, computed together."""
        return functools.partial(GroupedExperts, **super().grouped_mlp_modules(moe_use_grouped_gemm).keywords)


def backend(config: TransformerConfig) -> BackendSpecProvider:
    """The modules that `config.transformer_impl` names.

    Raises:
        ModuleNotFoundError: Transformer Engine is requested and not installed.
        ValueError: an implementation that this model does not have.
    """
    if config.transformer_impl == "local":
        return LocalBackend(config)
    if config.transformer_impl != "transformer_engine":
        raise ValueError(f"transformer_impl is {config.transformer_impl!r}, expected 'transformer_engine' or 'local'")
    if not HAVE_TE:
        raise ModuleNotFoundError("transformer_impl is 'transformer_engine', which is not installed; use 'local'")
    return TESpecProvider()


def _adapt(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """A layer's spec with our attention and experts; without Transformer Engine, with torch's norms and kernels."""
    layer, attention = spec.submodules, spec.submodules.self_attention
    attention.module = RotarySelfAttention
    has_experts = isinstance(layer.mlp, functools.partial) and layer.mlp.func in (MoELayer, ReleasingMoELayer)
    local = chosen if isinstance(chosen := backend(config), LocalBackend) else None
    if has_experts:
        changes: dict[str, Any] = dict(router=BalancedRouter)
        if local:
            changes["experts"] = local.grouped_mlp_modules(config.moe_grouped_gemm)
        modules = dataclasses.replace(layer.mlp.keywords["submodules"], **changes)
        layer.mlp = functools.partial(
            ReleasingMoELayer, *layer.mlp.args, **layer.mlp.keywords | dict(submodules=modules)
        )
    if local is None:
        return spec
    norm = local.layer_norm(rms_norm=config.normalization == "RMSNorm")
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention.submodules.core_attention = local.core_attention()
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    if has_experts:
        # Checkpoints use the names of the Transformer Engine spec, in which the norm before experts is also a separate
        # module. megatron-core's map is for dense layers, in which it is a part of `linear_fc1`.
        layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return spec


def decoder_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Layer specs for one pipeline stage of a decoder with full attention in every layer."""
    modules = backend(config)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=not isinstance(modules, LocalBackend),
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    for spec in block.layer_specs:
        _adapt(spec, config)
    block.layer_norm = modules.layer_norm(rms_norm=config.normalization == "RMSNorm")
    return block


def vision_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The vision tower's layers: full attention within a frame, no final norm (each merger has its own)."""
    if isinstance(backend(config), LocalBackend):
        make_spec = functools.partial(get_gpt_layer_local_spec, normalization=config.normalization)
    else:
        make_spec = get_gpt_layer_with_transformer_engine_spec
    specs = [_adapt(make_spec(qk_layernorm=False), config) for _ in range(config.num_layers)]
    for spec in specs:
        spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=IdentityOp)
