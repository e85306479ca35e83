"""Megatron-Bridge's own Qwen3.5-VL on a machine without Transformer Engine."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.weights.names import local_name

import torch
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.qwen_vl import qwen35_vl_provider
from megatron.bridge.models.qwen_vl.qwen35_vl_bridge import Qwen35VLBridge, Qwen35VLMoEBridge
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from tests.model.checkpoints.stock_models import SAVED_WITH_EXPERTS, SAVED_WITH_TE, _local_layers

from .tiny import one_rank


def stock_bridge(folder: Path) -> Any:
    """Its own bridge of a Hugging Face folder."""
    config = AutoConfig.from_pretrained(folder)
    bridge = (Qwen35VLMoEBridge if config.model_type == "qwen3_5_moe" else Qwen35VLBridge)()
    names = list(load_file(folder / "model.safetensors"))
    state = SimpleNamespace(source=SimpleNamespace(get_all_keys=lambda: names))
    bridge.hf_pretrained = SimpleNamespace(state=state, config=config)
    return bridge


def module_of(model: nn.Module, name: str) -> nn.Module:
    """The module of a parameter, with the model's configuration, as Megatron-Bridge's loading gives it to each.

    One expert's has its weight under the name that the first of grouped ones has too: Transformer Engine's grouped
    layers, which the mappings are made for, hold experts as weight0, weight1 and so on.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    if not hasattr(module, "config"):
        module.config = model.config
    if ".experts." in name:
        module.weight0 = module.weight
    return module


def stock_values(folder: Path, model: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """What its mappings make of a folder's tensors, by the names of the local layer spec."""
    stored, registry = load_file(folder / "model.safetensors"), stock_bridge(folder).mapping_registry()
    values = {}
    for name in names:
        mapping = registry.megatron_to_hf_lookup(name)
        assert mapping is not None, name
        hf = mapping.hf_param
        given = stored[hf] if isinstance(hf, str) else {part: stored[one] for part, one in hf.items()}
        module = module_of(model, local_name(name))
        values[local_name(name)] = mapping.hf_to_megatron(given, module)
        if ".experts." in name:
            del module.weight0
    return values


def stock_provider(folder: Path, **fields: Any) -> Any:
    """Its provider of a folder, by its own bridge, with these of its fields set."""
    provider = stock_bridge(folder).provider_bridge(PreTrainedCausalLM.from_pretrained(folder))
    for name, value in fields.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    return provider


def build_stock(folder: Path) -> nn.Module:
    """Its model, without values; its configuration in the end is as where Transformer Engine is."""
    provider = stock_provider(folder)
    given = {name: getattr(provider, name) for name in ("transformer_layer_spec", "layernorm_zero_centered_gamma")}
    kernels = SAVED_WITH_TE | (SAVED_WITH_EXPERTS if provider.num_moe_experts else {})
    for name in kernels:
        setattr(provider, name, False)
    provider.transformer_impl, provider.transformer_layer_spec = "local", _layers
    provider.layernorm_zero_centered_gamma = False  # torch's norm refuses it
    made = gpt_layer_specs.get_gpt_mtp_block_spec
    with (
        _local_layers(),
        mock.patch.object(qwen35_vl_provider, given["transformer_layer_spec"].__name__, _layers),
        mock.patch.object(
            gpt_layer_specs,
            "get_gpt_mtp_block_spec",
            lambda config, spec, use_transformer_engine, **more: made(config, spec, False, **more),
        ),
    ):
        provider.finalize()
        (model,) = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=one_rank()
        )
    assert type(model).__module__.startswith("megatron.bridge."), type(model)
    for name, value in (given | kernels).items():
        setattr(provider, name, value)
    return model


def _layers(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> TransformerBlockSubmodules:
    full = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    if config.num_moe_experts:  # Transformer Engine's spec has the norm before experts as a module too
        full.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
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
