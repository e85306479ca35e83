"""Python runs this when it starts: processes that Megatron-Bridge's tests start have the plugin, as their parent."""

import os
import sys
import types

import qwen3vl_bridge  # noqa: F401

if "UPSTREAM_TESTS_STOCK" in os.environ:
    sys.modules["qwen3vl_bridge.models.qwen3_vl.bridge"] = types.ModuleType(
        "qwen3vl_bridge.models.qwen3_vl.bridge"
    )  # which registers
