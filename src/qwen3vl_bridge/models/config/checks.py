"""Settings of a configuration that no family's model computes otherwise.

What lives here: their values, and the check. What may not: fields by themselves (`fields.py`), settings that one family
alone has (`models/*/config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_shared_settings(config: Mapping[str, Any], own: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse what no family's model computes, or this family's not.

    Args:
        config: a `config.json` with fields that are each as they should be.
        own: by name, what a further field of the family is and the only value that it may have.

    Raises:
        ValueError: a setting that would otherwise be ignored; the message names it.
    """
    text = config["text_config"]
    wanted = {
        # transformers gives the output projection a bias too, which no released model has.
        "text_config.attention_bias": (text.get("attention_bias") or False, False),
        "text_config.use_sliding_window": (text.get("use_sliding_window") or False, False),
        "quantization_config": (config.get("quantization_config"), None),
        # transformers divides the chosen experts' weights by their sum whatever this says.
        "text_config.norm_topk_prob": (text.get("norm_topk_prob", True), True),
        **own,
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ValueError(f"{name} is {found!r}, expected {expected!r}: this model implements nothing else")
