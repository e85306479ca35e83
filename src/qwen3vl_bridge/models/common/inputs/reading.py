"""What is read of a caller's arguments, brought to the host.

What lives here: which arguments are read. What may not: what they say (`masks.py`, `position_ids.py`, `labels.py`),
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
    """The arguments of a call, as for `model_inputs.as_model_inputs`, with what is read of them on the host.

    However many lie on a device, the host waits for it once. Masks of what each token sees stay where they are: they
    grow with the square of the tokens, and `masks.real_tokens` asks the device what they say.

    Args:
        arguments: by name; packed_seq_params stay as they are, and another object has their offsets.
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
