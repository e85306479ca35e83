r"""Run Megatron-Bridge's own launcher, `scripts/training/run_recipe.py`, with this package's recipes.

    torchrun --nproc_per_node 8 -m qwen3vl_recipes.run_recipe Megatron-Bridge/scripts/training/run_recipe.py \
        --recipe qwen3_vl_8b_sft_config --pretrained_checkpoint /HF_FOLDER --save_dir /RUN dataset.path=/DATA

The script reads recipes from `megatron.bridge.recipes`, and looks up forward steps and training functions in its own
dicts. This module replaces all three: this package's recipes replace Megatron-Bridge's recipes of the same names, which
have other settings; the forward step is `qwen3vl_bridge.forward_step`; and training functions are called with
callbacks.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.training.allocator import use_expandable_segments

from qwen3vl_recipes.registry import Recipe, recipes

if TYPE_CHECKING:
    from collections.abc import Callable

# Name of the forward step that Megatron-Bridge's scripts use for recipes named `qwen3_vl_...` or `qwen35_vl_...`.
_STEP = "qwen3_vl_step"


def main() -> None:
    """Run the script that the first argument names, with the remaining arguments."""
    use_expandable_segments()
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m qwen3vl_recipes.run_recipe .../scripts/training/run_recipe.py [ARGUMENT ...]")
    script = Path(sys.argv[1]).resolve()
    del sys.argv[0]
    sys.path[0] = str(script.parent)
    offer_recipes(importlib.import_module("recipe_runner"))
    importlib.import_module(script.stem).main()


def offer_recipes(runner: ModuleType) -> None:
    """Make the script use this package's recipes, forward step, and training functions with callbacks.

    `runner` is the script's module `recipe_runner`, which looks them up.
    """
    import qwen3vl_bridge

    bridge_recipes = importlib.import_module("megatron.bridge.recipes")
    for name, recipe in recipes().items():
        setattr(bridge_recipes, name, _accept_peft_scheme(name, recipe) if "_dora_" in name else recipe)
    runner.STEP_FUNCTIONS[_STEP] = qwen3vl_bridge.forward_step
    for mode, found in runner.TRAIN_FUNCTIONS.items():
        runner.TRAIN_FUNCTIONS[mode] = functools.partial(_train, found)


def _accept_peft_scheme(name: str, dora: Recipe) -> Callable[..., Any]:
    """Return a recipe that accepts the argument `peft_scheme`, which the script passes, and calls the DoRA recipe.

    It raises ValueError for a scheme other than "dora".
    """

    def recipe(*, peft_scheme: str = "dora") -> Any:
        if peft_scheme != "dora":
            raise ValueError(f"--mode is {peft_scheme}, expected dora; or use the recipe {name.replace('_dora', '')}")
        return dora()

    return recipe


def _train(found: Callable | tuple[str, str], config: Any, forward_step_func: Callable) -> None:
    """Call a training function of Megatron-Bridge with the callbacks of the configuration.

    `found` is the function, or its (module, name).
    """
    from qwen3vl_bridge.training.callbacks import training_callbacks

    train = found if callable(found) else getattr(importlib.import_module(found[0]), found[1])
    train(config=config, forward_step_func=forward_step_func, callbacks=training_callbacks(config))


if __name__ == "__main__":
    main()
