"""Trained adapters in other libraries: `peft` and transformers get the logits of the Megatron model."""

from __future__ import annotations

import json
import re

from qwen3vl_bridge.peft.adapter_rows import hf_targets
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.peft.model_adapters import save_hf_adapter

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen3VLForConditionalGeneration

from .peft_models import (
    ALL_PARTS,
    Adapted,
    adapt,
    check_logits,
    model_of,
    reference_gradients,
    reference_logits,
    with_adapter,
    worst_difference,
)

GRADIENT = 2e-5  # measured 2.7e-6, relative to the largest entry of each gradient

CASES = {
    "language": {},
    "all parts": ALL_PARTS,
    "vision": dict(adapt_language_model=False, adapt_vision_model=True),
    "some layers": dict(adapt_vision_model=True, target_modules=["*.layers.1.*.linear_qkv", "*.layers.2.*.linear_fc1"]),
}


@pytest.fixture(scope="module", params=[Qwen3VLLoRA, Qwen3VLDoRA], ids=["LoRA", "DoRA"])
def method(request):
    return request.param


@pytest.fixture(scope="module", params=CASES)
def trained(request, method, untied_folder) -> tuple[Adapted, list[torch.Tensor]]:
    """Trained adapters and the logits they make."""
    adapted = adapt(untied_folder, method(dim=4, alpha=8, **CASES[request.param]))
    losses = adapted.train()
    assert losses == sorted(losses, reverse=True)
    logits = adapted.logits()
    assert worst_difference(logits, reference_logits(adapted.pair.reference, adapted.samples)) > 1
    return adapted, logits


def test_adapter(trained, untied_folder, tmp_path):
    adapted, logits = trained
    save_hf_adapter(adapted.pair.bridge, [adapted.model], tmp_path, adapted.peft)
    loaded = with_adapter(untied_folder, tmp_path)
    check_logits(logits, loaded, adapted.samples)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(untied_folder)


def test_merged(trained, tmp_path):
    adapted, logits = trained
    adapted.pair.bridge.save_hf_pretrained([adapted.model], tmp_path, show_progress=False)
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    check_logits(logits, loaded, adapted.samples)


def test_adapter_by_megatron_bridge(trained, untied_folder, tmp_path):
    """AutoBridge's own method, which its training calls too."""
    adapted, logits = trained
    adapted.pair.bridge.save_hf_adapter([adapted.model], tmp_path, adapted.peft, show_progress=False)
    loaded = with_adapter(untied_folder, tmp_path)
    check_logits(logits, loaded, adapted.samples)


def test_layers_left_out(untied_folder, tmp_path):
    """By how their names begin, as Megatron-Bridge's method takes them."""
    adapted = adapt(untied_folder, Qwen3VLDoRA(dim=4, alpha=8, **ALL_PARTS))
    left_out = ["vision_model", "language_model.decoder.layers.0.mlp"]
    adapted.pair.bridge.save_hf_adapter([adapted.model], tmp_path, adapted.peft, exclude_adapter_base_prefixes=left_out)
    names = {name for name in with_adapter(untied_folder, tmp_path).state_dict() if ".lora_" in name}
    assert names and not any(".visual." in name or ".layers.0.mlp." in name for name in names)
    assert any(".layers.0.self_attn." in name for name in names)


def test_gradients_are_those_of_peft(method, untied_folder, tmp_path):
    """A of q, k and v, and of gate and up, is one in Megatron and three or two in `peft`; the others are compared."""
    adapted = adapt(untied_folder, method(dim=4, alpha=8, **ALL_PARTS))
    adapted.train()
    save_hf_adapter(adapted.pair.bridge, [adapted.model], tmp_path, adapted.peft)
    loaded = with_adapter(untied_folder, tmp_path)
    expected = reference_gradients(loaded, adapted.samples)
    adapted.model.zero_grad()
    adapted.backward()
    for parameter in adapted.trainable().values():
        parameter.data = parameter.grad  # the conversion is linear
    found = adapted.pair.bridge._model_bridge.adapter_weights([adapted.model])
    assert found.keys() == expected.keys()
    shared = re.compile(r"\.(q|k|v|gate|up)_proj\.lora_A")
    errors = {n: ((g - expected[n]).abs().max() / expected[n].abs().max()).item() for n, g in found.items()}
    errors = {name: error for name, error in errors.items() if not shared.search(name)}
    assert len(errors) > 80 and max(errors.values()) <= GRADIENT, errors


def test_a_model_with_experts(method, moe_folder, tmp_path):
    """Adapters on all that is no expert: attention, the dense layer, the vision tower and the mergers."""
    adapted = adapt(moe_folder, method(dim=4, alpha=8, **ALL_PARTS))
    adapted.train()
    logits = adapted.logits()
    save_hf_adapter(adapted.pair.bridge, [adapted.model], tmp_path / "adapter", adapted.peft)
    adapted.pair.bridge.save_hf_pretrained([adapted.model], tmp_path / "merged", show_progress=False)
    loaded = with_adapter(moe_folder, tmp_path / "adapter")
    check_logits(logits, loaded, adapted.samples)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    check_logits(logits, merged, adapted.samples)


def test_untrained_adapters_change_nothing(method, tied_folder):
    plain = adapt(tied_folder, method(dim=4, **ALL_PARTS))
    with plain.peft.disable_adapter(plain.model):
        before = plain.logits()
    check_logits(before, plain, plain.samples)


def test_bfloat16_merges_in_float32(method, untied_folder):
    """The merged weight is off by its own rounding alone."""
    adapted = adapt(untied_folder, method(dim=4, alpha=8, **ALL_PARTS))
    adapted.train()
    exact = dict(adapted.pair.bridge.export_hf_weights([adapted.model], show_progress=False))
    base = {name: p for name, p in adapted.model.named_parameters() if ".adapter." not in name}
    for parameter in base.values():
        parameter.data = parameter.data.bfloat16()
    rounded = dict(adapted.pair.bridge.export_hf_weights([adapted.model], show_progress=False))
    for name, weight in rounded.items():
        assert weight.dtype == torch.bfloat16
        error = (weight.float() - exact[name]).abs().max() / exact[name].abs().max()
        assert error <= 2**-7, name  # two roundings of half a bit in 8


def test_a_model_without_adapters(untied_folder, tmp_path):
    adapted = adapt(untied_folder, Qwen3VLLoRA(dim=2))
    plain = adapt(untied_folder, Qwen3VLLoRA(dim=2)).pair.bridge
    with pytest.raises(ValueError, match="no adapters to save"):
        save_hf_adapter(plain, [model_of(untied_folder)], tmp_path / "adapter", adapted.peft)
    assert not (tmp_path / "adapter").exists()


def test_targets_name_exactly_the_adapted():
    modules = [f"{name}.weight" for name in ("a.0.q", "a.1.q", "b.0.k", "b.1.k", "norm")]
    adapted = [f"{name}.weight" for name in ("a.0.q", "a.1.q", "b.1.k")]
    assert hf_targets(adapted, [*modules, "e.0.k", "e.1.k"]) == {"target_modules": ["b.1.k", "q"]}
    parameters = ["e.0.k", "e.1.k", "e.0.n", "e.1.n"]
    found = hf_targets([*adapted, "e.0.k", "e.1.k", "e.1.n"], [*modules, *parameters])
    assert found == {"target_modules": ["b.1.k", "q"], "target_parameters": ["e.1.n", "k"]}
