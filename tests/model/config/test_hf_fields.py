"""Fields of a configuration that are not as they must be are refused under the names that `config.json` has."""

from __future__ import annotations

import copy

from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.models.qwen3_vl.config import check_settings

import pytest

INF, NAN = float("inf"), float("nan")
WRONG = [
    ("text_config.rms_norm_eps", NAN, "a number above 0"), ("text_config.rms_norm_eps", INF, "a number above 0"),
    ("text_config.rms_norm_eps", "1e-6", "a number above 0"),
    ("text_config.rms_norm_eps", 10**400, "a number above 0"), ("text_config.rms_norm_eps", 0, "a number above 0"),
    ("text_config.hidden_size", 2048.0, "a whole number"), ("text_config.hidden_size", True, "a whole number"),
    ("text_config.hidden_size", None, "a whole number"), ("text_config.vocab_size", -1, "a whole number"),
    ("text_config.num_hidden_layers", 10**9, "a whole number from 1 to 10000"),
    ("text_config.num_attention_heads", 15, "a multiple of num_key_value_heads, which is 8"),
    ("text_config.num_key_value_heads", 0, "a whole number"), ("text_config.head_dim", "128", "a whole number"),
    ("text_config.hidden_act", 3, "a name"), ("text_config.rope_parameters", [1], "an object"),
    ("text_config.rope_parameters.mrope_section", "abc", "three whole numbers"),
    ("text_config.rope_parameters.mrope_section", [24, 20], "three whole numbers"),
    ("text_config.rope_parameters.mrope_section", [24, 20, 20.0], "three whole numbers"),
    ("text_config.rope_parameters.rope_theta", NAN, "a number above 0"),
    ("text_config.rope_parameters.rope_theta", -1, "a number above 0"),
    ("text_config.rope_parameters.mrope_interleaved", "no", "true or false"),
    ("text_config.attention_dropout", "0", "a number from 0 on"),
    ("vision_config.spatial_merge_size", "2", "a whole number of at least 1"),
    ("vision_config.hidden_size", {"a": 1}, "a whole number of at least 1"),
    ("vision_config.hidden_size", 1000, "a multiple of num_heads, which is 16"),
    ("vision_config.depth", 0, "a whole number from 1 to 10000"),
    ("vision_config.out_hidden_size", 1024, "hidden_size 2048"),
    ("vision_config.num_position_embeddings", 2305, "the square of a whole number"),
    ("vision_config.deepstack_visual_indexes", 3, "a list of layers"),
    ("vision_config.deepstack_visual_indexes", ["5"], "a list of layers"),
    ("tie_word_embeddings", "no", "true or false"), ("tie_word_embeddings", 0, "true or false"),
    ("tie_word_embeddings", None, "true or false"), ("image_token_id", -1, "the number of a token"),
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
def test_a_field_of_the_wrong_kind(name, value, expected):
    with pytest.raises(ValueError) as error:
        check_settings(changed("2B", name, value))
    assert str(error.value).startswith(f"{name} is ") and f", expected {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vision_config.deepstack_visual_indexes", [0, 0, 99], r"is \[0, 0, 99\], expected ascending layers below 24"),
        ("vision_config.deepstack_visual_indexes", [11, 5], r"is \[11, 5\], expected ascending"),
        ("vision_config.deepstack_visual_indexes", [24], r"is \[24\], expected ascending layers below 24"),
        ("text_config.rope_parameters.mrope_section", [24, 20, 21], r"\[24, 20, 21\] with the sum 65, expected half"),
    ],
)
def test_fields_that_do_not_go_together(name, value, message):
    with pytest.raises(ValueError, match=f"{name.rpartition('.')[2]} {message}|{message}"):
        check_settings(changed("2B", name, value))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_experts", "8", "text_config.num_experts is '8', expected a whole number up to 10000"),
        ("num_experts_per_tok", 2.0, "text_config.num_experts_per_tok is 2.0"),
        ("moe_intermediate_size", None, "text_config lacks moe_intermediate_size"),
        ("mlp_only_layers", "12", "text_config.mlp_only_layers is '12', expected a list of layers"),
        ("decoder_sparse_step", "1", "text_config.decoder_sparse_step is '1'"),
    ],
)
def test_fields_of_experts(name, value, message):
    with pytest.raises(ValueError, match=message):
        check_settings(changed("30B-A3B", f"text_config.{name}", value))


@pytest.mark.parametrize("name", ["text_config.vocab_size", "text_config.num_key_value_heads", "vision_config.depth"])
def test_a_field_that_is_missing(name):
    section, field = name.split(".")
    config = presets.config_dict("2B")
    del config[section][field]
    with pytest.raises(ValueError, match=f"lacks the field {name}, expected"):
        check_settings(config)
    for other in ([], None, "x"):
        with pytest.raises(ValueError, match="expected an object"):
            check_settings(other)


@pytest.mark.parametrize("size", presets.PRESETS)
def test_released_sizes_are_as_they_must_be(size):
    check_settings(presets.config_dict(size))
    check_settings(presets.hf_config(size).to_dict())
