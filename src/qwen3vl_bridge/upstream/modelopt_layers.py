"""What ModelOpt adds to a model and its layers: its own state, outputs kept for a distillation, and scales of weights.

Read: `_modelopt_state`, which ModelOpt sets on the model that it converts; `_intermediate_output`, which it sets on
layers of a teacher and a student; and the buffer name `_amax` of a weight quantizer, which is part of tensor names in a
checkpoint. ModelOpt's public `ModeloptStateManager.is_converted` also searches inner modules, and fails if a student
and its teacher both have a state. Delete the first two when ModelOpt has public names for them, the last when ModelOpt
divides these scales like their weights.
"""

from __future__ import annotations

from torch import nn

# The name of a weight's scales in a checkpoint is the name of the linear layer followed by this suffix.
WEIGHT_SCALES = ".weight_quantizer._amax"


def is_converted(model: nn.Module) -> bool:
    """Return True if ModelOpt has converted `model` itself (not only an inner module), such as by quantization."""
    return hasattr(model, "_modelopt_state")


def keeps_output(layer: nn.Module) -> bool:
    """Return True if ModelOpt keeps the output of a layer, for a distillation, until it has computed the loss."""
    return hasattr(layer, "_intermediate_output")
