"""Megatron-Bridge's own Qwen3.5-VL with megatron-core's local layers, which run without Transformer Engine."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.upstream.gated_delta_kernels import without_package_check

from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.qwen_vl import qwen35_vl_provider
from megatron.bridge.models.qwen_vl.qwen35_vl_bridge import Qwen35VLBridge, Qwen35VLMoEBridge
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, gdn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from tests.helpers.stock_qwen3_vl import SAVED_WITH_EXPERTS, SAVED_WITH_TE, patched_layer_specs, text_layer
from tests.models.qwen3_5.tiny import one_rank


def make_bridge(config: Any) -> Any:
    """Return Megatron-Bridge's bridge for a configuration."""
    return (Qwen35VLMoEBridge if config.model_type == "qwen3_5_moe" else Qwen35VLBridge)()


def stock_provider(folder: Path, **fields: Any) -> Any:
    """Return Megatron-Bridge's provider for a folder with a configuration."""
    hf = PreTrainedCausalLM.from_pretrained(folder)
    provider = make_bridge(hf.config).provider_bridge(hf)
    for name, value in fields.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    return provider


def build_stock(folder: Path) -> nn.Module:
    provider = stock_provider(folder)
    kernels = SAVED_WITH_TE | (SAVED_WITH_EXPERTS if provider.num_moe_experts else {})
    changed = ("transformer_layer_spec", "layernorm_zero_centered_gamma")
    given = {name: getattr(provider, name) for name in changed} | kernels
    with local_layers(provider):
        provider.finalize()
        (model,) = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=one_rank()
        )
    assert type(model).__module__.startswith("megatron.bridge."), type(model)
    for name, value in given.items():
        setattr(provider, name, value)
    return model


@contextlib.contextmanager
def local_layers(provider: Any) -> Iterator[None]:
    """Let a provider of Megatron-Bridge build its model from megatron-core's local layers; changes the provider.

    Linear attention is built without flash-linear-attention too, with megatron-core's own delta rule in torch.
    """
    layers = provider.transformer_layer_spec.__name__
    for name in (*SAVED_WITH_TE, *SAVED_WITH_EXPERTS):
        setattr(provider, name, False)
    provider.transformer_impl, provider.transformer_layer_spec = "local", _layers
    provider.layernorm_zero_centered_gamma = False  # which torch's norm does not support
    made = gpt_layer_specs.get_gpt_mtp_block_spec
    with (
        without_package_check(),
        mock.patch.object(
            gdn, "chunk_gated_delta_rule", gdn.chunk_gated_delta_rule or gdn.torch_chunk_gated_delta_rule
        ),
        patched_layer_specs(),
        mock.patch.object(qwen35_vl_provider, layers, _layers),
        mock.patch.object(
            gpt_layer_specs,
            "get_gpt_mtp_block_spec",
            lambda config, spec, use_transformer_engine, **more: made(config, spec, False, **more),
        ),
    ):
        yield


def _layers(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> TransformerBlockSubmodules:
    full = text_layer(config.num_moe_experts)
    linear = copy.deepcopy(full)
    linear.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    linear.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    kinds = [linear if is_linear else copy.deepcopy(full) for is_linear in get_linear_attention_pattern(config)]
    return TransformerBlockSubmodules(layer_specs=kinds, layer_norm=WrappedTorchNorm)
