"""Recipes: functions without parameters that return a full training configuration.

from qwen3vl_recipes import qwen3_vl_8b_sft_config
"""

import logging
import os
import sys

from qwen3vl_recipes.registry import recipes

# torch reads this when CUDA is initialised, which importing Megatron-Bridge does (by modelopt): before a recipe's
# `env_vars` are set, when training begins.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        logging.getLogger(__name__).warning(
            "CUDA is initialised already, so expandable segments have no effect and memory will be fragmented: import "
            "qwen3vl_recipes before Megatron-Bridge, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def __getattr__(name: str):
    known = recipes() if name.endswith("_config") else {}
    if name not in known:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return known[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *recipes()})
