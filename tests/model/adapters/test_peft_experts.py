"""Adapters of experts: `peft` and transformers get the logits and gradients of the Megatron model; what is refused."""

from __future__ import annotations

import json
import re

from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.peft.model_adapters import save_hf_adapter
from qwen3vl_bridge.weights.expert_layout import ExpertLayout

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from .peft_models import (
    ALL_PARTS,
    adapt,
    check_logits,
    model_of,
    reference_gradients,
    reference_logits,
    with_adapter,
    worst_difference,
)

GRADIENT = 2e-5  # measured 2.2e-6, relative to the largest entry of each gradient

NO_BALANCING = dict(moe_aux_loss_coeff=0.0)  # transformers' loss here has none

CASES = {
    "all": ALL_PARTS,
    "experts alone": dict(target_modules=["*.experts.linear_fc1", "*.experts.linear_fc2"]),
    "some layers": dict(target_modules=["*.layers.2.*.linear_fc*", "*.layers.3.*.linear_qkv"]),
    "all but some": dict(target_modules=[], exclude_modules=["*.layers.0.*.linear_fc*", "linear_qkv"]),
}


@pytest.fixture(scope="module", params=CASES)
def trained(request, moe_folder, tmp_path_factory):
    """Trained adapters, the logits they make and the folder they are saved in."""
    adapted = adapt(moe_folder, Qwen3VLLoRA(dim=4, alpha=8, adapt_experts=True, **CASES[request.param]), **NO_BALANCING)
    losses = adapted.train()
    assert losses == sorted(losses, reverse=True)
    logits, folder = adapted.logits(), tmp_path_factory.mktemp("adapter")
    assert worst_difference(logits, reference_logits(adapted.pair.reference, adapted.samples)) > 1
    save_hf_adapter(adapted.pair.bridge, [adapted.model], folder, adapted.peft)
    return adapted, logits, folder


def test_adapter(trained, moe_folder):
    adapted, logits, folder = trained
    check_logits(logits, with_adapter(moe_folder, folder), adapted.samples)


def test_names_that_vllm_reads(trained):
    """It takes an adapter's `experts.base_layer` for gate and up, and its `experts` for down, and asks for both."""
    _, _, folder = trained
    tensors = load_file(folder / "adapter_model.safetensors")
    experts = {name: list(tensor.shape) for name, tensor in tensors.items() if ".experts." in name}
    # 6 experts of 80 x 48, rank 4.
    expected = {
        "experts.base_layer.lora_A.weight": [24, 80],
        "experts.base_layer.lora_B.weight": [96, 24],
        "experts.lora_A.weight": [24, 48],
        "experts.lora_B.weight": [80, 24],
    }
    layers = {re.search(r"\.layers\.(\d+)\.", name)[1] for name in experts}
    prefix = "base_model.model.model.language_model.layers"
    assert layers and experts == {
        f"{prefix}.{layer}.mlp.{name}": shape for layer in layers for name, shape in expected.items()
    }


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_are_those_of_peft(trained, moe_folder, packed):
    """Of rows with padding too, for which megatron-core computes experts as for real tokens."""
    adapted, _, folder = trained
    expected = reference_gradients(with_adapter(moe_folder, folder), adapted.samples)
    adapted.model.zero_grad()
    adapted.packed = packed
    adapted.backward()
    kept = {name: parameter.data for name, parameter in adapted.trainable().items()}
    for parameter in adapted.trainable().values():
        parameter.data = parameter.grad  # the conversion is linear
    found = adapted.pair.bridge._model_bridge.adapter_weights([adapted.model])
    for name, parameter in adapted.trainable().items():
        parameter.data = kept[name]
    adapted.packed = True
    assert found.keys() == expected.keys()
    shared = re.compile(r"\.(q|k|v|gate|up)_proj\.lora_A")  # one in Megatron, several in `peft`
    errors = {
        name: ((gradient - expected[name]).abs().max() / expected[name].abs().max()).item()
        for name, gradient in found.items()
        if not shared.search(name)
    }
    print(f"gradients: {max(errors.values()):.1e}, tolerance {GRADIENT:.0e}")
    assert any(".experts." in name for name in errors) and max(errors.values()) <= GRADIENT, errors


