"""The kinds of value that the fields of a `config.json` may have, so that an error names the field.

What lives here: which fields are counts, which are lists of numbers. What may not: what they mean (`dimensions.py`),
which values a model of ours can have (`hf_settings.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# What is counted out one by one, and how far at most.
_COUNTED = ("num_hidden_layers", "num_experts", "num_local_experts", "depth")
_MAX_COUNT = 10_000
_NUMBERS = {
    "text_config": (
        "num_hidden_layers",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_local_experts",
        "moe_intermediate_size",
        "decoder_sparse_step",
    ),
    "vision_config": (
        "depth",
        "hidden_size",
        "num_heads",
        "intermediate_size",
        "spatial_merge_size",
        "num_position_embeddings",
        "in_channels",
        "patch_size",
        "temporal_patch_size",
    ),
}
_LISTS = {"text_config": ("mlp_only_layers",), "vision_config": ("deepstack_visual_indexes",)}
# What a dense model has none of, and what follows from other fields where it is not given.
_MAY_BE_ZERO = ("num_experts", "num_local_experts", "moe_intermediate_size")
_MAY_BE_NULL = (*_MAY_BE_ZERO, "num_key_value_heads", "head_dim", "mlp_only_layers")


def check_fields(raw: Mapping[str, Any]) -> None:
    """Check that fields which are there hold what their kind is.

    Args:
        raw: a Qwen3-VL `config.json`.

    Raises:
        ValueError: one does not; the message names it.
    """
    for section in _NUMBERS:
        if not isinstance(raw.get(section, {}), dict):
            raise ValueError(f"{section} is of the wrong kind: {_shown(raw[section])}, expected an object")
    for field, value in _fields(raw, _NUMBERS):
        name = field.rpartition(".")[2]
        if type(value) is not int or value < (name not in _MAY_BE_ZERO):
            raise ValueError(f"{field} is {_shown(value)}, expected a positive whole number")
        if name in _COUNTED and value > _MAX_COUNT:
            raise ValueError(f"{field} is {value}, expected {_MAX_COUNT} at most")
    for field, value in _fields(raw, _LISTS):
        if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
            raise ValueError(f"{field} is {_shown(value)}, expected a list of whole numbers")


def _fields(raw: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, Any]]:
    for section, fields in names.items():
        found = raw.get(section, {})
        for name in fields:
            if name in found and not (found[name] is None and name in _MAY_BE_NULL):
                yield f"{section}.{name}", found[name]


def _shown(value: Any) -> str:
    return repr(value)[:80]
