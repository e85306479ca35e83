"""Kernels of megatron-core's GatedDeltaNet where flash-linear-attention or its GPU is missing: torch functions of ours.

What lives here: putting them in the four names that it calls. What may not: the functions
(`models/qwen3_5/delta_rule.py`), saying that they are slow on a GPU (`models/qwen3_5/provider.py`).

megatron-core builds no GatedDeltaNet without that package, not even for its own torch functions, and the package needs
a GPU. Where both are there nothing is replaced, also where the package is there and cannot be imported: megatron-core
says so.
"""

from __future__ import annotations

import importlib.util
from typing import Any

_PACKAGE = "megatron.core.ssm.gated_delta_net"


def are_missing() -> bool:
    """Whether ours take their place."""
    import torch

    return not torch.cuda.is_available() or importlib.util.find_spec("fla") is None


def _build_without_package(module: Any) -> None:
    if are_missing():
        from qwen3vl_bridge.models.qwen3_5 import delta_rule

        module.HAVE_FLA, module.l2norm = True, delta_rule.l2norm


def _use_torch(module: Any) -> None:
    if are_missing():
        from qwen3vl_bridge.models.qwen3_5 import delta_rule

        module.causal_conv1d = delta_rule.causal_conv1d
        module.chunk_gated_delta_rule = delta_rule.chunk_gated_delta_rule


PATCHES = {f"{_PACKAGE}.common": _build_without_package, f"{_PACKAGE}.gdn": _use_torch}
