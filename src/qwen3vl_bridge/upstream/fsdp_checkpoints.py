"""Loading every weight of a model under Megatron-FSDP.

Replaced: `load_fsdp_dtensor_checkpoint` of `megatron.bridge.training.checkpointing`. It skips weights that it does not
find, unless `checkpoint.strict_fsdp_dtensor_load` is set, and the parameters keep their initial values. There is no
hook between reading the checkpoint's tensor names and loading. Delete this module when Megatron-Bridge reports missing
weights, and finds weights that are stored under the names of the other layer spec.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace


def load_with(checkpointing: ModuleType, load: Callable[..., Any]) -> None:
    """Make `load_fsdp_dtensor_checkpoint` call `load` with the original function, followed by its arguments."""
    theirs = checkpointing.load_fsdp_dtensor_checkpoint

    @functools.wraps(theirs)
    def load_fsdp_dtensor_checkpoint(*args: Any, **kwargs: Any) -> Any:
        return load(theirs, *args, **kwargs)

    replace(checkpointing, "load_fsdp_dtensor_checkpoint", load_fsdp_dtensor_checkpoint, When.ALWAYS)
