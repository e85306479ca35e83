"""Starting Megatron-Bridge from a wheel of megatron-core, which has nothing to compile.

Replaced: `compile_helpers` in `megatron.bridge.training.initialize`, its only caller. It runs `make` in megatron-core's
folder of data sets, and exits the process if that fails. A wheel contains the compiled helpers, but no Makefile, so
every run would end there. Where there is a Makefile (a source tree, as in NVIDIA's containers), nothing is replaced.
Delete this module when megatron-core's function returns if there is no Makefile.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from qwen3vl_bridge.upstream.replacements import When, replace

_HELPERS = "megatron.core.datasets.helpers_cpp"


def keep_compiled_helpers(initialize: ModuleType) -> None:
    """Make `megatron.bridge.training.initialize` compile nothing if the helpers are compiled and have no Makefile."""
    compiled = importlib.util.find_spec(_HELPERS)
    if compiled is not None and not Path(str(compiled.origin)).with_name("Makefile").exists():
        replace(initialize, "compile_helpers", lambda: None, When.ALWAYS)
