"""Presets have the sizes of the released models, for transformers and for the provider."""

import json
import subprocess
import sys

from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from qwen3vl_bridge.models.qwen3_vl.table import table
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import parameter_count

import pytest
import torch
import transformers
from megatron.bridge import AutoBridge

# Parameters of the released models.
RELEASED = {
    "2B": 2_127_532_032, "4B": 4_437_815_808, "8B": 8_767_123_696, "32B": 33_357_390_064, "30B-A3B": 31_070_754_032,
    "235B-A22B": 235_670_022_896,
}  # fmt: skip
MOE = {"30B-A3B", "235B-A22B"}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a preset reached for the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.parametrize("size", RELEASED)
def test_preset_parameter_count_in_transformers_equals_released_model(size):
    """The model is built on the meta device, without the weight table; a tied output layer counts once."""
    config = presets.hf_config(size)
    with torch.device("meta"):
        model = getattr(transformers, *config.architectures)(config)
    count = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(count.values()) == RELEASED[size]

    experts = sum(n for name, n in count.items() if ".experts." in name)
    assert (experts > 0) == (size in MOE)


@pytest.mark.parametrize("size", RELEASED)
def test_preset_config_round_trips_through_transformers_and_json(size):
    config = presets.hf_config(size)
    written = json.loads(config.to_json_string(use_diff=False))
    # transformers 5 writes this one under another name
    if size in MOE:
        written["text_config"]["num_experts"] = written["text_config"].pop("num_local_experts")

    given = json.loads(json.dumps(presets.config_dict(size)))
    for part in ("text_config", "vision_config"):
        assert written.pop(part).items() >= given.pop(part).items()
    assert written.items() >= given.items()

    assert config.text_config.tie_word_embeddings == config.tie_word_embeddings
    again = type(config).from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    counted = parameter_count(table(), dimensions_of(again.to_dict()))
    assert counted == presets.parameter_count(size) == RELEASED[size]


@pytest.mark.parametrize("size", RELEASED)
def test_provider_of_preset_is_built_offline_with_config_values(size):
    provider = AutoBridge.from_hf_config(presets.hf_config(size)).to_megatron_provider(load_weights=False)
    provider.finalize()
    text, vision = (presets.config_dict(size)[part] for part in ("text_config", "vision_config"))
    expected = dict(
        num_layers=text["num_hidden_layers"], hidden_size=text["hidden_size"],
        ffn_hidden_size=text["intermediate_size"], num_attention_heads=text["num_attention_heads"],
        num_query_groups=text["num_key_value_heads"], kv_channels=128, padded_vocab_size=151_936, seq_length=262_144,
        layernorm_epsilon=1e-6, rotary_base=5e6, mrope_section=[24, 20, 20], rope_parameters=None,
        share_embeddings_and_output_weights=size in {"2B", "4B"}, params_dtype=torch.bfloat16, image_token_id=151_655,
        video_token_id=151_656, vision_start_token_id=151_652, vision_end_token_id=151_653, bos_token_id=151_643,
        eos_token_id=151_645, num_moe_experts=None,
    )  # fmt: skip
    if size in MOE:
        expected |= dict(
            num_moe_experts=128, moe_router_topk=8, moe_ffn_hidden_size=text["moe_intermediate_size"],
            moe_aux_loss_coeff=0.001, moe_layers=tuple(range(text["num_hidden_layers"])),
        )  # fmt: skip
    assert type(provider) is (Qwen3VLMoEModelProvider if size in MOE else Qwen3VLModelProvider)
    assert {name: getattr(provider, name) for name in expected} == expected
    tower = {name: getattr(provider.vision_config, name) for name in vision if name not in ("model_type", "dtype")}
    assert tower == {name: vision[name] for name in tower}


@pytest.mark.parametrize("size", RELEASED)
def test_preset_config_by_hub_id_equals_config_by_size(size):
    for name in (f"Qwen/Qwen3-VL-{size}-Instruct", f"Qwen/Qwen3-VL-{size}-Thinking"):
        assert name in presets.hub_ids(size)
        assert presets.config_dict(name) == presets.config_dict(size) == presets.config_dict(size.lower())


@pytest.mark.parametrize("name", ["7B", "", "Qwen/Qwen3-VL-8B", "Qwen/Qwen2.5-VL-32B-Instruct"])
@pytest.mark.parametrize("ask", [presets.config_dict, presets.hf_config, presets.parameter_count])
def test_preset_of_unknown_size_raises_and_lists_valid_sizes(ask, name):
    with pytest.raises(ValueError, match=f"'{name}', expected one of 2B, 4B, 8B, 32B, 30B-A3B, 235B-A22B or Qwen/"):
        ask(name)


def test_changing_returned_preset_config_leaves_preset_unchanged():
    config = presets.config_dict("8B")
    config["vision_config"]["deepstack_visual_indexes"].clear()
    config["text_config"]["rope_parameters"]["mrope_section"].clear()
    presets.hf_config("8B").text_config.num_hidden_layers = 1
    assert presets.config_dict("8B")["vision_config"]["deepstack_visual_indexes"] == [8, 16, 24]
    assert presets.hf_config("8B").text_config.rope_parameters["mrope_section"] == [24, 20, 20]
    assert presets.hf_config("8B").text_config.num_hidden_layers == 36


def test_presets_import_no_torch_transformers_megatron_or_numpy():
    code = (
        "import sys; from qwen3vl_bridge.models.qwen3_vl import presets; presets.parameter_count('235B-A22B'); "
        "print(*{'torch', 'transformers', 'megatron', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
