"""The flag that tells whether megatron-core can accumulate weight gradients in a fused kernel.

Read: `megatron.core.tensor_parallel.layers._grad_accum_fusion_available`. Megatron-Bridge's public function looks for
Transformer Engine instead, while megatron-core's output layer, which is the same with Transformer Engine, needs
APEX and raises RuntimeError without it. Delete this module when Megatron-Bridge looks for APEX too.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import layers


def output_layer_fuses() -> bool:
    """Return True if APEX's fused kernel for the weight gradient of the output layer is installed."""
    return layers._grad_accum_fusion_available
