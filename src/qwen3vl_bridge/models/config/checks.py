"""Settings of a configuration for which all families' models support a single value.

What lives here: these values, and the check. What may not: checks of single fields (`fields.py`), settings specific to
one family (`models/*/config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_shared_settings(config: Mapping[str, Any], own: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse values that no family's model supports, or that this family's does not.

    Args:
        config: a `config.json` whose fields have been checked one by one.
        own: by name, the value of a further field of the family and the only one that is supported.

    Raises:
        ValueError: a setting that would otherwise be ignored; the message names it.
    """
    text = config["text_config"]
    wanted = {
        # transformers gives the output projection a bias too, which no released model has.
        "text_config.attention_bias": (text.get("attention_bias") or False, False),
        "text_config.use_sliding_window": (text.get("use_sliding_window") or False, False),
        "quantization_config": (config.get("quantization_config"), None),
        # transformers divides the chosen experts' weights by their sum whatever this setting is.
        "text_config.norm_topk_prob": (text.get("norm_topk_prob", True), True),
        **own,
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ValueError(f"{name} is {found!r}, expected {expected!r}: this model implements nothing else")
