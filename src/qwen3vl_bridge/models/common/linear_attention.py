"""Linear attention of the text model: a subclass of megatron-core's GatedDeltaNet, and layer specs that use it."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.config.divisibility import CHUNKWISE, resolve_linear_cp_mode
from qwen3vl_bridge.core.collectives import gather_in_group, sum_in_group
from qwen3vl_bridge.models.common import delta_rule
from qwen3vl_bridge.models.common.attention import HostPackedSeqParams
from qwen3vl_bridge.models.common.chunkwise import chunks_of, continue_rule
from qwen3vl_bridge.models.common.decoding import has_tokens, prompt_lengths
from qwen3vl_bridge.models.common.layer_specs import LocalBackend, backend, decoder_block_spec
from qwen3vl_bridge.upstream.gated_delta_kernels import without_package_check
from qwen3vl_bridge.upstream.gated_delta_net import GatedDeltaRule, SegmentedGatedDeltaNet, SingleRank
from qwen3vl_bridge.upstream.modelopt_layers import WEIGHT_SCALES
from qwen3vl_bridge.upstream.module_casts import KeepFloat32
from qwen3vl_bridge.weights.hybrid_rows import TEXT_LAYER, linear_attention_rows
from qwen3vl_bridge.weights.rows import ADAPTER_MARK, LINEAR_OUT, MAGNITUDE

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net.common import get_parameter_local_cp, tensor_a2a_cp2hp, tensor_a2a_hp2cp
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn


class LinearAttention(KeepFloat32, SegmentedGatedDeltaNet):
    """GatedDeltaNet without host-device synchronizations for packed rows, with decays and output norm in float32.

    Adapters of the input projection are saved in the same sections as the projection, so that they can be loaded with
    another tensor-parallel size.
    """

    float32_parameters = tuple(
        row.megatron.rpartition("self_attention.")[2] for row in linear_attention_rows(*TEXT_LAYER) if row.float32
    )

    def __init__(
        self, config: TransformerConfig, *args: Any, pg_collection: ProcessGroupCollection, **kwargs: Any
    ) -> None:
        delta_rule.choose_kernels()
        # With chunk-wise context parallelism the layer computes its own tokens, as without context parallelism.
        self.chunk_group = None
        mode, sizes = getattr(config, "linear_cp_mode", None), (pg_collection.tp.size(), pg_collection.cp.size())
        heads = config.linear_num_key_heads, config.linear_num_value_heads
        if resolve_linear_cp_mode(mode, *heads, *sizes) == CHUNKWISE:
            self.chunk_group, pg_collection = pg_collection.cp, copy.copy(pg_collection)
            pg_collection.cp = SingleRank()
        with without_package_check():
            super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.cast_to_float32()

    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return SiLU (in some families sigmoid) of a float32 gate, the factor by which the output is multiplied."""
        return torch.sigmoid(gate) if getattr(self.config, "linear_output_gate", "silu") == "sigmoid" else F.silu(gate)

    def choose_delta_rule(self, default: GatedDeltaRule | None) -> GatedDeltaRule:
        """Return the function that computes the delta rule. `default` is the function that megatron-core would use."""
        # flash-linear-attention's chunked kernels round float32 to TF32 in their products.
        if self.config.params_dtype is torch.float32:
            return continue_rule(delta_rule.chunk_gated_delta_rule)
        if self.config.deterministic_mode:
            return default
        if delta_rule.uses_torch_functions():
            return continue_rule(delta_rule.chunk_gated_delta_rule)
        return continue_rule(delta_rule.with_chunks(default))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute linear attention as GatedDeltaNet does, and pass the chunks of a packed row to the kernels.

        With `linear_cp_mode="chunkwise"`, GatedDeltaNet computes only this rank's tokens, and treats each of the two
        chunks of a segment as a segment. The kernels continue the previous chunks of other ranks (`chunkwise.py`).

        With an `inference_context`, states are stored in the context; see `decoding.py`.
        """
        if inference_context is not None:
            return self.infer(hidden_states, inference_context)
        if self.chunk_group is not None and packed_seq_params is not None:
            packed_seq_params = packed_seq_params.rank_chunks(self.chunk_group.size())
        row = packed_seq_params if isinstance(packed_seq_params, HostPackedSeqParams) else None
        with delta_rule.packed_row(row), self.exchange_chunks():
            return super().forward(hidden_states, attention_mask, None, packed_seq_params, *args, **kwargs)

    def exchange_chunks(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which kernels continue chunks of other ranks.

        Without `chunk_group`, the context manager does nothing. `chunk_group` is the context-parallel
        group if this layer uses `linear_cp_mode="chunkwise"`.
        """
        return contextlib.nullcontext() if self.chunk_group is None else chunks_of(self.chunk_group)

    def infer(self, hidden_states: Tensor, context: BaseInferenceContext) -> tuple[Tensor, Tensor | None]:
        """Compute linear attention of padded rows [s / sp, b, h], or of one new token of each row.

        Store the last inputs of the convolution, and the state of the delta rule after the last real token, in
        `context`. Under context parallelism each rank computes all tokens of some of the heads. With
        `linear_cp_mode="chunkwise"`, it computes all heads of its own tokens of the prompt, and of new tokens.
        """
        projected, _ = self.in_proj(hidden_states)
        step, decodes, cp = len(projected), has_tokens(context), self.pg_collection.cp
        if decodes:  # only the first token is real; every rank has it
            projected = get_parameter_local_cp(projected[:1], -1, cp, list(self.in_proj_split_sections))
        else:
            projected = tensor_a2a_cp2hp(projected, 0, -1, cp, list(self.in_proj_split_sections))
        inputs, gate, beta, alpha = projected.transpose(0, 1).split(self.feat_dim_split, -1)
        (rows, tokens), kept = inputs.shape[:2], self.conv_kernel_dim - 1
        if decodes:
            window, state = (x.transpose(0, 1) for x in context.key_value_memory_dict[self.layer_number])
            window = torch.cat((window, inputs), 1)
            weight, bias = self.convolution_weights()
            convolved = (window.float() * weight.T.float()).sum(1, keepdim=True)
            convolved = self.act_fn(convolved if bias is None else convolved + bias).to(inputs.dtype)
            query, key, value, decay, beta = self.prepare_rule(convolved, gate, beta, alpha)
            output, state = delta_rule.recurrent_gated_delta_rule(query, key, value, decay, beta, state)
        else:
            lengths = prompt_lengths(context, rows, tokens, inputs.device)[:, None]
            position = torch.arange(tokens, device=inputs.device) if self.chunk_group is None else context.columns
            last = lengths - kept + torch.arange(kept, device=inputs.device)
            is_last = (position[:, None] == last[:, None]).to(inputs.dtype)
            window = torch.einsum("bsk,bsc->bkc", is_last, inputs)  # zeros before the first token
            if self.chunk_group is not None:
                window = sum_in_group(window, self.chunk_group)
            is_real = (position < lengths)[..., None]
            with self.exchange_chunks():
                query, key, value, decay, beta = self.prepare_rule(self.convolve(inputs), gate, beta, alpha)
                decay, beta = decay * is_real, beta * is_real  # padding changes no state
                output, state = self.gated_delta_rule(
                    query, key, value, g=decay, beta=beta, cu_seqlens=None, output_final_state=True
                )
        context.key_value_memory_dict[self.layer_number] = tuple(x.transpose(0, 1) for x in (window[:, -kept:], state))
        output = self.gated_norm(output, gate).transpose(0, 1).contiguous()
        if not decodes:
            output = tensor_a2a_hp2cp(output, 0, -1, cp)
        elif cp.size() > 1:
            output = gather_in_group(output, cp).movedim(0, -2).flatten(-2)
        return self.out_proj(F.pad(output, (0, 0, 0, 0, 0, step - len(output))))

    def fused_projection(self) -> tuple[nn.Module, list[int]]:
        """Return `in_proj` and the number of rows of each of its sections on this rank."""
        return self.in_proj, list(self.in_proj_split_sections)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the sharded state dict. Adapters and ModelOpt's scales are split into sections like the projection."""
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        local_rows = sum(self.in_proj_split_sections)
        for name in (
            f"{prefix}in_proj{rows}" for rows in (ADAPTER_MARK + LINEAR_OUT, ADAPTER_MARK + MAGNITUDE, WEIGHT_SCALES)
        ):
            if name in state and state[name].local_shape[0] == local_rows:
                state[name] = self.split_sections(state[name])
        return state


