"""What a caller is given for the model's output.

What lives here: from outputs of our layout to what the caller expects. What may not: which tokens lie where
(`padding_and_packing.py`, `model_inputs.py`), the model.
Legend: B rows, S tokens a row, b and s a rank's own of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from qwen3vl_bridge.batch.device_transfer import Movable

import torch
from torch import Tensor


@dataclass(frozen=True)
class CallerOrder(Movable):
    """Where the caller's tokens lie among outputs.

    Attributes:
        slots: [B, S] int64, where each of the caller's tokens lies in the flat layout; -1 where it was left out. On the
            device of outputs.
        complete: whether none was left out.
    """

    slots: Tensor
    complete: bool

    def restore(self, output: Tensor) -> Tensor:
        """[b, s, ...] outputs -> [B, S, ...]; zero at tokens that were left out, which were padding."""
        flat = output.flatten(0, 1)
        if not self.complete:
            flat = torch.cat((flat, flat.new_zeros(1, *flat.shape[1:])))  # index -1 reads it
        slots = self.slots % len(flat)
        return flat.index_select(0, slots.flatten()).unflatten(0, slots.shape)


@dataclass(frozen=True)
class Answer(Movable):
    """What becomes of the outputs of one call.

    Attributes:
        order: of the caller's tokens; None where outputs are in it.
        unlabelled: [b, s] bool, where a label is none and the loss is 0 for it; None where there are none such.
        loss_mask: [b, s] this rank's share of a mask that was given whole, to go with the output, as from
            Megatron-Bridge's own model; None where the caller has it already.
    """

    order: CallerOrder | None = None
    unlabelled: Tensor | None = None
    loss_mask: Tensor | None = None

    def of(self, output: Any) -> Any:
        """[b, s, ...] outputs as the caller expects them, with the loss mask's share if there is one."""
        if self.unlabelled is not None:
            output = output.masked_fill(self.unlabelled, 0)
        if self.order is not None:
            output = self.order.restore(output)
        return output if self.loss_mask is None else (output, self.loss_mask)

    def of_processor(self) -> Self:
        """The same for what a caller's own `output_processor` makes of hidden states, whatever that is.

        Raises:
            ValueError: it would see tokens in another order than the caller's.
        """
        if self.order is not None:
            raise ValueError(
                "output_processor is given for rows that reach the model in another order than the caller's, which "
                "only the caller can undo in what it returns: expected rows padded on the right, or packed_seq_params "
                "and labels in the packed row's order, [1, tokens]"
            )
        return replace(self, unlabelled=None)
