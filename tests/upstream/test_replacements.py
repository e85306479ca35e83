"""The record of replaced names: what is replaced without Transformer Engine or CUDA, and on a GPU."""

from types import ModuleType

from qwen3vl_bridge.upstream import replacements
from qwen3vl_bridge.upstream.replacements import Replacement, When, replace, replaced

import pytest

pytestmark = pytest.mark.upstream


def test_replace_sets_attribute_and_records_replacement(monkeypatch):
    monkeypatch.setattr(replacements, "_done", {})
    module = ModuleType("of_others")
    module.function = len
    replace(module, "function", max, When.ALWAYS)
    replace(module, "function", min, When.NO_CUDA)
    assert module.function is min and replaced() == (Replacement("of_others.function", When.NO_CUDA),)


def test_replace_raises_and_records_nothing_if_attribute_is_missing(monkeypatch):
    """A flag that is set without being read would otherwise exist again after upstream has renamed it."""
    monkeypatch.setattr(replacements, "_done", {})
    module = ModuleType("of_others")
    with pytest.raises(AttributeError, match=r"of_others.*function"):
        replace(module, "function", max, When.ALWAYS)
    assert not hasattr(module, "function") and replaced() == ()
