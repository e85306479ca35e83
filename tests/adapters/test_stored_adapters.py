"""The command line for adapters: quick help, refusals that name what was found."""

import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, export_adapters
from qwen3vl_bridge.checkpoint.formats.megatron import read_run_config
from qwen3vl_bridge.peft.stored_adapters import adapter_settings

import pytest

ADAPTERS = Path(__file__).parents[2] / "conversion" / "adapters.py"
LORA = """\
peft: {_target_: qwen3vl_bridge.peft.Qwen3VLLoRA, dim: 4, alpha: 8, target_modules: [linear_qkv], exclude_modules: [],
  adapt_language_model: true, adapt_vision_model: false, adapt_vision_projection: false, adapt_experts: false,
  params_to_save: !!set {a: }}
"""


def test_help_without_torch():
    code = "import sys; from qwen3vl_bridge.cli import convert as cli; cli._parser(None)"
    code += "; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    for verb in ([], ["export"], ["merge"]):
        found = subprocess.run([sys.executable, ADAPTERS, *verb, "--help"], capture_output=True, text=True, check=True)
        assert "usage: adapters.py" in found.stdout


def test_settings_are_read_as_data(tmp_path):
    (tmp_path / "run_config.yaml").write_text(LORA)
    found = adapter_settings(read_run_config(tmp_path), tmp_path)
    assert (found.dim, found.alpha, found.dora, found.parts) == (4, 8, False, {"language_model"})
    assert found.adapts("language_model.decoder.layers.3.self_attention.linear_qkv")
    assert not found.adapts("vision_model.decoder.layers.3.self_attention.linear_qkv")
    text = LORA.replace("[linear_qkv]", '["*.experts.linear_fc1"]')
    for asked in ("false", "true"):
        (tmp_path / "run_config.yaml").write_text(text.replace("adapt_experts: false", f"adapt_experts: {asked}"))
        layer = "language_model.decoder.layers.3.mlp.experts.local_experts.1.linear_fc1"
        assert adapter_settings(read_run_config(tmp_path), tmp_path).adapts(layer) == (asked == "true")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peft: null\n", "was saved by a run without adapters"),
        ("- 1\n", "holds a list, expected sections"),
        ("a: [\n", "run_config.yaml: while parsing"),
        ("peft: !!python/object/apply:os.system [false]\n", "could not determine a constructor"),
        (LORA.replace("Qwen3VLLoRA", "Other"), "peft is 'qwen3vl_bridge.peft.Other', expected"),
        (LORA.replace("dim: 4", "dim: many"), "peft has dim 'many', alpha 8, .*expected a whole number"),
        (LORA.replace("[linear_qkv]", "linear_qkv"), "target_modules 'linear_qkv' .* lists of names"),
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
