"""What a run's step is reckoned to cost, and what its GPU could do."""

from __future__ import annotations

import re
from dataclasses import replace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H800", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_by_the_drivers_names(device, peak):
    from qwen3vl_bridge.training.metrics import peak_operations

    assert peak_operations(device) == peak


@pytest.mark.parametrize("size", ["2B", "30B-A3B"])
def test_a_provider_has_its_configurations_numbers(size):
    from qwen3vl_bridge.models.flops import Trained, operations_of_a_step, provider_costs, tower_costs
    from qwen3vl_bridge.models.qwen3_vl import presets
    from qwen3vl_bridge.models.qwen3_vl.bridge import provider_from_hf_config
    from qwen3vl_bridge.registry import dimensions_of

    config = presets.hf_config(size).to_dict()
    provider = provider_from_hf_config(config)
    assert provider.dimensions().sizes == dimensions_of(config).sizes
    for trained in (None, Trained(), Trained(language_model=False)):
        assert provider_costs(provider, trained) == tower_costs(config, trained)
    # Before there are batches, Megatron-Bridge asks with rows alone.
    full = tower_costs(config, Trained()).of(tokens=provider.seq_length, patches=0, patch_pairs=0)
    assert operations_of_a_step(provider, batch_size=3) == pytest.approx(3 * full)


def test_adapters_are_counted_by_the_layers_that_they_are_on(inputs, moe_folder):
    from qwen3vl_bridge.models.flops import Trained, provider_costs
    from qwen3vl_bridge.peft.lora import Qwen3VLLoRA
    from qwen3vl_bridge.training.metrics import step_costs

    from megatron.bridge.peft.lora import LoRA

    cfg = inputs.config(None)
    cfg.peft = Qwen3VLLoRA(dim=4, target_modules=["*.layers.1.*.linear_proj"], adapt_vision_model=True)
    expected = Trained(
        language_model=False,
        vision_model=False,
        vision_projection=False,
        rank=lambda name: 4 if name.endswith("layers.1.self_attention.linear_proj") else 0,
    )
    assert step_costs(cfg) == provider_costs(cfg.model, expected)
    cfg.peft.freeze_vision_projection = False
    assert step_costs(cfg) == provider_costs(cfg.model, replace(expected, vision_projection=True))
    cfg.model.freeze_vision_projection = True
    assert step_costs(cfg) == provider_costs(cfg.model, expected)
    cfg.peft = Qwen3VLLoRA(dim=4, target_modules=[], exclude_modules=["linear_fc1"])
    ranks = replace(
        expected, rank=lambda name: 4 * (name.startswith("language_model") and not name.endswith("linear_fc1"))
    )
    assert step_costs(cfg) == provider_costs(cfg.model, ranks)
    cfg.peft = LoRA()
    assert step_costs(cfg) is None
    cfg = replace(inputs, hf=moe_folder, megatron=moe_folder).config(None)
    for experts in (False, True):
        cfg.peft = Qwen3VLLoRA(dim=4, adapt_experts=experts)
        chosen = re.compile(r"language_model\." if experts else r"language_model\.(?!.*experts)")
        ranks = replace(expected, rank=lambda name, chosen=chosen: 4 * bool(chosen.match(name)))
        assert step_costs(cfg) == provider_costs(cfg.model, ranks)
