"""What one pipeline stage sends to the next: hidden states, and the DeepStack features that later layers need.

What lives here: how both travel as one tensor, and how many features go where. What may not: sending and receiving,
which are megatron-core's schedules'; which rank holds which stage, which is megatron-core's too.

Pipeline stages exchange one tensor of three dimensions. Features of later stages' layers are appended to it, for this
rank's vision tokens alone, so they cost what they hold and their gradients come back the same way. The other way, a
vision tower on every stage that needs features, costs its parameters and its work again.
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
    """Refuses DeepStack features between stages whose tensors have one size, who would wait for the rest of them.

    Rows may have any length that a caller's schedule is told of (its `seq_length`): NeMo-RL pads rows to one of its
    own, and generation lets them grow. A schedule is told no size of the features, which differs with the pictures.

    Args:
        stage: that sends them.
        inputs: its batch.
        config: the provider.
    """
    features = 0 if inputs.deepstack is None else stage.sent * len(inputs.deepstack.positions)
    if features and not config.variable_seq_lengths:
        raise ValueError(
            f"variable_seq_lengths is False and {features} DeepStack features go to the next pipeline stage, expected "
            "True, or more layers in this stage: the size of what stages send each other depends on a row's pictures"
        )


@dataclass(frozen=True)
class Stage:
    """How many DeepStack features a part of the model receives and passes on, the last ones of all.

    Attributes:
        received: t features of this part's layers and those behind it; all of them on the first part.
        sent: t features of the layers behind it.
    """

    received: int
    sent: int

    @classmethod
    def of(cls, taps: int, first_layer: int, layers: int) -> Self:
        """The part that has `layers` text layers from `first_layer` on, of a model with so many DeepStack taps."""
        return cls(received=max(taps - first_layer, 0), sent=max(taps - first_layer - layers, 0))

    def unload(self, arrived: Tensor, length: int, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """What the previous stage loaded.

        Args:
            arrived: [s, b, h], or [s * b + t * K, 1, h] where features came along.
            length: s.
            rows: b.
            tokens: K.

        Returns:
            Hidden states [s, b, h] and features [t, K, h].

        Raises:
            ValueError: it is of another size.
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
        """[s, b, h] and this stage's own features [t, K, h] -> what the next stage unloads.

        It is no view, or the schedules could not free it once it is sent.
        """
        if not self.sent:
            return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True)
        behind = features[self.received - self.sent :].to(hidden.dtype)
        return torch.cat([part.reshape(-1, 1, part.size(-1)) for part in (hidden, behind)])
