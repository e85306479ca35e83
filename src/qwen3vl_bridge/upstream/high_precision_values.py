"""Values in high precision that Transformer Engine keeps for a parameter in 8 or 4 bits, on the host.

Borrowed: the attribute `_high_precision_init_val`. megatron-core's optimizer reads it by the public method
`get_high_precision_init_val`, and makes main weights of it; there is no method that sets it. Delete this module when
Transformer Engine has one.
"""

from __future__ import annotations

from torch import Tensor


def set_high_precision_value(parameter: Tensor, value: Tensor) -> None:
    """Replace the value from which an optimizer makes a parameter's main weight, if the parameter has one."""
    if hasattr(parameter, "get_high_precision_init_val"):
        parameter._high_precision_init_val = value.cpu()
