"""A loaded model has the names and values that Megatron-Bridge's own bridge of the family gives, tensor by tensor."""

from __future__ import annotations

from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.training.checkpointing.model_loading import load_model
from qwen3vl_bridge.weights.names import local_name
from qwen3vl_bridge.weights.rows import expand

import pytest
import torch
from megatron.bridge.models.qwen_vl.qwen35_vl_bridge import Qwen35VLBridge, Qwen35VLMoEBridge
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig


def module_of(model: nn.Module, name: str) -> nn.Module:
    """The module of a parameter; one expert's has its weight under the name that the first of grouped ones has too.

    Transformer Engine's grouped layers, which the mappings are made for, hold experts as weight0, weight1 and so on.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    if ".experts." in name:
        module.weight0 = module.weight
    return module


@pytest.mark.parametrize("kind", ["dense", "moe", "3.6"])
def test_every_parameter_is_megatron_bridges(qwen3_5_folders, kind):
    folder = qwen3_5_folders[kind]
    (model,) = load_model(folder)
    stored = load_file(folder / "model.safetensors")
    bridge = (Qwen35VLBridge if kind == "dense" else Qwen35VLMoEBridge)()
    state = SimpleNamespace(source=SimpleNamespace(get_all_keys=lambda: list(stored)))
    bridge.hf_pretrained = SimpleNamespace(state=state, config=AutoConfig.from_pretrained(folder))
    registry, parameters = bridge.mapping_registry(), dict(model.named_parameters())
    config = ModelConfig(folder)
    layout = config.expert_layout({name: tuple(tensor.shape) for name, tensor in stored.items()})
    rows = list(expand(family("qwen3_5").rows(layout), model.config.dimensions()))
    assert {local_name(row.megatron) for row in rows} == parameters.keys()
    for row in rows:
        mapping, name = registry.megatron_to_hf_lookup(row.megatron), local_name(row.megatron)
        assert mapping is not None, row.megatron
        hf = mapping.hf_param
        given = stored[hf] if isinstance(hf, str) else {part: stored[one] for part, one in hf.items()}
        theirs = mapping.hf_to_megatron(given, module_of(model, name))
        assert torch.equal(theirs, parameters[name]), row.megatron
