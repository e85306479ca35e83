"""A saved run_config.yaml that names our classes gives the same configuration back."""

from __future__ import annotations

from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from qwen3vl_bridge.models.settings import gelu_tanh
from qwen3vl_bridge.training.config import Qwen3VLConfigContainer

import pytest
from megatron.bridge import AutoBridge
from megatron.bridge.training.utils.checkpoint_utils import read_run_config
from megatron.bridge.utils.instantiate_utils import instantiate
from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
from qwen3vl_recipes.paths import set_paths


@pytest.mark.parametrize(("kind", "made"), [("tied", Qwen3VLModelProvider), ("moe", Qwen3VLMoEModelProvider)])
def test_comes_back_the_same(kind, made, request, tmp_path):
    folder = request.getfixturevalue(f"{kind}_folder")
    cfg = set_paths(
        qwen3_vl_digits_sft_config(), hf_path=folder, data_path=tmp_path, pretrained_checkpoint=tmp_path / "megatron",
        save=tmp_path / "run",
    )  # fmt: skip
    cfg.model.freeze_vision_model, cfg.model.vision_recompute_granularity = True, "selective"
    cfg.model.activation_func = gelu_tanh
    path = tmp_path / "run_config.yaml"
    cfg.to_yaml(str(path))

    again = Qwen3VLConfigContainer.from_yaml(str(path))
    assert type(again.model) is made and type(again.dataset) is type(cfg.dataset)
    found, expected = again.to_dict(), cfg.to_dict()
    del expected["model"]["vision_config"]["model_type"]  # a class attribute; Megatron-Bridge leaves it out
    assert found == expected
    assert again.model.vision_config.to_dict() == cfg.model.vision_config.to_dict()

    provider = instantiate(read_run_config(str(path))["model"])
    fresh = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    assert type(provider) is made and provider.mrope_section == fresh.mrope_section
    assert provider.moe_layers == fresh.moe_layers
    provider.finalize()
    assert provider.activation_func is gelu_tanh
