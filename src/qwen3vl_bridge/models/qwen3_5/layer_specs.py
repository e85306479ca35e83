"""Layer specs of the text model: linear attention and gated attention in turn, with and without Transformer Engine.

What lives here: which layers are which, and what they are made of. What may not: the modules themselves
(`linear_attention.py`, `models/common/attention.py`), what all families' layers share (`models/common/layer_specs.py`).
"""

from __future__ import annotations

from qwen3vl_bridge.models.common.layer_specs import LocalBackend, backend
from qwen3vl_bridge.models.common.norms import rms_norm
from qwen3vl_bridge.models.qwen3_5.linear_attention import LinearAttention

from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def linear_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Linear attention; with Transformer Engine the norm before it is a part of its first projection."""
    modules = backend(config)
    local = isinstance(modules, LocalBackend)
    return ModuleSpec(
        module=LinearAttention,
        submodules=GatedDeltaNetSubmodules(
            in_proj=modules.column_parallel_linear() if local else modules.column_parallel_layer_norm_linear(),
            out_norm=rms_norm(config) if local else modules.layer_norm(rms_norm=True, for_qk=False),
            out_proj=modules.row_parallel_linear(),
        ),
    )
