"""The provider refuses what it cannot honour, as `config.json` names it; the bridge reads what Hugging Face says."""

import copy
import operator
import pickle

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models import refusals
from qwen3vl_bridge.models.provider import ExpertsMixin
from qwen3vl_bridge.models.qwen3_5.provider import Qwen35VLModelProvider, Qwen35VLMoEModelProvider
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.models.qwen3_vl.bridge import Qwen3VLBridge
from qwen3vl_bridge.models.qwen3_vl.config import check_settings
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from qwen3vl_bridge.models.rules import Allowed, Range, When
from qwen3vl_bridge.models.vision_tower import vision_transformer_config

import pytest
import torch
from megatron.bridge import AutoBridge

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


@pytest.fixture
def provider(untied_folder):
    return AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)


def assert_refused(provider, fields, message):
    for name, value in fields.items():
        setattr(provider, name, value)
    with pytest.raises(ValueError, match=message):
        provider.finalize()


@pytest.mark.parametrize(
    "kind", [Qwen3VLModelProvider, Qwen3VLMoEModelProvider, Qwen35VLModelProvider, Qwen35VLMoEModelProvider]
)
def test_every_row_names_settings_that_there_are(kind):
    """One that is misspelt would say so only under its own circumstances."""
    provider = kind(vocab_size=8)
    listed = (
        *(refusals.EXPERTS if issubclass(kind, ExpertsMixin) else refusals.DENSE), *kind.rules,
        *refusals.BEFORE_FINALIZE, *refusals.AFTER_FINALIZE, *refusals.ON_TRAIN,
    )  # fmt: skip
    rows = [rule for rule in listed if isinstance(rule, Allowed)]
    assert len(rows) > 100
    for row in rows:
        for name in row.name.split(" * "):
            operator.attrgetter(name)(provider)
        if isinstance(row.when, When):
            row.when.describe(provider)
        if isinstance(row.expected, Range):
            row.expected.describe(provider)


def test_nothing_is_frozen_unless_asked(provider):
    assert not (provider.freeze_language_model or provider.freeze_vision_model or provider.freeze_vision_projection)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(hidden_size=1000), "out_hidden_size is .*, expected hidden_size 1000"),
        (dict(mrope_section=[2, 1, 2]), "with the sum 5, expected half of the 32 dimensions"),
        (dict(num_layers=2), "3 DeepStack layers need as many text layers, num_layers is 2"),
        (
            dict(vision_recompute_granularity="full", vision_recompute_method="uniform", vision_recompute_num_layers=2),
            r"taps \[0, 2\] are not at the end of a chunk",
        ),
        (
            dict(vision_recompute_granularity="selective", vision_recompute_modules=["layernorm"]),
            "'layernorm' needs Transformer Engine",
        ),
        (dict(vision_recompute_granularity="selective", vision_recompute_modules=["mlp"]), r"vision_recompute_modules"),
        (dict(qk_clip=True), "qk_clip is True, expected False: queries and keys are normalised"),
        (dict(recompute_granularity="full"), "recompute_method is None with recompute_granularity 'full', expected '"),
        (dict(vision_recompute_granularity="all"), "vision_recompute_granularity is 'all', expected None, 'full'"),
        (dict(vision_recompute_modules=["core_attn"], vision_recompute_num_layers=2), "vision_recompute_num_layers is"),
        (dict(recompute_modules=["mlp"]), r"recompute_modules is \['mlp'\] with recompute_granularity None, expected"),
    ],
)
def test_contradictions_are_refused(provider, fields, message):
    assert_refused(provider, fields, message)


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


@pytest.mark.parametrize(
    ("name", "message"),
    [("softmin", "is 'softmin', expected one of gelu, "), ("prelu", "is 'prelu', which has parameter")],
)
def test_activation_of_the_tower_is_checked(provider, name, message):
    provider.vision_config = copy.deepcopy(provider.vision_config)
    provider.vision_config.hidden_act = name
    with pytest.raises(ValueError, match=f"vision_config.hidden_act {message}"):
        provider.finalize()


def test_vision_tower_follows_the_models_precision(provider):
    provider.params_dtype, provider.bf16 = torch.bfloat16, True
    assert vision_transformer_config(provider).params_dtype is torch.bfloat16


@pytest.fixture
def moe_provider(moe_folder):
    return AutoBridge.from_hf_pretrained(str(moe_folder)).to_megatron_provider(load_weights=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_moe_experts=None), "expected experts in at least one layer"),
        (dict(moe_layer_freq=[0, 0, 0, 0]), "expected experts in at least one layer"),
        (dict(moe_layer_freq=[1, 0]), "moe_layer_freq has 2 entries, expected 4"),
        (dict(moe_layer_freq="[1,0,1,1]"), "is the text"),
        (dict(moe_router_topk=7), "moe_router_topk is 7, expected 1 to 6"),
        (dict(expert_model_parallel_size=4), "num_moe_experts is 6, expected a multiple of expert_model_parallel_size"),
        (dict(moe_grouped_gemm=True), "moe_grouped_gemm is True with .* 'local', expected False: Transformer Engine"),
        (dict(moe_router_load_balancing_type="sinkhorn"), "is 'sinkhorn', expected 'aux_loss', 'global_aux_loss' or '"),
        (dict(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]), "padding or packing would change"),
    ],
)
def test_what_experts_do_not_do_is_refused(moe_provider, fields, message):
    assert_refused(moe_provider, fields, message)


def test_nothing_is_frozen_in_a_model_with_experts_either(moe_provider):
    assert type(moe_provider) is Qwen3VLMoEModelProvider
    names = ("freeze_language_model", "freeze_vision_model", "freeze_vision_projection")
    assert not any(getattr(moe_provider, name) for name in names)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("text_config", dict(attention_bias=True), "text_config.attention_bias is True, expected False"),
        ("text_config", dict(norm_topk_prob=False), "text_config.norm_topk_prob is False, expected True"),
        ("text_config", dict(num_experts_per_tok=9), "num_experts_per_tok is 9, expected 1 to 6"),
        ("text_config", dict(decoder_sparse_step=0), "decoder_sparse_step is 0, expected a whole number of at least 1"),
        ("text_config", dict(mlp_only_layers=[0, 1, 2, 3]), "no layer that uses them"),
        (None, dict(quantization_config={"quant_method": "fp8"}), "quantization_config is"),
    ],
)
def test_settings_of_a_configuration_that_nothing_would_follow(moe_folder, part, settings, message):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(moe_folder).to_dict()
    (config if part is None else config[part]).update(settings)
    with pytest.raises(ValueError, match=message):
        check_settings(config)


def test_settings_alone_are_sent_to_other_ranks(provider):
    """Megatron-Bridge pickles it where it exports the weights of a pipelined run, whose groups cannot be."""
    provider.finalize()
    provider._pg_collection = provider._pre_wrap_hooks = lambda: None
    sent = pickle.loads(pickle.dumps(provider))
    plain = (bool, int, float, str, list, torch.dtype)
    assert {name for name, value in vars(provider).items() if isinstance(value, plain)} - vars(sent).keys() == set()
    assert all(vars(sent)[name] == value for name, value in vars(provider).items() if isinstance(value, plain))
    assert sent._pg_collection is None
    assert copy.copy(provider)._pg_collection is provider._pg_collection
