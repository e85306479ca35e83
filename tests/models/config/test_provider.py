"""Unsupported fields of `config.json` raise an error, and all others reach the provider."""

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.config import fields
from qwen3vl_bridge.config.hf_config import TEXT_ACTIVATIONS, VISION_ACTIVATIONS
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5_presets
from qwen3vl_bridge.models.qwen3_5.config import check_settings as check_qwen3_5
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.models.qwen3_vl.bridge import Qwen3VLBridge
from qwen3vl_bridge.models.qwen3_vl.config import check_settings
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider

import pytest
import torch
from megatron.bridge import AutoBridge
from transformers import AutoConfig
from transformers.activations import ACT2FN

MOE, INF, NAN = "30B-A3B", float("inf"), float("nan")
DEEPSTACK, ROPE = "vision_config.deepstack_visual_indexes", "text_config.rope_parameters"
WRONG = [
    ("text_config.rms_norm_eps", NAN, "a number above 0"), ("text_config.rms_norm_eps", INF, "a number above 0"),
    ("text_config.rms_norm_eps", "1e-6", "a number above 0"),
    ("text_config.rms_norm_eps", 10**400, "a number above 0"), ("text_config.rms_norm_eps", 0, "a number above 0"),
    ("text_config.hidden_size", 2048.0, "a whole number"), ("text_config.hidden_size", True, "a whole number"),
    ("text_config.hidden_size", None, "a whole number"), ("text_config.vocab_size", -1, "a whole number"),
    ("text_config.num_hidden_layers", 10**9, "a whole number from 1 to 10000"),
    ("text_config.num_attention_heads", 15, "a multiple of num_key_value_heads, which is 8"),
    ("text_config.num_key_value_heads", 0, "a whole number"), ("text_config.head_dim", "128", "a whole number"),
    ("text_config.hidden_act", 3, "one of silu, swish, gelu"),
    ("text_config.hidden_act", "gelu_new", "one of silu, swish, gelu"),
    ("vision_config.hidden_act", "prelu", "one of gelu, gelu_10"), ("text_config.rope_parameters", [1], "an object"),
    ("text_config.rope_parameters.mrope_section", "abc", "three whole numbers"),
    ("text_config.rope_parameters.mrope_section", [24, 20], "three whole numbers"),
    ("text_config.rope_parameters.mrope_section", [24, 20, 20.0], "three whole numbers"),
    ("text_config.rope_parameters.rope_theta", NAN, "a number above 0"),
    ("text_config.rope_parameters.rope_theta", -1, "a number above 0"),
    ("text_config.rope_parameters.mrope_interleaved", "no", "true or false"),
    ("text_config.attention_dropout", "0", "a number of 0 or more"),
    ("vision_config.spatial_merge_size", "2", "a whole number of at least 1"),
    ("vision_config.hidden_size", {"a": 1}, "a whole number of at least 1"),
    ("vision_config.hidden_size", 1000, "a multiple of num_heads, which is 16"),
    ("vision_config.depth", 0, "a whole number from 1 to 10000"),
    ("vision_config.out_hidden_size", 1024, "2048, the text model's hidden_size"),
    ("vision_config.num_position_embeddings", 2305, "the square of a whole number"),
    ("vision_config.deepstack_visual_indexes", 3, "a list of layer indices"),
    ("vision_config.deepstack_visual_indexes", ["5"], "a list of layer indices"),
    ("tie_word_embeddings", "no", "true or false"), ("tie_word_embeddings", 0, "true or false"),
    ("tie_word_embeddings", None, "true or false"), ("image_token_id", -1, "a token id"),
    ("text_config", None, "an object"), ("vision_config", [], "an object"),
]  # fmt: skip


def changed(size: str, name: str, value: object) -> dict:
    config = copy.deepcopy(presets.config_dict(size))
    *sections, field = name.split(".")
    holder = config
    for section in sections:
        holder = holder[section]
    holder[field] = value
    return config


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_hf_config_field_of_wrong_type_or_range_raises(name, value, expected):
    with pytest.raises(ValueError) as error:
        check_settings(changed("2B", name, value))
    assert str(error.value).startswith(f"{name} is ") and f", expected {expected}" in str(error.value)


@pytest.mark.parametrize(("size", "name", "value", "message"), [
    ("2B", DEEPSTACK, [0, 0, 99], r"visual_indexes is \[0, 0, 99\], expected ascending indices of the 24"),
    ("2B", DEEPSTACK, [11, 5], r"visual_indexes is \[11, 5\], expected ascending"),
    ("2B", DEEPSTACK, [24], r"is \[24\], expected ascending indices of the 24"),
    ("2B", f"{ROPE}.mrope_section", [24, 20, 21], r"\[24, 20, 21\] with the sum 65, expected half"),
    ("2B", f"{ROPE}.mrope_interleaved", False, "mrope_interleaved is False"),
    ("2B", f"{ROPE}.mrope_section", None, "mrope_section is miss"), ("2B", f"{ROPE}.rope_type", "yarn", "factor is"),
    ("2B", f"{ROPE}.rope_type", "dynamic", "is 'dynamic', expected one of default, linear"),
    (MOE, "text_config.num_experts", "8", "num_experts is '8', expected a whole number from 0 to 10000"),
    (MOE, "text_config.num_experts_per_tok", 2.0, "text_config.num_experts_per_tok is 2.0"),
    (MOE, "text_config.num_experts_per_tok", 129, "num_experts_per_tok is 129, expected 1 to num_experts"),
    (MOE, "text_config.moe_intermediate_size", None, "text_config.moe_intermediate_size is missing"),
    (MOE, "text_config.mlp_only_layers", "12", "mlp_only_layers is '12', expected a list of layer indices"),
    (MOE, "text_config.mlp_only_layers", list(range(48)), "no layer uses them"),
    (MOE, "text_config.decoder_sparse_step", "1", "text_config.decoder_sparse_step is '1'"),
    (MOE, "text_config.decoder_sparse_step", 0, "step is 0, expected a whole number of at least 1"),
    (MOE, "text_config.norm_topk_prob", False, "text_config.norm_topk_prob is False, expected True"),
    (MOE, "text_config.attention_bias", True, "text_config.attention_bias is True, expected False"),
    (MOE, "quantization_config", {"quant_method": "awq"}, "quant_method is 'awq', expected 'fp8'"),
])  # fmt: skip
def test_check_settings_raises_if_hf_config_value_is_unsupported(size, name, value, message):
    with pytest.raises(ValueError, match=message):
        check_settings(changed(size, name, value))


