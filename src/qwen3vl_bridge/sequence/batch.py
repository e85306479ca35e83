"""The batch as data: what collate makes, what travels to the device, what one rank's model reads.

What lives here: the dataclasses and the selection of one rank's share. What may not: reading or tokenising data
(`data/`), computing positions or indices (`positions.py`, `vision.py`, `layout.py`), process groups, Megatron.

Legend: B rows, S tokens a row, T = B * S, N vision patches, M = N / merge^2 vision tokens, F frames.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from .layout import SequenceLayout, token_index
from .movable import Movable


@dataclass(frozen=True)
class VisionInputs(Movable):
    """All pictures of a batch as the vision tower reads them: images first, then videos, patches in merge order.

    Attributes:
        pixel_values: [N, channels * temporal_patch * patch * patch] floating point.
        position_ids: [N, 2] int64, row and column of each patch in its frame.
        interpolation_index: [4, N] int64, the four position embeddings around each patch.
        interpolation_weight: [4, N] float32, their weights; each column sums to one.
        cu_seqlens: [F + 1] int32, offsets of the frames in patches. Attention does not cross a frame.
        lengths: the F frame lengths in patches, on the host.
    """

    pixel_values: Tensor
    position_ids: Tensor
    interpolation_index: Tensor
    interpolation_weight: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class VisionRows(Movable):
    """Which vision tokens go where in one rank's hidden states.

    Attributes:
        rows: [K] int64, rows of the vision output this rank uses.
        positions: [K] int64, for each of them the token's place in the rank's hidden states flattened from [s, b].
    """

    rows: Tensor
    positions: Tensor

    @classmethod
    def none(cls, device: torch.device) -> Self:
        """No vision tokens at all."""
        empty = torch.empty(0, dtype=torch.long, device=device)
        return cls(empty, empty)


@dataclass(frozen=True)
class ModelInputs(Movable):
    """One rank's share of a batch, ready for the model. s and b are local.

    Attributes:
        input_ids: [b, s] int64.
        position_ids: [3, b, s] int64, temporal, height and width position.
        labels: [b, s] int64, already shifted, or None.
        loss_mask: [b, s] float32, or None.
        padding_mask: [b, s / sp] bool, True where this context- and sequence-parallel rank has no real token.
        layout: the layout of the whole batch, every rank's share; packed rows attend by it.
        vision: pictures, or None where the batch has none.
        fuse: vision tokens of this context-parallel rank.
        deepstack: vision tokens of this context- and sequence-parallel rank.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor | None
    loss_mask: Tensor | None
    padding_mask: Tensor
    layout: SequenceLayout
    vision: VisionInputs | None = None
    fuse: VisionRows | None = None
    deepstack: VisionRows | None = None

    def without_labels(self) -> Self:
        """The same inputs for logits instead of losses."""
        return replace(self, labels=None, loss_mask=None)


@dataclass(frozen=True)
class PackedBatch(Movable):
    """A batch as collate makes it, whole, the same on every rank that shares it.

    Attributes:
        input_ids: [B, S] int64.
        labels: [B, S] int64, labels[t] is the token after t in the same segment; anything where loss_mask is 0.
        loss_mask: [B, S] float32, 1 where the label is trained on.
        position_ids: [3, B, S] int64.
        vision_slot: [T] int64, row of each token in the vision output, or -1.
        layout: where the segments lie.
        vision: pictures, or None.
        sample_ids: which samples of the data set the segments are, in order, for messages to people.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    vision_slot: Tensor
    layout: SequenceLayout
    vision: VisionInputs | None = None
    sample_ids: tuple[str, ...] = ()

    def local(self, cp_size: int = 1, cp_rank: int = 0, sp_size: int = 1, sp_rank: int = 0) -> ModelInputs:
        """The share of one rank: gathers by `token_index`, vision tokens by their slots."""
        context_index = token_index(self.layout, cp_size, cp_rank)  # [s, b]
        index = token_index(self.layout, cp_size, cp_rank, sp_size, sp_rank)  # [s / sp, b]

        def take(whole: Tensor) -> Tensor:
            return whole.flatten(-2)[..., context_index.T]

        def vision_rows(index: Tensor) -> VisionRows | None:
            if self.vision is None:
                return None
            slots = self.vision_slot[index.flatten()]
            positions = (slots >= 0).nonzero().squeeze(-1)
            return VisionRows(rows=slots[positions], positions=positions)

        return ModelInputs(
            input_ids=take(self.input_ids),
            position_ids=take(self.position_ids),
            labels=take(self.labels),
            loss_mask=take(self.loss_mask),
            padding_mask=self.layout.padding_mask()[index.T],
            layout=self.layout,
            vision=self.vision,
            fuse=vision_rows(context_index),
            deepstack=vision_rows(index),
        )
