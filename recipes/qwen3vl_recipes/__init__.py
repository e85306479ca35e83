"""Recipes: functions without parameters that return a full training configuration.

from qwen3vl_recipes import qwen3_vl_8b_sft_config
"""

from qwen3vl_recipes.registry import recipes


def __getattr__(name: str):
    known = recipes() if name.endswith("_config") else {}
    if name not in known:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return known[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *recipes()})
