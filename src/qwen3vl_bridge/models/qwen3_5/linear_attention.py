"""Linear attention of the text model: megatron-core's GatedDeltaNet corrected, and the specs of layers with it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.models.layer_specs import LocalBackend, backend, decoder_block_spec
from qwen3vl_bridge.models.qwen3_5 import delta_rule
from qwen3vl_bridge.models.qwen3_5.table import linear_attention_rows
from qwen3vl_bridge.weights.rows import MAGNITUDE, MARK, OUT

import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

# Parameters that are in float32 in a model of 16 bits too.
_FLOAT32 = tuple(row.megatron.rpartition("self_attention.")[2] for row in linear_attention_rows() if row.float32)


class LinearAttention(GatedDeltaNet):
    """GatedDeltaNet without device synchronizations for packed rows, and with its decays and output norm in float32.

    In addition, adapters of its input projection are saved in the same sections as the projection, so that they can be
    loaded with another tensor-parallel size.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in _FLOAT32:
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearAttention:
        """Keep float32 parameters when the model is cast to 16 bits, which all wrappers do by this method."""
        before = {name: self.get_parameter(name).data for name in _FLOAT32}
        super()._apply(fn, recurse)
        for name, data in before.items():
            parameter = self.get_parameter(name)
            if parameter.dtype.itemsize < data.dtype.itemsize:
                parameter.data = data.to(parameter.device)
        return self

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        # flash-linear-attention's chunked kernels round float32 to TF32 in their products.
        if self.config.params_dtype is torch.float32:
            self.gated_delta_rule = delta_rule.chunk_gated_delta_rule

    def _resolve_cu_seqlens(
        self, cu_seqlens_padded: Tensor | None, cu_seqlens_actual: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        # megatron-core checks on the host that the offsets match the row, which synchronizes; those of a layout always
        # do.
        return cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded

    def fused_projection(self) -> tuple[nn.Module, list[int]]:
        """`in_proj`, and this rank's rows of its sections."""
        return self.in_proj, list(self.in_proj_split_sections)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Like megatron-core's, which splits the projection into sections; also splits the rows of its adapters, and
        ModelOpt's scales of each output.

        Each rank holds its part of every section, concatenated, so that concatenating the ranks' rows would not restore
        the order of the full tensor.
        """
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        sections = list(self.in_proj_split_sections)
        for name in (f"{prefix}in_proj{rows}" for rows in (MARK + OUT, MARK + MAGNITUDE, ".weight_quantizer._amax")):
            if name in state and state[name].local_shape[0] == sum(sections):
                state[name] = _split_tensor_factory(state[name], sections, self.in_proj_split_names, 0)
        return state


def text_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Layer specs of the text decoder for one pipeline stage."""
    block = _with_attention_everywhere(config, vp_stage, pp_rank)
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


@functools.cache
def _in_16_bits(base: type[nn.Module]) -> type[nn.Module]:
    """A linear layer of Transformer Engine that neither stores its weight nor computes in fewer bits."""
    from transformer_engine.pytorch import fp8_autocast, fp8_model_init

    class LinearIn16Bits(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with fp8_model_init(enabled=False):
                super().__init__(*args, **kwargs)

        def forward(self, x: Tensor) -> Any:
            with fp8_autocast(enabled=False):
                return super().forward(x)

    return LinearIn16Bits


def linear_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Spec of linear attention; with Transformer Engine the input norm is fused into the first projection."""
    modules = backend(config)
    local = isinstance(modules, LocalBackend)
    in_proj = modules.column_parallel_linear() if local else modules.column_parallel_layer_norm_linear()
    if "in_proj" in getattr(config, "layers_in_16_bits", ()):
        in_proj = _in_16_bits(in_proj)
    return ModuleSpec(
        module=LinearAttention,
        submodules=GatedDeltaNetSubmodules(
            in_proj=in_proj,
            out_norm=modules.layer_norm(rms_norm=True, for_qk=False),
            out_proj=modules.row_parallel_linear(),
        ),
    )