def test_supported_activation_names_match_our_and_transformers_implementations():
    assert set(TEXT_ACTIVATIONS) == set(fields._TEXT_ACTIVATIONS)
    modules = {name: ACT2FN[name] for name in ACT2FN}
    assert set(VISION_ACTIVATIONS) == {name for name, made in modules.items() if not list(made.parameters())}


@pytest.mark.parametrize(("name", "expected"), [("silu", None), ("swish", None), ("gelu", "'gelu', expected 'silu'")])
def test_qwen3_5_hidden_act_other_than_silu_raises(name, expected):
    config = qwen3_5_presets.config_dict("0.8B")
    config["text_config"]["hidden_act"] = name
    with (
        nullcontext() if expected is None else pytest.raises(ValueError, match=f"text_config.hidden_act is {expected}")
    ):
        check_qwen3_5(config)


@pytest.mark.parametrize("name", ["text_config.vocab_size", "text_config.num_key_value_heads", "vision_config.depth"])
def test_hf_config_with_missing_field_or_not_an_object_raises(name):
    section, field = name.split(".")
    config = presets.config_dict("2B")
    del config[section][field]
    with pytest.raises(ValueError, match=f"lacks the field {name}, expected"):
        check_settings(config)
    for other in ([], None, "x"):
        with pytest.raises(ValueError, match="expected an object"):
            check_settings(other)


def test_provider_bridge_with_unsupported_rope_type_raises(untied_folder):
    config = AutoConfig.from_pretrained(untied_folder)
    config.text_config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(ValueError, match="rope_type is 'dynamic', expected one of default, linear"):
        Qwen3VLBridge().provider_bridge(SimpleNamespace(config=config))


@pytest.mark.parametrize(("kind", "made"), [("untied", Qwen3VLModelProvider), ("moe", Qwen3VLMoEModelProvider)])
def test_no_component_is_frozen_by_default(kind, made, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    assert type(provider) is made
    assert not (provider.freeze_language_model or provider.freeze_vision_model or provider.freeze_vision_projection)


def test_pickled_provider_keeps_settings_and_drops_process_groups(untied_folder):
    """Megatron-Bridge pickles the provider to export a pipelined model; process groups cannot be pickled."""
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    provider.finalize()
    provider._pg_collection = provider._pre_wrap_hooks = lambda: None
    sent = pickle.loads(pickle.dumps(provider))
    plain = (bool, int, float, str, list, torch.dtype)
    settings = {name: value for name, value in vars(provider).items() if not name.startswith("_")}
    assert {name for name, value in settings.items() if isinstance(value, plain)} - vars(sent).keys() == set()
    assert all(vars(sent)[name] == value for name, value in settings.items() if isinstance(value, plain))
    assert sent._pg_collection is None
    assert copy.copy(provider)._pg_collection is provider._pg_collection


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("settings", [
    {"rope_parameters": YARN},
    dict(position_embedding_type="yarn", yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=64,
         yarn_mscale=1.0, yarn_mscale_all_dim=0.0),
], ids=["transformers", "Megatron-Bridge"])  # fmt: skip
def test_finalize_converts_yarn_settings_to_rope_parameters(settings, untied_folder):
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    other = {"rope_theta": provider.rotary_base, "mrope_section": provider.mrope_section}
    assert provider.rope_parameters == YARN | other and provider.position_embedding_type == "mrope"
    provider.finalize()  # as Megatron-Bridge does again
    assert provider.rope_parameters == YARN | other


@pytest.mark.parametrize(("settings", "message"), [
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
    ({"rope_parameters": YARN | {"rope_theta": 7.0}},
     "has rope_theta 7.0, but another field of the provider sets 5000000"),
    ({"yarn_rotary_scaling_factor": 4.0}, "position_embedding_type='yarn'"),
    (dict(position_embedding_type="yarn", yarn_mscale=2.0),
     "yarn_mscale is 2.0 and yarn_mscale_all_dim .*, expected both above 0, or neither"),
])  # fmt: skip
def test_finalize_raises_if_rope_scaling_is_incomplete_or_contradictory(settings, message, untied_folder):
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    for name, value in settings.items():
        setattr(provider, name, value)
    with pytest.raises(ValueError, match=message):
        provider.finalize()
