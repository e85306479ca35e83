"""Make `AutoBridge` save the adapters of our models.

Replaced: `AutoBridge.__init__` of `megatron.bridge.models.conversion.auto_bridge`. It changes the class of a new object
to a subclass that overrides two methods. For other models they do the same as before. The methods are overridden
because Megatron-Bridge does not let the bridge of a model's family save or check adapters:

- `save_hf_adapter` supports neither DoRA's magnitudes, nor `peft`'s format for adapters of experts, nor different
  alphas. Megatron-Bridge's training and RL frameworks call it at every checkpoint.
- `export_adapter_ckpt` inserts LoRA whatever the checkpoint was trained with, so that DoRA's magnitudes would be
  dropped. Only this method knows the checkpoint's folder.

The methods find the model's family when they are called: a constructor must not read a configuration from the hub.
Delete this module when Megatron-Bridge saves all adapters, or calls the bridge of the family to do it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from qwen3vl_bridge.upstream.auto_bridge import model_bridge
from qwen3vl_bridge.upstream.replacements import When, replace

_SUBCLASS = "of_qwen3vl_bridge"  # attribute of `AutoBridge`, so that pickled objects find the subclass


def save_adapters_with(
    auto_bridge: ModuleType, is_ours: Callable[[Any], bool], save: Callable[..., None], check: Callable[[Any], None]
) -> None:
    """Make new `AutoBridge` objects write adapters of this package's models with the given functions.

    Objects of other subclasses of `AutoBridge` are not changed.

    Args:
        auto_bridge: `megatron.bridge.models.conversion.auto_bridge`.
        is_ours: returns True for a bridge of one of our families.
        save: called with the `AutoBridge` and the arguments of `save_hf_adapter`.
        check: raises ValueError for the folder of a checkpoint that `export_adapter_ckpt` cannot export.
    """
    kind = auto_bridge.AutoBridge
    theirs = kind.__init__

    class AutoBridge(kind):
        def save_hf_adapter(self, *args: Any, **kwargs: Any) -> None:
            if is_ours(model_bridge(self)):
                save(self, *args, **kwargs)
            else:
                super().save_hf_adapter(*args, **kwargs)

        def export_adapter_ckpt(self, peft_checkpoint: Any, *args: Any, **kwargs: Any) -> None:
            if is_ours(model_bridge(self)):
                check(peft_checkpoint)
            super().export_adapter_ckpt(peft_checkpoint, *args, **kwargs)

        def __reduce__(self) -> tuple[Any, ...]:
            return _restored, (kind.__module__, vars(self))

    @functools.wraps(theirs)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        if type(self) is kind:
            self.__class__ = AutoBridge

    AutoBridge.__qualname__, AutoBridge.__module__ = kind.__qualname__, kind.__module__
    AutoBridge.__doc__ = kind.__doc__
    setattr(kind, _SUBCLASS, AutoBridge)
    replace(kind, "__init__", __init__, When.ALWAYS)


def _restored(module: str, attributes: dict[str, Any]) -> Any:
    """Return an `AutoBridge` with the given attributes. Python calls this to copy or unpickle an object."""
    kind = getattr(importlib.import_module(module).AutoBridge, _SUBCLASS)
    restored = kind.__new__(kind)
    vars(restored).update(attributes)
    return restored
