"""Modules of Megatron-Bridge that use Transformer Engine's layers as classes even if the package is missing.

Without the package, megatron-core has empty names for these layers: an import succeeds, and `isinstance` fails.

Replaced without the package: the flags `HAVE_TE...` in `megatron.bridge.peft.utils` and
`megatron.bridge.peft.module_matcher`, which are True because the import succeeds; and `install_pg_collection` in
`megatron.bridge.training.eval_context_parallel_rebinding`, which raises TypeError for every model. Delete this module
when Megatron-Bridge checks whether the names are empty.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from qwen3vl_bridge.lazy import is_installed
from qwen3vl_bridge.upstream.replacements import When, replace


def note_missing_layers(peft: ModuleType) -> None:
    """If Transformer Engine is missing, set the flags `HAVE_TE...` of a module for adapters to False."""
    if not is_installed("transformer_engine"):
        for name in [name for name in vars(peft) if name.startswith("HAVE_TE")]:
            replace(peft, name, False, When.NO_TRANSFORMER_ENGINE)


def note_missing_attention(rebinding: ModuleType) -> None:
    """If Transformer Engine is missing, make `install_pg_collection` ignore the attention class of that package."""
    if is_installed("transformer_engine"):
        return
    theirs = rebinding.install_pg_collection

    @functools.wraps(theirs)
    def install_pg_collection(*args: Any, **kwargs: Any) -> None:
        from megatron.core.extensions import transformer_engine

        empty, transformer_engine.TEDotProductAttention = transformer_engine.TEDotProductAttention, None
        try:
            theirs(*args, **kwargs)
        finally:
            transformer_engine.TEDotProductAttention = empty

    replace(rebinding, "install_pg_collection", install_pg_collection, When.NO_TRANSFORMER_ENGINE)
