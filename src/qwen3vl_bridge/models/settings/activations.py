"""Activation functions by their names in Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation. Source: transformers, GELUTanh."""
    return F.gelu(x, approximate="tanh")


# Functions with a name, for `run_config.yaml`, because the text model's is a field of the provider.
_TEXT: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}


def text_activation(name: str) -> Activation:
    """Activation of the text model's gated MLPs, including experts.

    Raises:
        ValueError: an unsupported name.
    """
    if name not in _TEXT:
        raise ValueError(f"the text model's activation is {name!r}, expected one of {', '.join(_TEXT)}")
    return _TEXT[name]


def name_of(function: Activation) -> str:
    """The name of a text model's activation.

    Raises:
        ValueError: a function that has no name in configurations.
    """
    for name, known in _TEXT.items():
        if function is known:
            return name
    raise ValueError(f"activation_func is {function!r}, expected that of one of {', '.join(_TEXT)}")


def vision_activation(name: str) -> Activation:
    """Activation of the vision tower's MLPs: any of transformers' without weights. Mergers use the exact GELU.

    Raises:
        ValueError: a name that transformers does not have, or an activation with weights, which are not in the weight
            table.
    """
    if name not in ACT2FN:
        raise ValueError(f"vision_config.hidden_act is {name!r}, expected one of {', '.join(ACT2FN)}")
    made = ACT2FN[name]
    if not isinstance(made, nn.Module):
        return made
    if any(True for _ in made.parameters()):
        raise ValueError(f"vision_config.hidden_act is {name!r}, which has parameters: expected one without")
    return made.forward  # not a module, which an MLP would register