@pytest.mark.parametrize("layout", [ExpertLayout.INPUT_MAJOR, ExpertLayout.OUTPUT_MAJOR])
def test_merged(moe_folders, layout, tmp_path):
    """Into the layout of the released checkpoints, and into that of transformers 5."""
    adapted = adapt(moe_folders[layout], Qwen3VLLoRA(dim=4, alpha=8, adapt_experts=True))
    adapted.train()
    adapted.pair.bridge.save_hf_pretrained([adapted.model], tmp_path, show_progress=False)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path)
    check_logits(adapted.logits(), merged, adapted.samples)


def test_all_experts_of_a_layer_have_adapters_of_their_own(trained):
    adapted, _, _ = trained
    names = [name for name in adapted.trainable() if ".experts." in name]
    experts = {re.sub(r"local_experts\.\d+", "", name) for name in names}
    assert len(names) == 6 * len(experts)
    inputs = [p for name, p in adapted.trainable().items() if ".experts." in name and "fc1.adapter.linear_in" in name]
    assert len({tuple(p.flatten().tolist()) for p in inputs}) == len(inputs)
    config = json.loads((trained[2] / "adapter_config.json").read_text())
    assert all(name.endswith(("gate_up_proj", "down_proj")) for name in config["target_parameters"])


@pytest.mark.parametrize(
    "recompute",
    [
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        dict(recompute_granularity="selective", recompute_modules=["moe"]),
    ],
    ids=["full", "moe"],
)
def test_recomputed_experts_have_the_same_gradients(moe_folder, recompute):
    found = []
    for fields in ({}, recompute):
        # B starts at zero no longer, else A would have no gradient.
        peft = Qwen3VLLoRA(dim=2, alpha=1, adapt_experts=True, lora_B_init_method="normal")
        adapted = adapt(moe_folder, peft, **NO_BALANCING, **fields)
        adapted.backward()
        found.append({name: p.grad for name, p in adapted.trainable().items()})
    plain, recomputed = found
    errors = {n: ((g - recomputed[n]).abs().max() / g.abs().max()).item() for n, g in plain.items() if g.any()}
    print(f"gradients: {max(errors.values()):.1e}, tolerance {GRADIENT:.0e}")
    assert any(".experts." in name for name in errors) and max(errors.values()) <= GRADIENT


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                dict(target_modules=["linear_qkv"]),
                "adapted layers belongs to experts: expected adapt_language_model=True",
            ),
            (
                dict(adapt_language_model=False, adapt_vision_model=True),
                "adapted layers belongs to experts: expected adapt_language",
            ),
            (
                dict(target_modules=["*.layers.2.mlp.experts.linear_fc1"]),
                "fc1 would have adapters and .*fc2 none",
            ),
            (dict(target_modules=["*.local_experts.3.*"]), "adapted layers belongs to experts"),
            (dict(normalize_moe_lora=True), "normalize_moe_lora is True, expected False"),
            (dict(experts_shared_outer_loras=True), "experts_shared_outer_loras is True, expected False"),
            (dict(adapt_experts=False, share_expert_adapters=False), "expected adapt_experts=True with it"),
            (dict(adapt_experts=False, target_modules=["*.experts.*"]), r"experts' need adapt_experts=True"),
        ],
    )
    def test_fields(self, moe_folder, fields, message):
        model = model_of(moe_folder)
        with pytest.raises(ValueError, match=message):
            Qwen3VLLoRA(**(dict(adapt_experts=True) | fields))(model)
        assert all(p.requires_grad for p in model.parameters())

    def test_a_model_without_experts(self, untied_folder):
        with pytest.raises(ValueError, match=r"adapted layers belongs to experts: .* a model with experts"):
            Qwen3VLLoRA(adapt_experts=True)(model_of(untied_folder))

    def test_dora(self, moe_folder):
        with pytest.raises(ValueError, match="adapt_experts is True, expected False for DoRA"):
            Qwen3VLDoRA(adapt_experts=True)(model_of(moe_folder))

    def test_experts_that_are_one_product(self, moe_folder):
        """As Transformer Engine's are."""
        model = model_of(moe_folder)
        model.config.moe_grouped_gemm = True
        with pytest.raises(ValueError, match=r"moe_grouped_gemm is .*experts\.linear_fc1 holds all experts of a rank"):
            Qwen3VLLoRA(adapt_experts=True)(model)

    def test_experts_that_are_cut(self, moe_folder):
        model = model_of(moe_folder)
        model.config.expert_tensor_parallel_size = 2
        with pytest.raises(ValueError, match="expert_tensor_parallel_size is 2, expected 1 where experts have"):
            Qwen3VLLoRA(adapt_experts=True)(model)
