"""The batch dataclasses: what collation makes, and what one rank's model or separate vision tower reads of it.

Legend: B rows, S tokens a row, T = B * S, K vision tokens of a rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from qwen3vl_bridge.batch.device_transfer import Movable
from qwen3vl_bridge.batch.token_layout import SequenceLayout, next_index, token_index
from qwen3vl_bridge.batch.vision_inputs import VisionInputs
from qwen3vl_bridge.batch.vision_sharding import (
    VisionAssignment,
    VisionExchange,
    VisionShard,
    VisionWork,
    assign_vision,
)

import torch
from torch import Tensor


@dataclass(frozen=True)
class VisionRows(Movable):
    """How vision tokens get into one rank's hidden states, flattened from [s, b]: hidden[targets] = vision[sources]."""

    sources: Tensor  # [K] int64, indices into the vision tokens that this rank encodes or receives
    targets: Tensor  # [K] int64, indices of their places in the hidden states


@dataclass(frozen=True)
class NextTokens(Movable):
    """What multi-token prediction reads: for each token the next token, and its label, the token after the next.

    megatron-core rolls token ids, labels and masks in every step instead, segment by segment and over context-parallel
    ranks, and waits for the device at each segment. Here they are gathered once. One rank's part, as in `ModelInputs`.
    A segment's last real token has no next token, nor has padding: their entries are those of the token itself, and
    their mask is 0.
    """

    input_ids: Tensor  # [b, s] int64, the next token
    labels: Tensor  # [b, s] int64, the token after the next
    loss_mask: Tensor  # [b, s] float32, 1 where this label is trained on
    padding_mask: Tensor  # [b, s / sp] bool, True where this context- and sequence-parallel rank has no next token
    trained: Tensor  # [] float32, tokens of the whole batch whose own label is trained on
    predicted: Tensor  # [] float32, tokens of the whole batch whose `loss_mask` is 1
    fuse: VisionRows  # vision tokens among this context-parallel rank's next tokens


@dataclass(frozen=True)
class ModelInputs(Movable):
    """One rank's part of a batch, the input of the model. s and b are local sizes."""

    input_ids: Tensor  # [b, s] int64
    position_ids: Tensor  # [3, b, s] int64, temporal, height and width position
    labels: Tensor | None  # [b, s] int64, already shifted, or None
    loss_mask: Tensor | None  # [b, s] float32, or None
    # [b, s / sp] bool, True where this context- and sequence-parallel rank has no real token, or an `uncounted` one.
    padding_mask: Tensor
    layout: SequenceLayout  # of the whole batch, all ranks' parts; used by attention in packed rows
    fuse: VisionRows  # vision tokens of this context-parallel rank
    deepstack: VisionRows  # vision tokens of this context- and sequence-parallel rank
    vision: VisionInputs | None = None  # the images and videos that this rank encodes, or None
    # Vision tokens to send and receive; None if the rank encodes all that it needs.
    vision_exchange: VisionExchange | None = None
    # What each separate vision rank sends for this microbatch; None without separate vision ranks.
    vision_shards: tuple[VisionShard, ...] | None = None
    following: NextTokens | None = None  # the next tokens, if multi-token prediction is trained

    def without_labels(self) -> Self:
        """The same inputs for logits instead of losses."""
        return replace(self, labels=None, loss_mask=None, following=None)


