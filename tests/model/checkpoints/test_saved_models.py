"""A checkpoint without a `config.json` of its own is compared with what its run's file says of the model.

Runs of Megatron-Bridge's own Qwen3-VL leave no `config.json`: with another one named, every tensor may have the shape
it should, and be another model's all the same.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.formats.megatron import run_config
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, check_model_of_run
from qwen3vl_bridge.registry import family

import pytest
from megatron.bridge import AutoBridge

from tests.model.checkpoints.stock_models import as_saved, stock_provider

PATH = Path("run_config.yaml")
KINDS = [("ours", "untied"), ("ours", "tied"), ("ours", "mixed"), ("ours", "experts"), ("stock", "untied"),
         ("stock", "tied"), ("stock", "experts"), ("converted", "mixed")]  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 5_000_000,
        "mrope_section": [6, 5, 5], "mrope_interleaved": True}  # fmt: skip
EVERY = {
    "tie_word_embeddings": None,  # the other one
    "image_token_id": 7,
    "video_token_id": 7,
    "vision_start_token_id": 7,
    "vision_end_token_id": 7,
    "text_config.vocab_size": 1024,
    "text_config.rms_norm_eps": 1e-5,
    "text_config.hidden_act": "gelu",
    "text_config.num_key_value_heads": 4,
    "text_config.rope_parameters.rope_theta": 10_000,
    "text_config.rope_parameters.mrope_section": [4, 6, 6],
    "text_config.rope_parameters": YARN,
    "vision_config.num_heads": 2,
    "vision_config.hidden_act": "gelu",
    "vision_config.deepstack_visual_indexes": [0, 2, 3],
    "vision_config.num_position_embeddings": 144,
    "vision_config.patch_size": 8,
    "vision_config.temporal_patch_size": 1,
    "vision_config.intermediate_size": 88,
}
WITH_EXPERTS = {
    "text_config.num_experts_per_tok": 3,
    "text_config.moe_intermediate_size": 24,
    "text_config.mlp_only_layers": [2],
}


def described(who: str, folder: Path) -> dict[str, Any]:
    """The `model` section of a run's file."""
    if who == "converted":
        config = json.loads((folder / "config.json").read_text())
        return run_config(
            config,
            str(folder),
            "torch_dist",
            provider=family("qwen3_vl").provider,
            vocabulary=(rows := config["text_config"]["vocab_size"]),
            rows=rows,
        )["model"]
    if who == "ours":
        provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
        provider.finalize()
    else:
        provider = stock_provider(folder)
    return as_saved(provider)


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def run(request, folders) -> tuple[dict[str, Any], dict[str, Any]]:
    who, kind = request.param
    return {"model": described(who, folders[kind])}, json.loads((folders[kind] / "config.json").read_text())


def written(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(folder)


def changed(config: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    holder, *names = config, *name.split(".")
    for section in names[:-1]:
        holder = holder[section]
    holder[names[-1]] = not holder[names[-1]] if value is None else value
    return config


def test_the_model_it_is_of_is_taken(run, tmp_path):
    saved, config = run
    assert check_model_of_run(written(tmp_path, config), saved, PATH)


def test_every_field_that_differs_is_named(run, tmp_path):
    saved, config = run
    with_experts = config["model_type"] == "qwen3_vl_moe"
    for name, value in (EVERY | (WITH_EXPERTS if with_experts else {})).items():
        with pytest.raises(CheckpointError, match=r"describes another model than run_config\.yaml") as error:
            check_model_of_run(written(tmp_path, changed(config, name, value)), saved, PATH)
        _, *lines = str(error.value).splitlines()
        assert lines and all(name.rpartition(".")[2] in line for line in lines), (name, lines)


def test_a_model_of_the_other_kind_is_refused(folders, tmp_path):
    for one, other in (("untied", "experts"), ("experts", "untied")):
        config = json.loads((folders[one] / "config.json").read_text())
        with pytest.raises(CheckpointError, match="model_type is"):
            check_model_of_run(written(tmp_path, config), {"model": described("stock", folders[other])}, PATH)


def test_a_scaled_rotary_embedding(folders, tmp_path):
    config = json.loads((folders["untied"] / "config.json").read_text())
    scaled = changed(config, "text_config.rope_parameters", YARN)
    ours, stock = described("ours", folders["untied"]), described("stock", folders["untied"])
    ours["rope_parameters"] = stock["hf_text_config"]["rope_parameters"] = YARN
    for saved in (ours, stock):
        assert check_model_of_run(written(tmp_path, scaled), {"model": saved}, PATH)
        other = changed(scaled, "text_config.rope_parameters.factor", 8.0)
        with pytest.raises(CheckpointError, match=r"rope_parameters\.factor is 8\.0, expected 4\.0"):
            check_model_of_run(written(tmp_path, other), {"model": saved}, PATH)
        with pytest.raises(CheckpointError, match=r"rope_parameters\.rope_type is 'default', expected 'yarn'"):
            check_model_of_run(written(tmp_path, config), {"model": saved}, PATH)


def test_what_a_file_does_not_say_is_not_asked(folders, tmp_path):
    config = written(tmp_path, json.loads((folders["mixed"] / "config.json").read_text()))
    for saved in ({}, {"model": None}, {"model": {}}, {"model": {"seq_length": 3}}):
        assert not check_model_of_run(config, saved, PATH)
    assert check_model_of_run(config, {"model": {"num_layers": 4, "vocab_size": 640}}, PATH)
    for model in ({"num_layers": 5}, {"vision_config": {"depth": 7}}, {"moe_layer_freq": 1, "num_moe_experts": 6}):
        with pytest.raises(CheckpointError):
            check_model_of_run(config, {"model": {"num_layers": 4} | model}, PATH)
