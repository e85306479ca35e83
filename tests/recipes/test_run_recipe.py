"""Megatron-Bridge's `run_recipe.py` finds this package's recipes, forward step and callbacks.

The script itself is no part of an installed Megatron-Bridge, and its recipes need packages that this one does not; so
both are stood in for by files with the same tables.
"""

import inspect
import sys
import types

import qwen3vl_bridge
from qwen3vl_bridge.training.guard import StepGuard

import pytest
import qwen3vl_recipes
from qwen3vl_recipes import run_recipe

RUNNER = """
STEP_FUNCTIONS = {"qwen3_vl_step": ("megatron.bridge.models.qwen_vl.qwen3_vl_step", "forward_step"), "gpt_step": None}
TRAIN_FUNCTIONS = {"pretrain": ("trains", "pretrain"), "finetune": ("trains", "finetune")}
"""
SCRIPT = """
import sys
from pathlib import Path
import megatron.bridge.recipes as recipes
import recipe_runner
def main():
    _, _, name = sys.argv
    config = getattr(recipes, name)()
    config.dataset.path = str(Path(__file__).parent)
    step = recipe_runner.STEP_FUNCTIONS["qwen3_vl_step"]
    recipe_runner.TRAIN_FUNCTIONS["finetune"](config=config, forward_step_func=step)
"""
TRAINS = """
calls = []
def finetune(config, forward_step_func, callbacks=None):
    calls.append((config, forward_step_func, callbacks))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    for name, text in dict(recipe_runner=RUNNER, run_recipe=SCRIPT, trains=TRAINS).items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "train.jsonl").touch()
    theirs = types.ModuleType("megatron.bridge.recipes")
    theirs.qwen3_vl_8b_sft_config = theirs.llama_config = lambda: "theirs"
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    import megatron.bridge

    monkeypatch.setattr(megatron.bridge, "recipes", theirs, raising=False)
    monkeypatch.setattr(sys, "path", ["first", *sys.path])
    yield tmp_path / "run_recipe.py"
    for name in ("recipe_runner", "run_recipe", "trains"):
        sys.modules.pop(name, None)


def test_run_recipe_trains_with_our_forward_step_and_callbacks(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m", str(script), "--recipe", "qwen3_vl_digits_sft_config"])
    run_recipe.main()
    ((config, step, callbacks),) = sys.modules["trains"].calls
    assert type(config).__name__ == "Qwen3VLConfigContainer"
    assert step is qwen3vl_bridge.forward_step and isinstance(callbacks[0], StepGuard)
    theirs = sys.modules["megatron.bridge.recipes"]
    names = [name for name in dir(qwen3vl_recipes) if name.endswith("_config") and "_dora_" not in name]
    assert "qwen3_vl_8b_sft_config" in names
    assert all(getattr(theirs, name) is getattr(qwen3vl_recipes, name) for name in names)
    assert theirs.llama_config() == "theirs" and sys.modules["recipe_runner"].STEP_FUNCTIONS["gpt_step"] is None
    # The script gives recipes of DoRA the method; it refuses one with that name and without the parameter.
    recipe = theirs.qwen3_vl_2b_peft_dora_config
    assert "peft_scheme" in inspect.signature(recipe).parameters
    assert type(recipe(peft_scheme="dora").peft).__name__ == "Qwen3VLDoRA"
    with pytest.raises(ValueError, match="--mode is lora, expected dora; or use the recipe qwen3_vl_2b_peft_config"):
        recipe(peft_scheme="lora")


def test_run_recipe_without_script_exits_with_usage(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m", "no/run_recipe.py"])
    with pytest.raises(SystemExit, match=r"usage: python -m qwen3vl_recipes.run_recipe .*run_recipe.py"):
        run_recipe.main()
