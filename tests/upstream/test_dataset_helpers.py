"""Megatron-Bridge compiles the helpers of data sets in one place, by a function without parameters."""

import importlib.util
from types import ModuleType

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("dataset_helpers")


def test_initialize_megatron_calls_compile_helpers():
    CONTRACT.takes("megatron.core.datasets.utils", "compile_helpers")
    CONTRACT.mentions("megatron.core.datasets.utils", "compile_helpers", "make", "exit")
    CONTRACT.find("megatron.bridge.training.initialize", "compile_helpers")
    CONTRACT.mentions("megatron.bridge.training.initialize", "initialize_megatron", "compile_helpers")


@pytest.mark.parametrize("has_makefile", [True, False])
def test_keep_compiled_helpers_replaces_compile_helpers_only_without_makefile(has_makefile, tmp_path, monkeypatch):
    """Sources in place, as in NVIDIA's containers, have a Makefile beside what it makes."""
    from qwen3vl_bridge.upstream import dataset_helpers, replacements

    made, initialize = tmp_path / "helpers_cpp.so", ModuleType("initialize")
    initialize.compile_helpers = compile_helpers = lambda: None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.util.spec_from_file_location(name, made))
    monkeypatch.setattr(replacements, "_done", {})
    if has_makefile:
        (tmp_path / "Makefile").touch()
    dataset_helpers.keep_compiled_helpers(initialize)
    assert (initialize.compile_helpers is compile_helpers) == has_makefile
