"""megatron-core's check for inference layers, without Transformer Engine.

Replaced without it, when multi-token prediction is built: `is_inference_column_parallel_linear` in
`megatron.core.transformer.multi_token_prediction`, which megatron-core has since 0.20. The layers that it looks for are
then not classes: `isinstance` raises TypeError, and no model with multi-token prediction can be built. Delete this
module when the check is guarded.
"""

from __future__ import annotations

from qwen3vl_bridge.lazy import is_installed
from qwen3vl_bridge.upstream.replacements import When, replace

from megatron.core.transformer import multi_token_prediction

_CHECK = "is_inference_column_parallel_linear"


def find_no_inference_layers() -> None:
    """Without Transformer Engine, make `is_inference_column_parallel_linear` return False instead of raising."""
    if hasattr(multi_token_prediction, _CHECK) and not is_installed("transformer_engine"):
        replace(multi_token_prediction, _CHECK, lambda layer: False, When.NO_TRANSFORMER_ENGINE)
