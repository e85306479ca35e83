"""Hooks of a provider that are called before and after its model is wrapped.

Read and changed: the lists `_pre_wrap_hooks` and `_post_wrap_hooks`. Providers have public methods that add a hook
(`register_pre_wrap_hook`), and none that lists or removes hooks. Delete this module when they have such methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pre_wrap_hooks(provider: Any) -> tuple[Callable[..., Any], ...]:
    """Return the hooks that a provider calls before its model is wrapped, in order."""
    return tuple(getattr(provider, "_pre_wrap_hooks", ()))


def remove_hooks(provider: Any, *, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Remove the hook `before`, called before the model is wrapped, and the hook `after`, called after it.

    Raises:
        ValueError: the provider does not have these hooks.
    """
    provider._pre_wrap_hooks.remove(before)
    provider._post_wrap_hooks.remove(after)
