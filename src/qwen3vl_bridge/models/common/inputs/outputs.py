"""Conversion of the model's output to the form that the caller expects.

What lives here: the mapping from outputs in our layout to the caller's. What may not: the positions of tokens
(`padding_and_packing.py`, `model_inputs.py`), the model.
Legend: B rows, S tokens per row, b and s a rank's local sizes in the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from qwen3vl_bridge.batch.device_transfer import Movable

import torch
from torch import Tensor


@dataclass(frozen=True)
class CallerOrder(Movable):
    """Positions of the caller's tokens in the outputs.

    Attributes:
        slots: [B, S] int64, index of each of the caller's tokens in the flat layout; -1 if it was dropped. On the
            device of the outputs.
        complete: whether no token was dropped.
    """

    slots: Tensor
    complete: bool

    def restore(self, output: Tensor) -> Tensor:
        """[b, s, ...] outputs -> [B, S, ...], with zeros for dropped tokens, which were padding."""
        flat = output.flatten(0, 1)
        if not self.complete:
            flat = torch.cat((flat, flat.new_zeros(1, *flat.shape[1:])))  # the row read by index -1
        slots = self.slots % len(flat)
        return flat.index_select(0, slots.flatten()).unflatten(0, slots.shape)


@dataclass(frozen=True)
class Answer(Movable):
    """The conversion of the outputs of one call.

    Attributes:
        order: order of the caller's tokens; None if outputs are already in it.
        unlabelled: [b, s] bool, True where a label is ignored and the loss is 0; None if there are no such labels.
        loss_mask: [b, s] this rank's slice of a mask given for the whole batch, returned with the output as in
            Megatron-Bridge's own model; None if the caller already has the slice.
    """

    order: CallerOrder | None = None
    unlabelled: Tensor | None = None
    loss_mask: Tensor | None = None

    def of(self, output: Any) -> Any:
        """Convert [b, s, ...] outputs to the caller's form, with the slice of the loss mask if there is one."""
        if self.unlabelled is not None:
            output = output.masked_fill(self.unlabelled, 0)
        if self.order is not None:
            output = self.order.restore(output)
        return output if self.loss_mask is None else (output, self.loss_mask)

    def of_processor(self) -> Self:
        """Like `of`, for the result that a caller's own `output_processor` computes from hidden states, of any type.

        Raises:
            ValueError: the processor would see tokens in an order that differs from the caller's.
        """
        if self.order is not None:
            raise ValueError(
                "output_processor is given for rows that reach the model in another order than the caller's, which "
                "only the caller can undo in what it returns: expected rows padded on the right, or packed_seq_params "
                "and labels in the packed row's order, [1, tokens]"
            )
        return replace(self, unlabelled=None)
