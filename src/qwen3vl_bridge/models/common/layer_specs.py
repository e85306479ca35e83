"""Layer specs of the text decoder and the vision tower, with and without Transformer Engine, and torch's norms."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from qwen3vl_bridge.models.common.attention import SegmentAttention
from qwen3vl_bridge.models.common.moe import BalancedRouter, GroupedExperts, MemoryEfficientMoELayer
from qwen3vl_bridge.models.common.rope import RotarySelfAttention
from qwen3vl_bridge.upstream.dynamic_shapes import call_compiled

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


def _norm_class(base: type[nn.Module]) -> type[nn.Module]:
    class Norm(base):
        """A torch norm with megatron-core's constructor arguments. Its parameters have the flag `sequence_parallel`."""

        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel

    Norm.__name__ = Norm.__qualname__ = base.__name__
    return Norm


RMSNorm = _norm_class(nn.RMSNorm)
LayerNorm = _norm_class(nn.LayerNorm)


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm with the factor 1 + weight, in float32. Source: transformers, Qwen3_5RMSNorm."""

    zero_centered_gamma = True  # Transformer Engine's attribute, which ModelOpt's exporter reads

    def reset_parameters(self) -> None:
        """Set the weight to zeros, so that the factor 1 + weight is 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., h] over the last dimension."""
        return call_compiled(_zero_centered_norm, x.flatten(0, -2), others=(self.weight, self.eps)).view(x.shape)


def _zero_centered_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


class LocalBackend(LocalSpecProvider):
    """Backend of layer specs without Transformer Engine: torch norms, SegmentAttention and GroupedExperts."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type[nn.Module]:
        """Return the class of a norm: LayerNorm, or for `rms_norm` the RMSNorm variant that the model uses."""
        if not rms_norm:
            return LayerNorm
        return ZeroCenteredRMSNorm if self.config.layernorm_zero_centered_gamma else RMSNorm

    def core_attention(self) -> type[SegmentAttention]:
        """Return the class of core attention, which calls torch's attention kernels."""
        return SegmentAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> functools.partial[GroupedExperts]:
        """Return a constructor of experts that compute each linear layer as one grouped matrix product."""
        return functools.partial(GroupedExperts, **super().grouped_mlp_modules(moe_use_grouped_gemm).keywords)


def backend(config: TransformerConfig) -> BackendSpecProvider:
    """Return the backend of layer specs, a class for each module, that `config.transformer_impl` selects.

    Raises:
        ModuleNotFoundError: Transformer Engine is selected and not installed.
        ValueError: `transformer_impl` is neither 'local' nor 'transformer_engine'.
    """
    if config.transformer_impl == "local":
        return LocalBackend(config)
    if config.transformer_impl != "transformer_engine":
        raise ValueError(f"transformer_impl is {config.transformer_impl!r}, expected 'transformer_engine' or 'local'")
    if not HAVE_TE:
        raise ModuleNotFoundError("Transformer Engine is not installed: install it, or set transformer_impl='local'")
    return TESpecProvider()


def _adapt(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Set this package's attention, experts and (in a local layer spec) norms in a layer spec. Return the spec."""
    layer, attention = spec.submodules, spec.submodules.self_attention
    attention.module = RotarySelfAttention
    has_experts = isinstance(layer.mlp, functools.partial) and layer.mlp.func in (MoELayer, MemoryEfficientMoELayer)
    modules = backend(config)
    is_local = isinstance(modules, LocalBackend)
    if has_experts:
        changes: dict[str, Any] = dict(router=BalancedRouter)
        if is_local:
            changes["experts"] = modules.grouped_mlp_modules(config.moe_grouped_gemm)
        submodules = dataclasses.replace(layer.mlp.keywords["submodules"], **changes)
        layer.mlp = functools.partial(
            MemoryEfficientMoELayer, *layer.mlp.args, **layer.mlp.keywords | dict(submodules=submodules)
        )
    if not is_local:
        return spec
    norm = modules.layer_norm(rms_norm=config.normalization == "RMSNorm")
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention.submodules.core_attention = modules.core_attention()
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    if has_experts:
        # Checkpoints have the names of the Transformer Engine spec, where the norm before experts is a separate module.
        # megatron-core's key map is for dense layers, where the norm belongs to `linear_fc1`.
        layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return spec


def decoder_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Return the layer specs of a pipeline stage of the decoder, with full attention in every layer."""
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
    """Return the layer specs of the vision tower, with full attention within a frame.

    There is no final norm, because each merger has its own.
    """
    if isinstance(backend(config), LocalBackend):
        make_spec = functools.partial(get_gpt_layer_local_spec, normalization=config.normalization)
    else:
        make_spec = get_gpt_layer_with_transformer_engine_spec
    specs = [_adapt(make_spec(qk_layernorm=False), config) for _ in range(config.num_layers)]
    for spec in specs:
        spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=IdentityOp)
