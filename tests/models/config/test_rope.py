"""Rotary settings of a config.json are read as transformers reads them, wherever the file has them."""

import copy
from types import SimpleNamespace

from qwen3vl_bridge.config.hf_config import with_scaled_rope
from qwen3vl_bridge.config.hybrid_config import rope_parameters as of_qwen3_5
from qwen3vl_bridge.models.common.rope import InterleavedMRoPE
from qwen3vl_bridge.models.qwen3_vl.config import rope_parameters as of_qwen3_vl

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3VLTextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from tests.parity.conftest import make_pair
from tests.parity.test_settings import assert_parity_of_change, changed

FAMILIES = {
    "Qwen3-VL": SimpleNamespace(
        read=of_qwen3_vl, config=Qwen3VLTextConfig, embedding=Qwen3VLTextRotaryEmbedding,
        head=16, common={"rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    ),
    "Qwen3.5": SimpleNamespace(
        read=of_qwen3_5, config=Qwen3_5TextConfig, embedding=Qwen3_5TextRotaryEmbedding,
        head=32, common={"rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    ),
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
LENGTH = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": YARN},
        {"rope_parameters": YARN, **LENGTH},
        {"rope_parameters": YARN | {"original_max_position_embeddings": 512}, **LENGTH},
        {"rope_parameters": LLAMA3, **LENGTH},
        {"rope_scaling": YARN, **LENGTH},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, **LENGTH},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
        {"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": YARN, "rope_theta": 5e5},
    ],
    ids=str,
)
def test_rope_parameters_read_from_config_match_transformers(name, settings):
    family = FAMILIES[name]
    text = {
        **dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, head_dim=family.head),
        **dict(vocab_size=100, max_position_embeddings=32768),
        **{key: {**family.common, **one} if isinstance(one, dict) else one for key, one in settings.items()},
    }
    rope = family.read(text)
    dim = int(family.head * family.common.get("partial_rotary_factor", 1.0))
    scaled = None if rope["rope_type"] == "default" else rope
    ours = InterleavedMRoPE(dim, rope["rope_theta"], rope["mrope_section"], torch.float32, scaled)
    _, found, scale = ours.constants(torch.device("cpu"))
    expected = family.embedding(family.config(**copy.deepcopy(text)))
    torch.testing.assert_close(found, expected.inv_freq, rtol=1e-6, atol=0)  # one rounding of a power
    assert scale == expected.attention_scaling


@pytest.mark.parametrize("rope", [YARN | {"original_max_position_embeddings": 128}, LLAMA3], ids=["yarn", "llama3"])
def test_scaled_rope_reads_original_max_position_embeddings_of_text_config(rope, untied_folder, tmp_path):
    rope = rope | dict(rope_theta=5e6, mrope_section=[6, 5, 5])
    inner = make_pair(changed(untied_folder, tmp_path / "inner", rope_parameters=rope))
    outer = make_pair(changed(untied_folder, tmp_path / "outer", rope_parameters=rope, **LENGTH))
    assert_parity_of_change(inner, outer)


def test_with_scaled_rope_replaces_all_rotary_fields_of_config():
    text = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN, **LENGTH, "hidden_size": 64}
    rope = YARN | {"original_max_position_embeddings": 512}
    changed = with_scaled_rope({"text_config": text}, rope)["text_config"]
    assert changed == {"rope_parameters": {"mrope_interleaved": True} | rope, "hidden_size": 64}


@pytest.mark.parametrize("name", FAMILIES)
def test_two_different_partial_rotary_factors_in_config_raise(name):
    family = FAMILIES[name]
    text = {"rope_parameters": family.common | {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match=r"partial_rotary_factor is 0\.25 .* and 0\.5 in text_config"):
        family.read(text | {"head_dim": family.head})
