"""The batch as data: what collate makes, what travels to the device, what one rank's model reads.

What lives here: the dataclasses and the selection of one rank's share. What may not: reading or tokenising data
(`data/`), computing positions or indices (`positions.py`, `vision_indices.py`, `token_layout.py`), pictures
(`vision_inputs.py`, `vision_sharding.py`), process groups, Megatron.

Legend: B rows, S tokens a row, T = B * S, K vision tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from qwen3vl_bridge.batch.device_transfer import Movable
from qwen3vl_bridge.batch.encoder_shards import EncoderShard, encoder_shards_of
from qwen3vl_bridge.batch.token_layout import SequenceLayout, next_index, token_index
from qwen3vl_bridge.batch.vision_inputs import VisionInputs
from qwen3vl_bridge.batch.vision_sharding import VisionExchange, VisionWork, assign_vision

import torch
from torch import Tensor


@dataclass(frozen=True)
class VisionRows(Movable):
    """Which vision tokens go where in one rank's hidden states.

    Attributes:
        rows: [K] int64, which of the vision tokens that this rank has encoded or is sent.
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
class NextTokens(Movable):
    """What multi-token prediction reads: at each token the one after it, and the one to be predicted from both.

    megatron-core rolls token ids, labels and masks in every step instead, segment by segment and over context-parallel
    ranks, and waits for the device at each segment. Here it is one more gather. One rank's share, as in `ModelInputs`.

    A segment's last real token has no next one, and padding has none: its entries are those of the token itself, and
    its mask is 0.

    Attributes:
        input_ids: [b, s] int64, the next token.
        labels: [b, s] int64, the token after the next.
        loss_mask: [b, s] float32, 1 where that one is trained on.
        padding_mask: [b, s / sp] bool, True where this context- and sequence-parallel rank has no next token.
        trained: [] float32, tokens of the whole batch whose own label is trained on.
        predicted: [] float32, tokens of the whole batch whose `loss_mask` is 1.
        fuse: vision tokens of this context-parallel rank's next tokens; None where there are none.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    padding_mask: Tensor
    trained: Tensor
    predicted: Tensor
    fuse: VisionRows | None = None


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
        vision: the pictures this rank encodes, or None where it has none.
        vision_exchange: vision tokens that it sends and is sent; None where it encodes all that it needs.
        encoder_shards: what ranks of the vision tower alone send for this microbatch; None where there are none such.
        fuse: vision tokens of this context-parallel rank.
        deepstack: vision tokens of this context- and sequence-parallel rank.
        following: the next tokens, for multi-token prediction; None where nothing is to be predicted from them.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor | None
    loss_mask: Tensor | None
    padding_mask: Tensor
    layout: SequenceLayout
    vision: VisionInputs | None = None
    vision_exchange: VisionExchange | None = None
    encoder_shards: tuple[EncoderShard, ...] | None = None
    fuse: VisionRows | None = None
    deepstack: VisionRows | None = None
    following: NextTokens | None = None

    def without_labels(self) -> Self:
        """The same inputs for logits instead of losses."""
        return replace(self, labels=None, loss_mask=None, following=None)

    def without_pictures(self) -> Self:
        """The same inputs for a pipeline stage that encodes nothing; where its vision tokens lie is still known."""
        return replace(self, vision=None, vision_exchange=None, encoder_shards=None)


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
        vision: pictures, or None where there are none, or for a pipeline stage that encodes none.
        sample_ids: which samples of the data set the segments are, in order, for messages to people.
        dropped: of each set of the data, how many samples were left out of rows by the time of these, in all epochs.
        newly_dropped: likewise, but since the rows before, where each process knows of its own rows alone.
        unreadable: of each set, how many samples of these rows could not be read, and are a blank token each.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    vision_slot: Tensor
    layout: SequenceLayout
    vision: VisionInputs | None = None
    sample_ids: tuple[str, ...] = ()
    dropped: tuple[int, ...] = ()
    newly_dropped: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()

    def local(
        self,
        cp_size: int = 1,
        cp_rank: int = 0,
        sp_size: int = 1,
        sp_rank: int = 0,
        vision_work: VisionWork | None = None,
        encoders: int | None = None,
        *,
        predicts: bool = False,
    ) -> ModelInputs:
        """The share of one rank, of a batch on the host: gathers by `token_index`, vision tokens by their slots.

        Args:
            cp_size, cp_rank, sp_size, sp_rank: as for `token_index`.
            vision_work: what pictures cost, for context-parallel ranks to share them; None: each encodes all.
            encoders: how many ranks of the vision tower alone share the pictures, of which this rank encodes none then.
                None: there are none such.
            predicts: whether multi-token prediction is trained, which needs the next tokens.
        """
        context_index = token_index(self.layout, cp_size, cp_rank)  # [s, b]
        index = token_index(self.layout, cp_size, cp_rank, sp_size, sp_rank)  # [s / sp, b]

        assignment = None
        if vision_work is not None and (encoders is not None or (cp_size > 1 and self.vision is not None)):
            assignment = assign_vision(self.vision, vision_work, encoders or cp_size)

        def take(whole: Tensor) -> Tensor:
            return whole.flatten(-2)[..., context_index.T]

        own, exchange, shards, rows = self.vision, None, None, None
        if encoders is not None:
            if assignment is None:
                raise ValueError("encoders are given without vision_work, expected what pictures cost")
            own, shards, rows = None, encoder_shards_of(self, assignment), assignment.places
        elif assignment is not None:
            slots = [self._slots_of(cp_size, rank, predicts=predicts) for rank in range(cp_size)]
            exchange, rows = VisionExchange.of(assignment, slots, cp_rank)
            own = assignment.part(self.vision, cp_rank)
        return ModelInputs(
            input_ids=take(self.input_ids),
            position_ids=take(self.position_ids),
            labels=take(self.labels),
            loss_mask=take(self.loss_mask),
            padding_mask=self.layout.padding_mask()[index.T],
            layout=self.layout,
            vision=own,
            vision_exchange=exchange,
            encoder_shards=shards,
            fuse=self._vision_rows(context_index, rows),
            deepstack=self._vision_rows(index, rows),
            following=self._next_tokens(context_index, index, rows) if predicts else None,
        )

    def _slots_of(self, cp_size: int, cp_rank: int, *, predicts: bool) -> Tensor:
        """Slots of the tokens that a context-parallel rank reads: its own and, if it predicts, those after them."""
        index = token_index(self.layout, cp_size, cp_rank).flatten()
        return self.vision_slot[torch.cat((index, next_index(self.layout)[0][index])) if predicts else index]

    def _next_tokens(self, context_index: Tensor, index: Tensor, rows: Tensor | None) -> NextTokens:
        """What multi-token prediction reads of the tokens after those at [s, b] `context_index`.

        Args:
            context_index: of the rank's tokens.
            index: [s / sp, b] of those that it has under sequence parallelism.
            rows: as for `_vision_rows`.
        """
        places, there = next_index(self.layout)
        labels, next_places = self.labels.flatten(), places[context_index]
        # Callers may say by a negative label what is not trained on, and nothing of padding.
        mask = self.loss_mask.flatten() * (labels >= 0) * ~self.layout.padding_mask()
        next_mask = mask[places] * there
        return NextTokens(
            input_ids=self.input_ids.flatten()[next_places.T],
            labels=labels[next_places.T].clamp(min=0),
            loss_mask=next_mask[context_index.T],
            padding_mask=~there[index.T],
            trained=mask.sum(),
            predicted=next_mask.sum(),
            fuse=self._vision_rows(next_places, rows),
        )

    def _vision_rows(self, index: Tensor, rows: Tensor | None) -> VisionRows | None:
        """The vision tokens that tokens at `index` take; None for a batch without any.

        Args:
            index: of tokens.
            rows: [M] where each vision token of the batch lies among those that the rank has; None: in its own place.
        """
        if not (self.vision_slot >= 0).any():
            return None
        slots = self.vision_slot[index.flatten()]
        positions = (slots >= 0).nonzero().squeeze(-1)
        taken = slots[positions]
        return VisionRows(rows=taken if rows is None else rows[taken], positions=positions)
