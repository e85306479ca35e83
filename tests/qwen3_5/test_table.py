"""The weight table against transformers: the same tensors in the same shapes; and the released sizes' parameters."""

from __future__ import annotations

import math

from qwen3vl_bridge.checkpoint.conversion_plan import tensors_of
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.models.qwen3_5.config import dimensions_of
from qwen3vl_bridge.models.qwen3_5.presets import PRESETS, config_dict, hf_config
from qwen3vl_bridge.models.qwen3_5.table import table
from qwen3vl_bridge.weights.rows import ExpertLayout, expand, parameter_count

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

MTP_PARAMETERS = {  # of released files' multi-token prediction, which transformers' models lack
    "0.8B": 20_452_864,
    "2B": 60_828_160,
    "4B": 120_599_552,
    "9B": 243_290_624,
    "27B": 424_699_392,
    "35B-A3B": 844_640_768,
    "122B-A10B": 2_523_679_232,
    "397B-A17B": 6_595_568_128,
}
PARAMETERS = {  # of transformers' models on the meta device
    "0.8B": 852_985_920,
    "2B": 2_213_241_664,
    "4B": 4_539_265_536,
    "9B": 9_409_813_744,
    "27B": 27_356_728_560,
    "35B-A3B": 35_107_181_936,
    "122B-A10B": 122_562_817_776,
    "397B-A17B": 396_802_360_816,
}


@pytest.mark.parametrize("size", PRESETS)
def test_tensors_of_every_size(size):
    config = hf_config(size)
    is_moe = PRESETS[size].experts is not None
    with torch.device("meta"):
        model = (Qwen3_5MoeForConditionalGeneration if is_moe else Qwen3_5ForConditionalGeneration)(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if PRESETS[size].tied:
        del expected["lm_head.weight"]
    dimensions = dimensions_of(config_dict(size))
    found = tensors_of(expand(table(), dimensions), HuggingFace(dimensions))
    mtp = {name: found.pop(name) for name in list(found) if name.startswith("mtp.")}
    assert found == expected
    assert sum(map(math.prod, expected.values())) == PARAMETERS[size]
    assert sum(map(math.prod, mtp.values())) == MTP_PARAMETERS[size]
    assert parameter_count(table(), dimensions) == PARAMETERS[size] + MTP_PARAMETERS[size]


@pytest.mark.parametrize("kind", ["dense", "moe", "3.6"])
def test_tensors_of_multi_token_prediction(qwen3_5_folders, kind):
    """Those of transformers' parts, in the layouts of released files."""
    folder = qwen3_5_folders[kind]
    model = ModelConfig(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    experts = model.expert_layout(shapes)
    assert tensors_of(model.rows(experts), HuggingFace(model.dimensions)) == shapes
    assert any(name.startswith("mtp.") for name in shapes)


def test_layers_without_a_list():
    """Transformers drops the interval where it saves, older files have nothing else."""
    config = config_dict("2B")
    listed = dimensions_of(config)
    del config["text_config"]["layer_types"]
    assert dimensions_of(config) == listed
    config["text_config"]["full_attention_interval"] = 3
    assert dimensions_of(config).indices["full_layers"] == tuple(range(2, 24, 3))


@pytest.mark.parametrize("experts", ExpertLayout)
def test_a_row_for_every_tensor_once(experts):
    dimensions = dimensions_of(config_dict("35B-A3B"))
    rows = list(expand(table(experts), dimensions))
    assert len({row.megatron for row in rows}) == len(rows)
