"""Runs of Qwen3.8-Flash-Next: resuming, recomputation, frozen tables, and what is not supported."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qwen3vl_bridge.models.qwen4_exp import FAMILY
from qwen3vl_bridge.peft.lora import Qwen3VLLoRA

import pytest
import torch
from megatron.bridge import AutoBridge
from safetensors.torch import load_file

from tests.helpers.batches import make_batch, make_samples
from tests.helpers.steps import save, set_up, train_step
from tests.models.qwen3_5.test_resume import config_of, moved, parameters, wrapped
from tests.models.qwen4_exp.tiny import make_checkpoint, make_config
from tests.parity.conftest import build
from tests.training.running import Inputs

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen4_exp"), seed=7)


@pytest.fixture(scope="module")
def inputs(folder, digits) -> Inputs:
    return Inputs(folder, digits, folder)


@pytest.mark.one_case_in(3)
@wrapped
def test_resumed_qwen4_exp_run_equals_uninterrupted_run(inputs, wrap, tmp_path):
    settings = dict(model__mtp_loss_scaling_factor=0.1, model__calculate_per_token_loss=True)
    run = set_up(config_of(inputs, tmp_path, wrap, **settings))
    before = parameters(run)
    train_step(run)
    save(run)
    train_step(run)
    expected = parameters(run)
    run = set_up(config_of(inputs, tmp_path, wrap, **settings))
    train_step(run)
    assert not moved(parameters(run), expected)
    frozen = {name for name in before if ".indexer." in name}
    assert len(frozen) == 6 and not frozen & moved(expected, before)
    assert {name for name in moved(expected, before) if ".ngram_embedding." in name}


def gradients(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of one packed row with images, with multi-token prediction."""
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    for name, value in dict(mtp_loss_scaling_factor=0.3, calculate_per_token_loss=True, **settings).items():
        setattr(provider, name, value)
    model = build(provider).train()
    config = bridge.hf_pretrained.config
    batch = make_batch(make_samples("mixed", config, seed=5), config, packed=True)
    inputs = batch.local(**provider.local_arguments(model.pg_collection))
    (model(inputs=inputs) * inputs.loss_mask).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_recomputation_does_not_change_qwen4_exp_gradients(folder):
    expected = gradients(folder)
    for settings in (FULL, dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"])):
        assert not moved(gradients(folder, **settings), expected)


def test_frozen_ngram_table_has_no_gradient(folder):
    every = gradients(folder)
    found = gradients(folder, freeze_ngram_table=True)
    assert {name for name in every if ".ngram_embedding." in name} == every.keys() - found.keys()
    assert len(every.keys() - found.keys()) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(fp32_residual_connection=True), "fp32_residual_connection is True, expected False"),
        (dict(pipeline_model_parallel_size=2), "variable_seq_lengths is False .*, expected True"),
        (dict(overlap_moe_expert_parallel_comm=True), "overlap_moe_expert_parallel_comm"),
        (dict(attention_dropout=0.1), "attention_dropout is 0.1"),
        (dict(fine_grained_activation_offloading=True, offload_modules=["mlp_norm"]), "offload_modules has mlp_norm"),
        (dict(fp8="hybrid", mtp_loss_scaling_factor=0.1), "multi-token prediction is not computed in FP8"),
        (dict(recompute_granularity="selective", recompute_modules=["layernorm"]), "recompute_modules .*'layernorm'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_provider_with_unsupported_setting_raises(folder, settings, message):
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    for name, value in settings.items():
        setattr(provider, name, value)
    with pytest.raises(ValueError, match=message):
        provider.finalize()


def test_batch_without_ngram_ids_raises(folder):
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    model = build(provider)
    config = AutoBridge.from_hf_pretrained(str(folder)).hf_pretrained.config
    batch = make_batch(make_samples("text only", config, seed=5), config)
    with pytest.raises(ValueError, match="the batch has no ngram_ids"):
        model(inputs=batch.local())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("indexer_budget", 18, "indexer_budget is 18, expected a multiple of indexer_compress_ratio, which is 4"),
        ("indexer_head_dim", None, "lacks the field text_config.indexer_head_dim"),
        ("hc_count", 1, "hc_count is 1, expected at least 2"),
        ("ple_layer_ids", [4], r"ple_layer_ids has layer 4 \(counted from 1\), expected layers with linear attention"),
        ("ple_embed_dim", 62, "ple_embed_dim is 62, expected a multiple of the 4 hash heads"),
        ("split_ngram_parts", 5, "split_ngram_parts is 5, expected a divisor of the 424 rows"),
        ("output_gate_type", "relu", "output_gate_type is 'relu', expected one of sigmoid, silu"),
    ],
)
def test_config_with_unsupported_value_raises(folder, field, value, message):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][field] = value
    with pytest.raises(ValueError, match=message):
        FAMILY.check(config)


def test_config_without_experts_raises():
    with pytest.raises(ValueError, match="num_experts is 0, expected experts in every layer"):
        FAMILY.check(make_config(num_experts=0, intermediate_size=64))


def test_check_wrapping_raises_if_fsdp_is_used_with_divided_ngram_tables(folder):
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.expert_model_parallel_size = 2
    provider.check_wrapping(fsdp=False)
    with pytest.raises(ValueError, match=r"Megatron-FSDP .* n-gram tables .* Set expert_model_parallel_size=1"):
        provider.check_wrapping(fsdp=True)


def test_forward_raises_if_ranks_share_ngram_tables_and_lengths_are_fixed(folder):
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    model = build(provider).train()
    ids = torch.arange(8)[None]
    assert model(input_ids=ids).shape == (1, 8, 512)
    vars(model)["pg_collection"] = SimpleNamespace(tp_ep=SimpleNamespace(size=lambda: 2))  # two ranks
    with pytest.raises(ValueError, match="variable_seq_lengths is False, expected True: 2 ranks share the n-gram"):
        model(input_ids=ids)


def exported(folder: Path, model: list[torch.nn.Module], **settings: Any) -> dict[str, torch.Tensor]:
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    return dict(bridge.export_hf_weights(model, show_progress=False, **settings))


def test_export_of_model_in_memory_restores_every_tensor_of_hf_folder(folder):
    """On the device of the model too, and with a configuration alone."""
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    model = [build(bridge.to_megatron_provider(load_weights=True))]
    expected = load_file(folder / "model.safetensors")
    for found in (
        exported(folder, model),
        exported(folder, model, cpu=False),
        dict(AutoBridge.from_hf_config(bridge.hf_pretrained.config).export_hf_weights(model, show_progress=False)),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_export_adapter_weights_returns_adapters_of_model_in_memory(folder, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.register_pre_wrap_hook(lambda chunks: [Qwen3VLLoRA(dim=2)(chunk, training=True) for chunk in chunks])
    model = build(provider)
    names = [name for name, _ in bridge.export_adapter_weights([model], show_progress=False)]
    assert any(".self_attn.q_proj.lora_A" in name for name in names) and not any("indexer" in name for name in names)
