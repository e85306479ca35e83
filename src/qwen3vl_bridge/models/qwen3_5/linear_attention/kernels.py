"""Our torch functions in place of GatedDeltaNet's kernels, if flash-linear-attention or a GPU is missing.

megatron-core does not build a GatedDeltaNet without that package, not even with its own torch functions, and the
package needs a GPU. If both are present, nothing is replaced, even if the package cannot be imported: megatron-core
reports that.
"""

from __future__ import annotations

import importlib.util
from typing import Any


def are_missing() -> bool:
    """Whether our functions are used."""
    import torch

    return not torch.cuda.is_available() or importlib.util.find_spec("fla") is None


def build_without_package(module: Any) -> None:
    """In `megatron.core.ssm.gated_delta_net.common`, which refuses to build the layer without the package."""
    if are_missing():
        from qwen3vl_bridge.models.qwen3_5.linear_attention import delta_rule

        module.HAVE_FLA, module.l2norm = True, delta_rule.l2norm


def use_torch(module: Any) -> None:
    """In `megatron.core.ssm.gated_delta_net.gdn`, which calls the kernels."""
    if are_missing():
        from qwen3vl_bridge.models.qwen3_5.linear_attention import delta_rule

        module.causal_conv1d = delta_rule.causal_conv1d
        module.chunk_gated_delta_rule = delta_rule.chunk_gated_delta_rule
