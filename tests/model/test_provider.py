"""The provider refuses what it cannot honour, and the bridge reads what Hugging Face says."""

import copy

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.bridge import Qwen3VLBridge
from qwen3vl_bridge.provider import Qwen3VLModelProvider
from qwen3vl_bridge.vision_config import vision_transformer_config

import pytest
import torch
from megatron.bridge import AutoBridge


@pytest.fixture
def provider(untied_folder):
    return AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)


def test_our_classes_are_registered(provider):
    assert type(provider) is Qwen3VLModelProvider


def test_nothing_is_frozen_unless_asked(provider):
    assert not (provider.freeze_language_model or provider.freeze_vision_model or provider.freeze_vision_projection)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(hidden_size=1000), "out_hidden_size is .*, expected hidden_size 1000"),
        (dict(mrope_section=[2, 1, 2]), "has sum 5, expected half the head dimension"),
        (dict(apply_rope_fusion=True), "apply_rope_fusion is True, expected False"),
        (dict(rotary_percent=0.5), "rotary_percent is 0.5, expected 1.0"),
        (dict(num_moe_experts=4), "num_moe_experts is 4, expected None"),
        (dict(position_embedding_type="rope"), "position_embedding_type is 'rope'"),
        (dict(num_layers=2), "3 DeepStack taps need as many text layers, num_layers is 2"),
        (dict(cross_entropy_loss_fusion=True), "rounds its gradient to bfloat16"),
        (
            dict(vision_recompute_granularity="full", vision_recompute_method="uniform", vision_recompute_num_layers=2),
            r"taps \[0, 2\] don't end a chunk",
        ),
        (dict(vision_recompute_modules=["layernorm"]), "'layernorm' needs Transformer Engine"),
        (dict(vision_recompute_modules=["mlp"]), r"vision_recompute_modules has \['mlp'\], expected some of"),
        (dict(add_qkv_bias=True), "add_qkv_bias is True, expected False"),
    ],
)
def test_contradictions_are_refused(provider, fields, message):
    for name, value in fields.items():
        setattr(provider, name, value)
    with pytest.raises(ValueError, match=message):
        provider.finalize()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic', expected one of default, linear"),
        ({"rope_type": "yarn"}, "no factor"),
        ({"mrope_interleaved": False}, "mrope_interleaved is False"),
        ({"mrope_section": None}, "no mrope_section"),
    ],
)
def test_rotary_settings_we_do_not_compute_are_refused(untied_folder, rope, message):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(untied_folder)
    config.text_config.rope_parameters = {**config.text_config.rope_parameters, **rope}
    pretrained = type("Pretrained", (), {"config": config})
    with pytest.raises(ValueError, match=message):
        Qwen3VLBridge().provider_bridge(pretrained)


def test_activation_of_the_tower_is_checked(provider):
    provider.vision_config = copy.deepcopy(provider.vision_config)
    provider.vision_config.hidden_act = "relu"
    with pytest.raises(ValueError, match="hidden_act is 'relu'"):
        vision_transformer_config(provider)


def test_vision_tower_follows_the_models_precision(provider):
    provider.params_dtype, provider.bf16 = torch.bfloat16, True
    assert vision_transformer_config(provider).params_dtype is torch.bfloat16
