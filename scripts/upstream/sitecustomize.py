"""Import the plugin in every Python process that Megatron-Bridge's tests start: Python runs this file at its start."""

import os
import sys
import types

import qwen3vl_bridge  # noqa: F401

if "UPSTREAM_TESTS_STOCK" in os.environ:
    sys.modules["qwen3vl_bridge.models.qwen3_vl.bridge"] = types.ModuleType(
        "qwen3vl_bridge.models.qwen3_vl.bridge"
    )  # replaces the module that registers bridges
