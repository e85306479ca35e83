"""Layer specs of the text model: linear and gated attention layers, with and without Transformer Engine."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.models.layer_specs import LocalBackend, backend, decoder_block_spec
from qwen3vl_bridge.models.qwen3_5.linear_attention.layer import LinearAttention

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


def text_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Layer specs of the text decoder for one pipeline stage."""
    block = _with_attention_everywhere(config, vp_stage, pp_rank)
    is_linear = get_linear_attention_pattern(config)
    numbers = _layers_of_stage(config, vp_stage, pp_rank)
    block.layer_specs = [
        _with_linear_attention(spec, config) if is_linear[number] else spec
        for number, spec in zip(numbers, block.layer_specs, strict=True)
    ]
    return block


def full_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Spec of a layer with full attention, also for a stage without decoder layers."""
    whole = copy.copy(config)
    whole.pipeline_model_parallel_size = 1
    whole.virtual_pipeline_model_parallel_size = whole.pipeline_model_parallel_layout = None
    return _with_attention_everywhere(whole, None, 0).layer_specs[-1]


def _with_attention_everywhere(
    config: TransformerConfig, vp_stage: int | None, pp_rank: int
) -> TransformerBlockSubmodules:
    """A stage's layers, all with full attention: megatron-core has no such spec without Transformer Engine."""
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return decoder_block_spec(plain, vp_stage, pp_rank)


def _layers_of_stage(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> list[int]:
    """Global indices of a stage's layers, from 0."""
    if (layout := config.pipeline_model_parallel_layout) is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)))


def _with_linear_attention(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    changes: dict[str, Any] = {"self_attention": linear_attention_spec(config)}
    if isinstance(backend(config), LocalBackend):
        # Checkpoints have the parameter names of the Transformer Engine spec; megatron-core's key map assumes the QKV
        # projection.
        names = spec.submodules.sharded_state_dict_keys_map
        changes["sharded_state_dict_keys_map"] = names | {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    else:
        changes["input_layernorm"] = IdentityOp  # Transformer Engine fuses it into the projection
    return replace(spec, submodules=replace(spec.submodules, **changes))  # layers of the same type share a spec


def linear_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Spec of linear attention; with Transformer Engine the input norm is fused into the first projection."""
    modules = backend(config)
    local = isinstance(modules, LocalBackend)
    return ModuleSpec(
        module=LinearAttention,
        submodules=GatedDeltaNetSubmodules(
            in_proj=modules.column_parallel_linear() if local else modules.column_parallel_layer_norm_linear(),
            out_norm=modules.layer_norm(rms_norm=True, for_qk=False),
            out_proj=modules.row_parallel_linear(),
        ),
    )
