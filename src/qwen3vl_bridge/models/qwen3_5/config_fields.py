"""Fields of a Qwen3.5-VL configuration: the type of each, and constraints between them.

What lives here: the check, with the field names of `config.json`. Standard library only. What may not: fields shared by
all families (`models/config/fields.py`), valid settings that this model does not support (`config_checks.py`), derived
values (`config_dimensions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config.fields import Fields, check_shared_fields, experts_of
from qwen3vl_bridge.models.config.values import POSITIVE, Kind, shown
from qwen3vl_bridge.models.qwen3_5.config_dimensions import FULL, LINEAR, LINEAR_SIZES, MTP_LAYERS, layer_types_of

_TYPES = Kind(
    lambda value: isinstance(value, list | tuple) and all(isinstance(one, str) for one in value), "a list of names"
)
_MTP = Kind(lambda value: type(value) is int and value in (0, 1), "0 or 1, layers of multi-token prediction")
_ANY = Kind(lambda value: isinstance(value, list | tuple), "a list")

# In addition to the fields of all families: required fields, optional fields, and fields that may also be null.
_REQUIRED: Fields = {"text_config": {"num_key_value_heads": POSITIVE}}
_OPTIONAL: Fields = {"text_config": {"full_attention_interval": POSITIVE, **dict.fromkeys(LINEAR_SIZES, POSITIVE)}}
_NULLABLE: Mapping[str, Kind] = {
    **dict.fromkeys(("intermediate_size", "shared_expert_intermediate_size"), POSITIVE),
    MTP_LAYERS: _MTP,
    "layer_types": _TYPES,
    "mlp_only_layers": _ANY,
}
_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def check_fields(config: Any) -> None:
    """Check every field that determines which tensors exist, or what they mean.

    Args:
        config: a Qwen3.5-VL `config.json`.

    Raises:
        ValueError: a field is missing, has the wrong type, or is inconsistent with another one; the message names it.
    """
    check_shared_fields(config, _REQUIRED, _OPTIONAL, _NULLABLE)
    text = config["text_config"]
    _check_layers(text)
    experts = experts_of(text)
    for name in _OF_EXPERTS if experts else ("intermediate_size",):
        if text.get(name) is None:
            raise ValueError(f"lacks the field text_config.{name}, expected a number: the model has {experts} experts")
    if experts and text["num_experts_per_tok"] > experts:
        raise ValueError(
            f"text_config.num_experts_per_tok is {text['num_experts_per_tok']}, expected 1 to {experts}, the experts"
        )


def _check_layers(text: Mapping[str, Any]) -> None:
    types, layers = layer_types_of(text), text["num_hidden_layers"]
    if len(types) != layers or not {LINEAR, FULL}.issuperset(types):
        raise ValueError(
            f"text_config.layer_types is {shown(list(types))}, expected {layers} times {LINEAR!r} or {FULL!r}"
        )
    value_heads, key_heads = (
        text.get(name, LINEAR_SIZES[name]) for name in ("linear_num_value_heads", "linear_num_key_heads")
    )
    if value_heads % key_heads:
        raise ValueError(
            f"text_config.linear_num_value_heads is {value_heads}, expected a multiple of linear_num_key_heads, "
            f"which is {key_heads}"
        )