def text_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Return the layer specs of a pipeline stage of the text decoder, with linear or full attention in each layer."""
    block = _full_attention_block(config, vp_stage, pp_rank)
    if (layout := config.pipeline_model_parallel_layout) is not None:
        first = layout.get_layer_offset(vp_stage=vp_stage, pp_rank=pp_rank)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    is_linear = get_linear_attention_pattern(config)
    block.layer_specs = [
        _with_linear_attention(spec, config) if is_linear[number] else spec
        for number, spec in enumerate(block.layer_specs, first)
    ]
    return block


def full_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a full-attention layer, also on a pipeline stage without decoder layers."""
    unsharded = copy.copy(config)
    unsharded.pipeline_model_parallel_size = 1
    unsharded.virtual_pipeline_model_parallel_size = unsharded.pipeline_model_parallel_layout = None
    return _full_attention_block(unsharded, None, 0).layer_specs[-1]


def _full_attention_block(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Return the layer specs of a pipeline stage, with full attention in every layer."""
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return decoder_block_spec(plain, vp_stage, pp_rank)


def _with_linear_attention(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    changes: dict[str, Any] = {"self_attention": linear_attention_spec(config)}
    if isinstance(backend(config), LocalBackend):
        # Checkpoints use the names of the Transformer Engine spec. megatron-core's key map fits only a QKV projection.
        names = spec.submodules.sharded_state_dict_keys_map
        changes["sharded_state_dict_keys_map"] = names | {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    else:
        changes["input_layernorm"] = IdentityOp  # Transformer Engine fuses it into the projection
    return replace(spec, submodules=replace(spec.submodules, **changes))  # a copy, because layers share specs


@functools.cache
def _linear_in_16_bits(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a Transformer Engine linear layer that never uses FP8 for its weight and products."""
    from transformer_engine.pytorch import fp8_autocast, fp8_model_init

    class LinearIn16Bits(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with fp8_model_init(enabled=False):
                super().__init__(*args, **kwargs)

        def forward(self, x: Tensor) -> Any:
            with fp8_autocast(enabled=False):
                return super().forward(x)

    return LinearIn16Bits


def input_projection(config: TransformerConfig, linear: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the input projection: `linear`, or a subclass of it that never uses FP8.

    The subclass is used if the configuration lists "in_proj" in `layers_in_16_bits`.
    """
    return _linear_in_16_bits(linear) if "in_proj" in getattr(config, "layers_in_16_bits", ()) else linear


def linear_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of linear attention. Transformer Engine fuses the input norm into the first projection."""
    modules = backend(config)
    is_local = isinstance(modules, LocalBackend)
    in_proj = modules.column_parallel_linear() if is_local else modules.column_parallel_layer_norm_linear()
    return ModuleSpec(
        module=LinearAttention,
        submodules=GatedDeltaNetSubmodules(
            in_proj=input_projection(config, in_proj),
            out_norm=modules.layer_norm(rms_norm=True, for_qk=False),
            out_proj=modules.row_parallel_linear(),
        ),
    )
