"""The demo's recipe for a model of either family."""

import json
from pathlib import Path
from typing import Any

from qwen3vl_recipes.digits import (
    qwen3_vl_digits_sft_config,
    qwen35_vl_digits_sft_config,
    qwen38_flash_next_digits_sft_config,
)


def digits_recipe_for(hf: str | Path) -> Any:
    """Return the demo's configuration for the model in a folder."""
    kind = json.loads((Path(hf) / "config.json").read_text())["model_type"]
    if kind == "qwen4_exp":
        return qwen38_flash_next_digits_sft_config()
    return (qwen35_vl_digits_sft_config if kind.startswith("qwen3_5") else qwen3_vl_digits_sft_config)()
