"""Copies to the host the arguments of a call that are read there.

What lives here: which arguments are read. What may not: their meaning (`masks.py`, `position_ids.py`, `labels.py`),
pixels, which are never read.
"""

from __future__ import annotations

import copy
from typing import Any

from qwen3vl_bridge.batch.device_transfer import on_host

from torch import Tensor

OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_READ = (
    *("input_ids", "position_ids", "attention_mask", "padding_mask", "labels", "loss_mask"),
    *("image_grid_thw", "video_grid_thw"),
)


def arguments_on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, as for `model_inputs.as_model_inputs`, with those that are read copied to the host.

    Regardless of how many are on a device, the host synchronizes with it once. Square attention masks stay on their
    device, because they grow with the square of the tokens; `masks.real_tokens` evaluates them there.

    Args:
        arguments: by name; the given packed_seq_params are not modified; the offsets on the host are set in a copy.
    """
    given = {name: value for name in _READ if isinstance(value := arguments.get(name), Tensor)}
    if "attention_mask" in given and given["attention_mask"].dim() > 2:
        del given["attention_mask"]
    packed = copy.copy(arguments.get("packed_seq_params"))
    offsets = {name: value for name in OFFSETS if isinstance(value := getattr(packed, name, None), Tensor)}
    found = on_host(given | offsets)
    for name in offsets:
        setattr(packed, name, found.pop(name))
    return arguments | found | (dict(packed_seq_params=packed) if offsets else {})
