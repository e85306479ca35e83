"""What one pipeline stage sends to the next: hidden states, and the DeepStack features that later layers need.

What lives here: how both are sent as one tensor, and the number of features per stage. What may not: sending and
receiving, which are megatron-core's schedules'; which rank holds which stage, which is megatron-core's too.

Pipeline stages exchange one tensor of three dimensions. Features of later stages' layers are appended to it, only for
this rank's vision tokens, so the cost is their own size, and their gradients return the same way. The alternative, a
vision tower on every stage that needs features, costs its parameters and its computation again.
Legend: s, b local tokens and rows, h hidden size, t features, K vision tokens of a rank, n chunks of the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from qwen3vl_bridge.batch.packed_batch import ModelInputs
from qwen3vl_bridge.models.common.model import check_arrived

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


def check_features(stage: Stage, inputs: ModelInputs, config: TransformerConfig) -> None:
    """Refuse DeepStack features between stages with tensors of a fixed size, which would wait for the missing part.

    Rows may have any length that a caller's schedule knows (its `seq_length`): NeMo-RL pads rows to a length of its
    own, and generation lets them grow. A schedule is not told the size of the features, which depends on the images.

    Args:
        stage: the sending stage.
        inputs: its batch.
        config: the provider.

    Raises:
        ValueError: there are features to send, and `variable_seq_lengths` is off.
    """
    features = 0 if inputs.deepstack is None else stage.sent * len(inputs.deepstack.positions)
    if features and not config.variable_seq_lengths:
        raise ValueError(
            f"variable_seq_lengths is False and {features} DeepStack features go to the next pipeline stage, expected "
            "True, or more layers in this stage: the size of what stages send each other depends on a row's images"
        )


@dataclass(frozen=True)
class Stage:
    """Number of DeepStack features that a part of the model receives and passes on, always the last ones.

    Attributes:
        received: t features of this part's layers and those after it; all features on the first part.
        sent: t features of the layers after it.
    """

    received: int
    sent: int

    @classmethod
    def of(cls, taps: int, first_layer: int, layers: int) -> Self:
        """The part with `layers` text layers from `first_layer` on, of a model with this number of DeepStack taps."""
        return cls(received=max(taps - first_layer, 0), sent=max(taps - first_layer - layers, 0))

    def unload(self, arrived: Tensor, length: int, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Split what the previous stage sent, the inverse of `load`.

        Args:
            arrived: [s, b, h], or [s * b + t * K, 1, h] with features.
            length: s.
            rows: b.
            tokens: K.

        Returns:
            Hidden states [s, b, h] and features [t, K, h].

        Raises:
            ValueError: a tensor of another size.
        """
        features = self.received * tokens
        check_arrived(
            arrived, length * rows + features, f"{length} tokens of {rows} rows and {features} DeepStack features"
        )
        if not self.received:
            return arrived, arrived.new_empty(0, tokens, arrived.size(-1))
        hidden, behind = arrived.split([len(arrived) - features, features])
        width = arrived.size(-1)
        return hidden.view(-1, rows, width), behind.view(self.received, tokens, width)

    def load(self, hidden: Tensor, features: Tensor) -> Tensor:
        """[s, b, h] and this stage's own features [t, K, h] -> the tensor that the next stage unloads.

        Not a view, because the schedules could not free a view after sending it.
        """
        if not self.sent:
            return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True)
        behind = features[self.received - self.sent :].to(hidden.dtype)
        return torch.cat([part.reshape(-1, 1, part.size(-1)) for part in (hidden, behind)])