@dataclass(frozen=True)
class TokenBatch(Movable):
    """A whole batch as made by collation, equal on every rank that shares it."""

    input_ids: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64, labels[t] is the token after t in the same segment; undefined where loss_mask is 0
    loss_mask: Tensor  # [B, S] float32, 1 where the label is trained on
    position_ids: Tensor  # [3, B, S] int64
    vision_slot: Tensor  # [T] int64, index of each token in the vision tower's output, or -1
    layout: SequenceLayout  # the segments
    # Images and videos; None if there are none, or for a pipeline stage that encodes none.
    vision: VisionInputs | None = None
    sample_ids: tuple[str, ...] = ()  # ids of the segments' samples, in order, for messages
    dropped: tuple[int, ...] = ()  # per data set, the number of samples dropped up to these rows, over all epochs
    # The same since the previous rows, for streams, where each process knows only its own rows.
    newly_dropped: tuple[int, ...] = ()
    # Per data set, samples in these rows that could not be read and are a blank token instead.
    unreadable: tuple[int, ...] = ()
    uncounted: Tensor | None = None  # [B, S] bool, real tokens that routers leave out of what they count; None: none

    def __contains__(self, key: object) -> bool:
        """Of other packages' forward steps, which look for keys of a dict: raises TypeError."""
        raise TypeError(
            f"a batch of this data module was asked for {key!r}, as if it were a dict of Megatron-Bridge's collators: "
            "expected qwen3vl_bridge.forward_step, as in finetune(cfg, qwen3vl_bridge.forward_step, "
            "callbacks=qwen3vl_bridge.training_callbacks(cfg))"
        )

    def local(
        self,
        cp_size: int = 1,
        cp_rank: int = 0,
        sp_size: int = 1,
        sp_rank: int = 0,
        vision_work: VisionWork | None = None,
        vision_ranks: int | None = None,
        *,
        predicts: bool = False,
        encodes: bool = True,
    ) -> ModelInputs:
        """One rank's part of a batch on the host: tokens are gathered by `token_index`, vision tokens by `vision_slot`.

        Args:
            cp_size, cp_rank, sp_size, sp_rank: as for `token_index`.
            vision_work: cost of frames, by which context-parallel ranks divide them; None: each rank encodes all.
            vision_ranks: number of separate ranks that encode, dividing images and videos; this rank encodes none then.
            predicts: whether multi-token prediction is trained, which needs the next tokens.
            encodes: whether this pipeline stage encodes images and videos; others need only where their tokens are.
        """
        context_index = token_index(self.layout, cp_size, cp_rank)  # [s, b]
        index = token_index(self.layout, cp_size, cp_rank, sp_size, sp_rank)  # [s / sp, b]

        def take(whole: Tensor) -> Tensor:
            return whole.flatten(-2)[..., context_index.T]

        out_of_count = self.layout.padding_mask()
        if self.uncounted is not None:
            out_of_count = out_of_count | self.uncounted.flatten()
        own, exchange, shards, held = self.vision if encodes else None, None, None, None
        if encodes and vision_ranks is not None:
            assert vision_work is not None
            assignment = assign_vision(self.vision, vision_work, vision_ranks)
            own, shards, held = None, self.vision_shards_of(assignment), assignment.encoded_index
        elif own is not None and vision_work is not None and cp_size > 1:
            assignment = assign_vision(own, vision_work, cp_size)
            slots = [self._slots_of(cp_size, rank, predicts=predicts) for rank in range(cp_size)]
            exchange, held = VisionExchange.of(assignment, slots, cp_rank)
            own = assignment.part(own, cp_rank)
        return ModelInputs(
            input_ids=take(self.input_ids),
            position_ids=take(self.position_ids),
            labels=take(self.labels),
            loss_mask=take(self.loss_mask),
            padding_mask=out_of_count[index.T],
            layout=self.layout,
            vision=own,
            vision_exchange=exchange,
            vision_shards=shards,
            fuse=self._vision_rows(context_index, held),
            deepstack=self._vision_rows(index, held),
            following=self._next_tokens(context_index, index, held) if predicts else None,
        )

    def vision_shards_of(self, assignment: VisionAssignment) -> tuple[VisionShard, ...]:
        """What each separate vision rank sends for this batch."""
        samples = zlib.crc32(repr((self.sample_ids, self.layout.lengths)).encode())
        samples = zlib.crc32(self.input_ids.numpy(), samples)  # they may have no ids
        lengths = () if self.vision is None else self.vision.lengths
        return tuple(
            VisionShard(tokens, zlib.crc32(repr([lengths[frame] for frame in frames]).encode(), samples))
            for frames, tokens in zip(assignment.frames, assignment.counts, strict=True)
        )

    def _slots_of(self, cp_size: int, cp_rank: int, *, predicts: bool) -> Tensor:
        """Vision slots of the tokens that a context-parallel rank reads: its own and with `predicts` the next."""
        index = token_index(self.layout, cp_size, cp_rank).flatten()
        return self.vision_slot[torch.cat((index, next_index(self.layout)[0][index])) if predicts else index]

    def _next_tokens(self, context_index: Tensor, index: Tensor, held: Tensor | None) -> NextTokens:
        """For the tokens at `context_index` [s, b], of which the rank has those at `index` [s / sp, b]."""
        next_tokens, has_next = next_index(self.layout)
        labels, next_of_local = self.labels.flatten(), next_tokens[context_index]
        # Callers may mark untrained tokens by negative labels, and may leave padding unmarked.
        mask = self.loss_mask.flatten() * (labels >= 0) * ~self.layout.padding_mask()
        next_mask = mask[next_tokens] * has_next
        return NextTokens(
            input_ids=self.input_ids.flatten()[next_of_local.T],
            labels=labels[next_of_local.T].clamp(min=0),
            loss_mask=next_mask[context_index.T],
            padding_mask=~has_next[index.T],
            trained=mask.sum(),
            predicted=next_mask.sum(),
            fuse=self._vision_rows(next_of_local, held),
        )

    def _vision_rows(self, index: Tensor, held: Tensor | None) -> VisionRows:
        """Those of the tokens at `index` [s, b] into the flat batch.

        `held` [M] is each vision token's index among those that the rank encodes or receives; None if it encodes all.
        """
        slots = self.vision_slot[index.flatten()]
        targets = (slots >= 0).nonzero().squeeze(-1)
        return VisionRows(sources=slots[targets] if held is None else held[slots[targets]], targets=targets)


@dataclass(frozen=True)
class VisionRankInputs(Movable):
    """What one vision rank encodes, and for which receivers."""

    vision: VisionInputs | None  # its images and videos, ordered by receiver; None if it has none
    shards: tuple[VisionShard, ...]  # the shard of each receiver
    most_tokens: int  # largest number of vision tokens in a shard for these receivers; shards are padded to it

    @classmethod
    def of(cls, batches: Sequence[TokenBatch], work: VisionWork, vision_ranks: int, share: int) -> VisionRankInputs:
        """Part `share` of several microbatches that a rank encodes at a time, whose images `vision_ranks` ranks divide.

        They are of one language replica, whose images several ranks may divide, or of several replicas.
        """
        assignments = [assign_vision(batch.vision, work, vision_ranks) for batch in batches]
        sent = [batch.vision_shards_of(assignment) for batch, assignment in zip(batches, assignments, strict=True)]
        parts = [assignment.part(batch.vision, share) for batch, assignment in zip(batches, assignments, strict=True)]
        encoded = [part for part in parts if part is not None]
        return cls(
            vision=VisionInputs.concatenated(encoded) if encoded else None,
            shards=tuple(shards[share] for shards in sent),
            most_tokens=max(shard.tokens for shards in sent for shard in shards),
        )
