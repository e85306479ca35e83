"""Adapters on both kinds of attention, on MLPs, shared and routed experts: `peft` and transformers compute the same."""

from __future__ import annotations

import re

from qwen3vl_bridge.peft.adapter_rows import LINEAR_LAYERS, OF_LINEAR_ATTENTION
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.peft.model_adapters import save_hf_adapter

import pytest
import torch
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA
from transformers import AutoModelForImageTextToText

from tests.model.adapters.peft_models import (
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
from tests.noise import check, limit, relative

SIZE = dict(dim=4, alpha=8)
ALL = dict(target_modules=[*LINEAR_LAYERS, *OF_LINEAR_ATTENTION])
CASES = {
    "LoRA": ("dense", lambda: Qwen3VLLoRA(**SIZE, **ALL, **ALL_PARTS)),
    "DoRA": ("dense", lambda: Qwen3VLDoRA(**SIZE, **ALL, **ALL_PARTS)),
    "projection of one layer": ("dense", lambda: Qwen3VLLoRA(**SIZE, target_modules=["*.layers.1.*.in_proj"])),
    "gates": ("tied", lambda: Qwen3VLLoRA(**SIZE, target_modules=["*.layers.3.*.linear_qkv"])),
    "LoRA, experts": ("moe", lambda: Qwen3VLLoRA(**SIZE, **ALL, **ALL_PARTS, adapt_experts=True)),
    "DoRA, shared experts": ("moe", lambda: Qwen3VLDoRA(**SIZE, **ALL)),
    "shared experts": ("moe", lambda: Qwen3VLLoRA(**SIZE, target_modules=["*.shared_experts.*"])),
    "Megatron-Bridge's LoRA": ("moe", lambda: LoRA(**SIZE, **ALL)),
    "Megatron-Bridge's on all linear layers": ("dense", lambda: LoRA(**SIZE, target_modules=[])),
}


@pytest.fixture(scope="module", params=CASES)
def trained(request, qwen3_5_folders):
    """Trained adapters, the logits they make, and the folder of their model."""
    kind, peft = CASES[request.param]
    folder = qwen3_5_folders[kind]
    # The reference's loss has no balancing term.
    adapted = adapt(folder, peft(), **(dict(moe_aux_loss_coeff=0.0) if kind == "moe" else {}))
    losses = adapted.train()
    assert losses == sorted(losses, reverse=True)
    logits = adapted.logits()
    moved = worst_difference(logits, reference_logits(adapted.pair.reference, adapted.samples))
    print(request.param, losses, moved)
    assert moved > 0.5
    return adapted, logits, folder


def test_adapter(trained, tmp_path):
    adapted, logits, folder = trained
    save_hf_adapter(adapted.pair.bridge, [adapted.model], tmp_path, adapted.peft)
    check_logits(logits, with_adapter(folder, tmp_path), adapted.samples)


def test_merged(trained, tmp_path):
    adapted, logits, _ = trained
    adapted.pair.bridge.save_hf_pretrained([adapted.model], tmp_path, show_progress=False)
    check_logits(logits, AutoModelForImageTextToText.from_pretrained(tmp_path), adapted.samples)


# One `linear_in` in Megatron is the `lora_A` of each of these in `peft`, and its gradient the sum of theirs.
SHARED = re.compile(r"\.(?:(?:q|k|v)_proj|(?:gate|up)_proj|in_proj_(?:qkv|z|b|a))\.lora_A")


def summed(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of matrices that are one in Megatron added up, by the name of them all."""
    found: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        together = SHARED.sub(".lora_A", name)
        found[together] = found.get(together, 0) + gradient
    return found


def megatron_gradients(adapted: Adapted) -> dict[str, torch.Tensor]:
    """By the names and in the layouts of `peft`: they are converted as adapters are, which is linear."""
    adapted.model.zero_grad()
    adapted.backward()
    kept = {name: parameter.data for name, parameter in adapted.trainable().items()}
    for parameter in adapted.trainable().values():
        parameter.data = parameter.grad
    converted = adapted.pair.bridge._model_bridge.adapter_weights([adapted.model])
    for name, parameter in adapted.trainable().items():
        parameter.data = kept[name]
    return {SHARED.sub(".lora_A", name): gradient for name, gradient in converted.items()}


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_are_those_of_peft(trained, tmp_path, packed):
    adapted, _, folder = trained
    save_hf_adapter(adapted.pair.bridge, [adapted.model], tmp_path, adapted.peft)
    reference = with_adapter(folder, tmp_path)

    def expected() -> dict[str, torch.Tensor]:
        return summed(reference_gradients(reference, adapted.samples))

    def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
        assert found.keys() == expected.keys()
        return max(relative(found, expected).values())

    adapted.packed = packed
    found = megatron_gradients(adapted)
    adapted.packed = True
    check({"gradients": error(found, expected())}, {"gradients": limit(expected, error, reference)})


def test_each_projection_is_a_part_of_the_layers_product(qwen3_5_folders):
    """By the formula, without the `peft` library: rows of B, the one A, alpha / dim."""
    adapted = adapt(qwen3_5_folders["dense"], Qwen3VLLoRA(**SIZE, **ALL, lora_B_init_method="normal"))
    found = adapted.pair.bridge._model_bridge.adapter_weights([adapted.model])
    layers = adapted.model.language_model.decoder.layers
    prefix = "model.language_model.layers"

    def delta(name: str) -> torch.Tensor:
        return 8 / 4 * found[f"{prefix}.{name}.lora_B.weight"] @ found[f"{prefix}.{name}.lora_A.weight"]

    adapter = layers[1].self_attention.in_proj.adapter
    whole = 8 / 4 * adapter.linear_out.weight @ adapter.linear_in.weight
    # q, k, v, then z, b, a: 2 * 4 * 8 + 8 * 12, 8 * 12, 8 and 8 rows.
    for part, rows in zip(["qkv", "z", "b", "a"], whole.split([160, 96, 8, 8]), strict=True):
        assert torch.equal(delta(f"1.linear_attn.in_proj_{part}"), rows)
    adapter = layers[3].self_attention.linear_qkv.adapter
    whole = (8 / 4 * adapter.linear_out.weight @ adapter.linear_in.weight).unflatten(0, (2, 6, 32))
    queries, gates, key, value = whole.split([2, 2, 1, 1], 1)  # of each of two groups, heads of 32
    assert torch.equal(delta("3.self_attn.q_proj"), torch.stack((queries, gates), 2).flatten(0, 3))
    assert torch.equal(delta("3.self_attn.k_proj"), key.flatten(0, 2))
    assert torch.equal(delta("3.self_attn.v_proj"), value.flatten(0, 2))


@pytest.mark.parametrize("method", [Qwen3VLLoRA, Qwen3VLDoRA])
def test_bfloat16_is_rounded_once(qwen3_5_folders, method):
    adapted = adapt(qwen3_5_folders["dense"], method(**SIZE, **ALL, lora_B_init_method="normal"))
    for parameter in adapted.model.parameters():
        parameter.data = parameter.data.bfloat16()
    found = dict(adapted.pair.bridge.export_hf_weights([adapted.model], show_progress=False))
    for parameter in adapted.model.parameters():
        parameter.data = parameter.data.float()
    exact = dict(adapted.pair.bridge.export_hf_weights([adapted.model], show_progress=False))
    for name, weight in found.items():
        if ".norm.weight" in name and "linear_attn" in name:
            continue  # shifted by one in its own precision
        assert weight.dtype is torch.bfloat16
        torch.testing.assert_close(weight, exact[name].bfloat16(), rtol=0, atol=0, msg=name)


def test_layers_that_nobody_named(qwen3_5_folders):
    model = model_of(qwen3_5_folders["moe"])
    Qwen3VLLoRA(dim=2)(model)
    adapted = {name.partition(".adapter.")[0] for name, p in model.named_parameters() if p.requires_grad}
    last = {re.sub(r".*layers\.\d+\.", "", name) for name in adapted}
    assert last == {
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.shared_experts.linear_fc1",
        "mlp.shared_experts.linear_fc2",
    }


def test_queries_apart_from_their_gates_are_refused(qwen3_5_folders):
    """CanonicalLoRA has an adapter for as many rows as there are queries; the projection has twice as many."""
    with pytest.raises(ValueError, match=r"queries, keys and values of language_model.*layers\.3.* rows of gates"):
        CanonicalLoRA(**SIZE)([model_of(qwen3_5_folders["dense"])])
