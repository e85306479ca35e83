"""Build this package's classes where a saved configuration names a class of Megatron-Bridge.

Replaced: `_resolve_target` of `megatron.training.config.instantiate_utils`, which turns each `_target_` of a
`run_config.yaml` into the class to build. It has no registry where other classes could be named. Megatron's classes are
not changed, so that other code builds them as before. Delete this module when targets can be mapped to other ones, or
when checkpoints that name Megatron-Bridge's Qwen3-VL providers no longer have to be loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace


def build_instead(instantiate_utils: ModuleType, builder_for: Callable[[Any], Any]) -> None:
    """Make saved configurations build the `_target_` that `builder_for` returns instead of the named class.

    Args:
        instantiate_utils: `megatron.bridge.utils.instantiate_utils`, whose import has put its own function into
            megatron-core's module.
        builder_for: function from a target to the callable that builds it; returns the target to change nothing.
    """
    module = instantiate_utils._mcore_instantiate_utils
    theirs = module._resolve_target

    @functools.wraps(theirs)
    def resolve(target: Any, full_key: Any, check_callable: bool = True) -> Any:
        found = theirs(target, full_key, check_callable)
        return builder_for(found) if check_callable else found  # otherwise it is only referenced, not built

    replace(module, "_resolve_target", resolve, When.ALWAYS)
