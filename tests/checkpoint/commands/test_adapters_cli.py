"""The command line for adapters: quick help, refusals that name what was found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, export_adapters
from qwen3vl_bridge.checkpoint.adapters.settings import adapter_settings
from qwen3vl_bridge.checkpoint.formats.megatron import read_run_config

import pytest

ADAPTERS = Path(__file__).parents[3] / "conversion" / "adapters.py"
LORA = """\
peft: {_target_: qwen3vl_bridge.peft.Qwen3VLLoRA, dim: 4, alpha: 8, target_modules: [linear_qkv], exclude_modules: [],
  adapt_language_model: true, adapt_vision_model: false, adapt_vision_projection: false, params_to_save: !!set {a: }}
"""


def test_help_without_torch():
    code = "import sys; from qwen3vl_bridge.cli import convert as cli; cli._parser(None)"
    code += "; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    for verb in ([], ["export"], ["merge"]):
        found = subprocess.run([sys.executable, ADAPTERS, *verb, "--help"], capture_output=True, text=True, check=True)
        assert "usage: adapters.py" in found.stdout


def test_runs_of_earlier_versions_have_no_adapters_of_experts(tmp_path):
    (tmp_path / "run_config.yaml").write_text(LORA)
    layer = "language_model.decoder.layers.3.mlp.experts.local_experts.1.linear_fc1"
    assert not adapter_settings(read_run_config(tmp_path), tmp_path).experts
    text = LORA.replace("[linear_qkv]", '["*.experts.linear_fc1"]')
    for asked in ("", "adapt_experts: true, "):
        (tmp_path / "run_config.yaml").write_text(text.replace("dim: 4, ", f"dim: 4, {asked}"))
        assert adapter_settings(read_run_config(tmp_path), tmp_path).adapts(layer) == bool(asked)


def test_settings_are_read_as_data(tmp_path):
    (tmp_path / "run_config.yaml").write_text(LORA)
    found = adapter_settings(read_run_config(tmp_path), tmp_path)
    assert (found.dim, found.alpha, found.dora, found.parts) == (4, 8, False, {"language_model"})
    assert found.adapts("language_model.decoder.layers.3.self_attention.linear_qkv")
    assert not found.adapts("vision_model.decoder.layers.3.self_attention.linear_qkv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peft: null\n", "was saved by a run without adapters"),
        ("- 1\n", "holds a list, expected sections"),
        ("a: [\n", "run_config.yaml: while parsing"),
        ("peft: !!python/object/apply:os.system [false]\n", "could not determine a constructor"),
        (LORA.replace("Qwen3VLLoRA", "Other"), "peft is 'qwen3vl_bridge.peft.Other', expected"),
        (LORA.replace("dim: 4", "dim: many"), "peft lacks a number"),
        (LORA.replace("dim: 4, ", ""), "peft lacks 'dim'"),
    ],
)
def test_what_is_no_configuration_of_adapters_is_refused(text, message, tmp_path):
    (tmp_path / "run_config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        adapter_settings(read_run_config(tmp_path), tmp_path)


def test_a_converted_checkpoint_has_no_adapters(untied_folder, tmp_path):
    from qwen3vl_bridge.checkpoint import import_checkpoint

    import_checkpoint(untied_folder, tmp_path / "megatron", progress=False)
    with pytest.raises(CheckpointError, match="was saved by a run without adapters"):
        export_adapters(tmp_path / "megatron", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 50_000, "more than 50 deep"),
        (LORA.replace("dim: 4", "dim: .inf"), "peft.dim is inf, expected a finite number"),
        (LORA.replace("alpha: 8", "alpha: .nan"), "peft.alpha is nan, expected a finite number"),
        ("model: [1]", r"model is \[1\], expected a section of settings"),
        ("peft: x", "peft is x, expected a section of settings"),
    ],
)
def test_a_runs_configuration_out_of_bounds(text, message, tmp_path):
    (tmp_path / "run_config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        adapter_settings(read_run_config(tmp_path), tmp_path)
    assert str(tmp_path / "run_config.yaml") in str(error.value)


def test_infinities_of_an_optimizer_are_none_of_ours(tmp_path):
    (tmp_path / "run_config.yaml").write_text(LORA + "optimizer: {grad_norm_skip_threshold: .inf}\n")
    assert adapter_settings(read_run_config(tmp_path), tmp_path).dim == 4
