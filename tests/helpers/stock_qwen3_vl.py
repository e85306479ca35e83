"""Megatron-Bridge's own Qwen3-VL with megatron-core's local layers, which run without Transformer Engine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.training.process_groups import initialize

import torch
import yaml
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.qwen_vl import qwen3_vl_bridge, qwen3_vl_provider
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model as qwen3_vl_model
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.model_load_save import save_megatron_model
from megatron.bridge.utils.yaml_utils import safe_yaml_representers
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

# Defaults of a provider where Transformer Engine is installed.
SAVED_WITH_TE = dict(transformer_impl="transformer_engine", gradient_accumulation_fusion=True, persist_layer_norm=True)
SAVED_WITH_EXPERTS = dict(moe_grouped_gemm=True, moe_permute_fusion=True)


def stock_provider(folder: Path, **fields: Any) -> Any:
    return _bridge(PreTrainedCausalLM.from_pretrained(folder), fields)[1]


def as_saved(provider: Any) -> dict[str, Any]:
    """Return a provider as `run_config.yaml` stores it."""
    with safe_yaml_representers():
        return yaml.safe_load(yaml.safe_dump(ConfigContainer._convert_value_to_dict(provider)))


def save_stock(folder: Path, checkpoint: Path, **fields: Any) -> None:
    """Build Megatron-Bridge's model, load the weights of a Hugging Face folder, and save the model."""
    model, provider = _built(folder, fields)
    for name, value in (SAVED_WITH_TE | (SAVED_WITH_EXPERTS if provider.num_moe_experts else {})).items():
        setattr(provider, name, value)
    save_megatron_model([model], checkpoint)


def build_stock(folder: Path, **fields: Any) -> torch.nn.Module:
    """Build Megatron-Bridge's model with the weights of a Hugging Face folder."""
    return _built(folder, fields)[0]


def _built(folder: Path, fields: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    hf = PreTrainedCausalLM.from_pretrained(folder)
    bridge, provider = _bridge(hf, fields)
    with local_layers(provider):
        provider.finalize()
        groups = initialize(provider, seed=0)
        (model,) = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups
        )
    assert type(model).__module__.startswith("megatron.bridge."), type(model)
    bridge.load_weights_hf_to_megatron(hf, [model])
    return model, provider


def _bridge(hf: PreTrainedCausalLM, fields: dict[str, Any]) -> tuple[Any, Any]:
    moe = hf.config.model_type == "qwen3_vl_moe"
    bridge = qwen3_vl_bridge.Qwen3VLMoEBridge() if moe else qwen3_vl_bridge.Qwen3VLBridge()
    bridge.hf_pretrained, bridge.hf_config = hf, hf.config
    provider = bridge.provider_bridge(hf)
    for name, value in fields.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    return bridge, provider


@contextlib.contextmanager
def local_layers(provider: Any) -> Iterator[None]:
    """Let a provider of Megatron-Bridge build its model from megatron-core's local layers; changes the provider."""
    for name in (*SAVED_WITH_TE, *SAVED_WITH_EXPERTS):
        setattr(provider, name, False)
    provider.transformer_impl = "local"
    with patched_layer_specs():
        yield


@contextlib.contextmanager
def patched_layer_specs() -> Iterator[None]:
    with (
        mock.patch.object(qwen3_vl_provider, "get_gpt_layer_with_transformer_engine_spec", text_layer),
        mock.patch.object(qwen3_vl_model, "get_vit_layer_with_transformer_engine_spec", vision_layer),
        mock.patch.object(qwen3_vl_model, "TEColumnParallelLinear", ColumnParallelLinear),
        mock.patch.object(qwen3_vl_model, "TERowParallelLinear", RowParallelLinear),
        mock.patch.object(qwen3_vl_model, "TENorm", WrappedTorchNorm),
    ):
        yield


def text_layer(num_experts: int | None, **_: Any) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    if num_experts:  # Transformer Engine's spec has the norm before experts as a module too
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return spec


def vision_layer() -> ModuleSpec:
    return get_gpt_layer_local_spec(qk_layernorm=False, normalization="LayerNorm")
