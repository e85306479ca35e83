"""The high-precision values that Transformer Engine keeps on the host for FP8 and FP4 parameters.

Set: the attribute `_high_precision_init_val`. megatron-core's optimizer reads it with the public method
`get_high_precision_init_val`, and creates main weights from it. Delete this module when Transformer Engine has a public
method that sets it.
"""

from __future__ import annotations

from torch import Tensor


def set_high_precision_value(parameter: Tensor, value: Tensor) -> None:
    """Replace the value from which an optimizer creates the main weight of a parameter. Do nothing if there is none."""
    if hasattr(parameter, "get_high_precision_init_val"):
        parameter._high_precision_init_val = value.cpu()
