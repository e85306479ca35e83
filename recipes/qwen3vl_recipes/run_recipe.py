r"""Megatron-Bridge's own launcher, `scripts/training/run_recipe.py`, with our recipes.

    torchrun --nproc_per_node 8 -m qwen3vl_recipes.run_recipe Megatron-Bridge/scripts/training/run_recipe.py \
        --recipe qwen3_vl_8b_sft_config --pretrained_checkpoint /HF_FOLDER --save_dir /RUN dataset.path=/DATA

The script looks a recipe up among the names of `megatron.bridge.recipes`, and has its own tables of forward steps and
training functions. In a process started this way, the names of Qwen3-VL and Qwen3.5-VL in all three are ours: a recipe,
the step for its batches, and a training function with the callbacks of its configuration. Megatron-Bridge's recipes of
the same names have other settings; they are not available here.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qwen3vl_recipes.registry import Recipe, recipes

if TYPE_CHECKING:
    from collections.abc import Callable

# By these names Megatron-Bridge's scripts choose a step for recipes whose names begin with `qwen3_vl_` or `qwen35_vl_`.
_STEP = "qwen3_vl_step"


def main() -> None:
    """Run the script in the first argument, with the other arguments."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m qwen3vl_recipes.run_recipe .../scripts/training/run_recipe.py [ARGUMENT ...]")
    script = Path(sys.argv[1]).resolve()
    del sys.argv[0]
    sys.path[0] = str(script.parent)
    offer_recipes(importlib.import_module("recipe_runner"))
    importlib.import_module(script.stem).main()


def offer_recipes(runner: ModuleType) -> None:
    """Replace the recipes, step and training functions that the script's `recipe_runner` looks up by ours."""
    import qwen3vl_bridge

    theirs = importlib.import_module("megatron.bridge.recipes")
    for name, ours in recipes().items():
        setattr(theirs, name, _of_dora(name, ours) if "_dora_" in name else ours)
    runner.STEP_FUNCTIONS[_STEP] = qwen3vl_bridge.forward_step
    for mode, found in runner.TRAIN_FUNCTIONS.items():
        runner.TRAIN_FUNCTIONS[mode] = functools.partial(_train, found)


def _of_dora(name: str, ours: Recipe) -> Callable[..., Any]:
    """A recipe of DoRA with the parameter for the method that the script passes; ours has only one method."""

    def recipe(*, peft_scheme: str = "dora") -> Any:
        if peft_scheme != "dora":
            raise ValueError(f"--mode is {peft_scheme}, expected dora, or {name.replace('_dora', '')}")
        return ours()

    return recipe


def _train(found: Callable | tuple[str, str], config: Any, forward_step_func: Callable) -> None:
    """A training function of Megatron-Bridge's, with our callbacks."""
    from qwen3vl_bridge.training.callbacks import training_callbacks

    train = found if callable(found) else getattr(importlib.import_module(found[0]), found[1])
    train(config=config, forward_step_func=forward_step_func, callbacks=training_callbacks(config))


if __name__ == "__main__":
    main()
