"""Layer specs of Qwen3.8-Flash-Next: hybrid layers with gated residuals, sparse attention and n-gram embeddings."""

from __future__ import annotations

import dataclasses
from typing import Any

from qwen3vl_bridge.models.common.attention import physical_layout
from qwen3vl_bridge.models.common.layer_specs import backend
from qwen3vl_bridge.models.common.linear_attention import (
    LinearAttention,
    full_attention_spec,
    input_projection,
    text_block_spec,
)
from qwen3vl_bridge.models.qwen4_exp.ngram_embedding import NgramInjection
from qwen3vl_bridge.models.qwen4_exp.residual import GatedResidual, inject
from qwen3vl_bridge.models.qwen4_exp.sparse_attention import SparseSelfAttention, sparse_core_attention

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class StreamLayer(TransformerLayer):
    """A text layer whose hidden states are the streams of a gated residual, [s, b, n * h].

    Some layers first add an n-gram embedding to the streams. The n-gram ids are the `context` that megatron-core passes
    to every layer, also under recomputation.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        layer = self.layer_number - 1
        self.ple: NgramInjection | None = None
        if layer in config.ple_layers and not self.is_mtp_layer:
            rows = config.ngram_table_rows(config.ple_layers.index(layer))
            self.ple = NgramInjection(config, rows, self.pg_collection)

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer on streams [s / sp, b, n * h]. Return streams, and n-gram ids for later layers.

        Args:
            hidden_states: the streams.
            args, kwargs: the other arguments of TransformerLayer.
            context: [layers with an n-gram embedding, s / sp, b, hash heads] int64, ids in the n-gram tables.
            context_mask: None.
            packed_seq_params: parameters of a packed row; None for padded rows.
        """
        if self.ple is not None:
            ranks = self.config.context_parallel_size * (self.tp_group.size() if self.config.sequence_parallel else 1)
            tokens, rows, _ = hidden_states.shape
            layout = physical_layout(packed_seq_params, rows, ranks * tokens, hidden_states.device)
            ids = context[self.config.ple_layers.index(self.layer_number - 1)]
            hidden_states = hidden_states + self.ple(hidden_states, ids, layout)
        output, _ = super().forward(
            hidden_states, *args, context=None, context_mask=None, packed_seq_params=packed_seq_params, **kwargs
        )
        # The last layer with an n-gram embedding still returns the ids. Later layers return None, to free their memory.
        return output, context if self.layer_number <= max(self.config.ple_layers, default=0) else None


def stream_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Return the layer specs of a pipeline stage of the text decoder. The model mixes the streams at its end."""
    block = text_block_spec(config, vp_stage, pp_rank)
    layers = [_with_streams(spec, config) for spec in block.layer_specs]
    return dataclasses.replace(block, layer_specs=layers, layer_norm=IdentityOp)


def prediction_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of the layer of multi-token prediction, which has full attention."""
    return _with_streams(full_attention_spec(config), config)


def _with_streams(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Return a copy of a layer spec with gated residuals and sparse attention.

    `GatedResidual` replaces the two norms. If the layer has full attention, `SparseSelfAttention` replaces it.
    """
    modules, layer = backend(config), spec.submodules
    attention, projection = layer.self_attention, modules.column_parallel_linear()  # without a norm before it
    if attention.module is LinearAttention:
        submodules = dataclasses.replace(attention.submodules, in_proj=input_projection(config, projection))
        attention = dataclasses.replace(attention, submodules=submodules)
    else:
        core = sparse_core_attention(attention.submodules.core_attention)
        submodules = dataclasses.replace(attention.submodules, linear_qkv=projection, core_attention=core)
        attention = dataclasses.replace(attention, module=SparseSelfAttention, submodules=submodules)
    layer = dataclasses.replace(
        layer,
        input_layernorm=GatedResidual,
        pre_mlp_layernorm=GatedResidual,
        self_attention=attention,
        self_attn_bda=inject,
        mlp_bda=inject,
        sharded_state_dict_keys_map={},  # the map would name norms as if they were fused
    )
    return dataclasses.replace(spec, module=StreamLayer, submodules=layer)
