"""Recipes with adapters: their settings can be changed, saved and read back."""

from __future__ import annotations

import re
from pathlib import Path

from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.training.config import Qwen3VLConfigContainer

import pytest
from qwen3vl_recipes import overrides
from qwen3vl_recipes.registry import recipes

WITH_ADAPTERS = [name for name in recipes() if "_peft_" in name]


def test_every_size_has_lora_and_dora():
    assert len(WITH_ADAPTERS) == 6 + 6 + 8  # Qwen3.5-VL has no recipes for DoRA
    for name in WITH_ADAPTERS:
        cfg = recipes()[name].function()
        assert type(cfg.peft) is (Qwen3VLDoRA if "_dora_" in name else Qwen3VLLoRA)
        whole = cfg.model.tensor_model_parallel_size == cfg.model.pipeline_model_parallel_size == 1
        assert whole or "_dora_" not in name
        assert "in_proj" in cfg.peft.target_modules or not name.startswith("qwen35_vl_")
        assert name.replace("_peft_config", "_peft_dora_config") in WITH_ADAPTERS or name.startswith("qwen35_vl_")


def test_overrides(tmp_path):
    cfg = recipes()["qwen3_vl_8b_peft_config"].function()
    file = tmp_path / "settings.yaml"
    file.write_text("peft:\n  alpha: 64\n  target_modules: [linear_qkv]\n")
    overrides.apply(cfg, ["peft.dim=16", "peft.adapt_vision_model=true", "optimizer.lr=1e-3"], [file])
    expected = dict(dim=16, alpha=64, adapt_vision_model=True, target_modules=["linear_qkv"])
    assert cfg.peft == Qwen3VLLoRA(**expected) and cfg.optimizer.lr == 1e-3
    for word, message in (("peft.dims=16", "peft.dims"), ("peft.dim=many", "expected a whole number such as 16")):
        with pytest.raises(ValueError, match=message):
            overrides.apply(cfg, [word])


def test_adapters_of_experts():
    """As docs/recipes.md turns them on."""
    cfg = recipes()["qwen3_vl_30b_a3b_peft_config"].function()
    assert not cfg.peft.adapt_experts
    overrides.apply(cfg, ["peft.adapt_experts=true", "peft.dim=8", "model.moe_grouped_gemm=false"])
    assert cfg.peft == Qwen3VLLoRA(dim=8, alpha=32, adapt_experts=True) and not cfg.model.moe_grouped_gemm
    names = '["linear_qkv", "*.layers.0.mlp.experts.linear_fc*"]'
    overrides.apply(cfg, [f"peft.target_modules={names}"])
    assert cfg.peft.settings.adapts("language_model.decoder.layers.0.mlp.experts.local_experts.7.linear_fc2")


@pytest.mark.parametrize("name", ["qwen3_vl_2b_peft_config", "qwen3_vl_30b_a3b_peft_dora_config"])
def test_yaml(name, tmp_path):
    cfg = recipes()[name].function()
    cfg.peft.dim, cfg.peft.exclude_modules, cfg.peft.target_modules = 8, ["linear_proj"], []
    cfg.peft.params_to_save = {"noted during a run"}
    cfg.to_yaml(str(tmp_path / "run_config.yaml"))
    again = Qwen3VLConfigContainer.from_yaml(str(tmp_path / "run_config.yaml"))
    cfg.peft.params_to_save = set()
    assert type(again.peft) is type(cfg.peft) and again.peft == cfg.peft


def test_the_page_has_the_settings_and_their_defaults():
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text("utf-8")
    rows = re.findall(r"^\| (`peft\.[^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    found = recipes()["qwen3_vl_8b_peft_config"].function().peft
    assert len(rows) >= 8
    for names, default in rows:
        for name in re.findall(r"`peft\.(\w+)`", names):
            value = getattr(found, name)
            listed = re.findall(r"`(\w+)`", default.partition(";")[0])
            assert (listed or default) == (value if listed else str(value).lower()), name
    overrides.apply(recipes()["qwen3_vl_8b_peft_config"].function(), re.findall(r"(?<= )peft\.\w+=\w+(?=[ \n])", page))
