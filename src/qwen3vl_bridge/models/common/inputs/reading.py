"""Copies to the host the arguments of a call that are read there.

What lives here: which arguments are read. What may not: their meaning (`masks.py`, `position_ids.py`, `labels.py`),
pixels, which are never read.
"""

from __future__ import annotations

import copy
from typing import Any

from qwen3vl_bridge.batch.device_transfer import on_host
from qwen3vl_bridge.models.common.inputs.masks import square_in_brief

from torch import Tensor

OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_READ = (
    *("input_ids", "position_ids", "attention_mask", "padding_mask", "labels", "loss_mask"),
    *("image_grid_thw", "video_grid_thw"),
)


def arguments_on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, as for `model_inputs.as_model_inputs`, with those that are read copied to the host.

    Regardless of how many are on a device, the host synchronizes with it once. The size of a square attention mask is
    quadratic in the tokens, so the real tokens are computed from it on its device, and replace it. A mask that is not
    merely causal with padding is kept; `masks.real_tokens` then refuses it.

    Args:
        arguments: by name; the given packed_seq_params are not modified; the offsets on the host are set in a copy.
    """
    given = {name: value for name in _READ if isinstance(value := arguments.get(name), Tensor)}
    square, ids = {}, given.get("input_ids")
    if "attention_mask" in given and given["attention_mask"].dim() > 2:
        mask = given.pop("attention_mask")
        square = square_in_brief(mask, *ids.shape) if ids is not None and ids.dim() == 2 else {}
    packed = copy.copy(arguments.get("packed_seq_params"))
    offsets = {name: value for name in OFFSETS if isinstance(value := getattr(packed, name, None), Tensor)}
    found = on_host(given | offsets | square)
    for name in offsets:
        setattr(packed, name, found.pop(name))
    if square:
        real, plain = found.pop("real"), found.pop("plain")
        if plain:  # one causal mask for all rows gives no information about padding
            found["attention_mask"] = None if len(real) == 1 and real.all() else real.expand(ids.shape)
    return arguments | found | (dict(packed_seq_params=packed) if offsets else {})
