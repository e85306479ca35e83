"""A batch (`TokenBatch`), and the inputs of one rank's model (`ModelInputs`) or vision tower (`VisionRankInputs`).

`TokenBatch.build` makes a batch on the host from token ids, pixels and grids; `TokenBatch.local` selects the tokens and
images of one rank. Everything that a training step needs (positions, offsets, indices of vision tokens) is computed
there, so that the model's forward pass does not synchronize with the device.

Legend: B rows, S tokens per row, T = B * S; b and s local sizes of a context-parallel rank; sp the size of sequence
parallelism; K vision tokens of a rank; M vision tokens of the batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.core.layout import SequenceLayout, next_token_index, token_index
from qwen3vl_bridge.core.ngrams import NgramHash, ngram_ids
from qwen3vl_bridge.core.vision_inputs import (
    VisionInputs,
    VisionSettings,
    make_vision_inputs,
    mrope_positions,
    vision_slots,
)
from qwen3vl_bridge.core.vision_sharding import (
    VisionAssignment,
    VisionExchange,
    VisionShard,
    VisionWork,
    assign_vision,
)

import torch
from torch import Tensor


@dataclass(frozen=True)
class VisionPlacement(Transferable):
    """Indices with which vision tokens replace hidden states of a rank: hidden[targets] = vision[sources].

    Hidden states are flattened from [s, b].
    """

    sources: Tensor  # [K] int64, indices into the vision tokens that this rank encodes or receives
    targets: Tensor  # [K] int64, indices into the hidden states


@dataclass(frozen=True)
class NextTokens(Transferable):
    """Inputs of multi-token prediction for one rank: for each token, the next token and the label of the next token.

    The last real token of a segment and padding have no next token: their entries repeat the token, with mask 0.
    megatron-core rolls ids, labels and masks segment by segment in every step, which synchronizes with the device at
    each segment and communicates over context-parallel ranks. Gathering them on the host once avoids both.
    """

    input_ids: Tensor  # [b, s] int64, the next token
    labels: Tensor  # [b, s] int64, the token after the next
    loss_mask: Tensor  # [b, s] float32, 1 where this label is trained on
    padding_mask: Tensor  # [b, s / sp] bool, True for tokens of this sequence-parallel rank without a next token
    num_trained: Tensor  # [] float32, number of tokens in the whole batch whose next token is trained on
    num_predicted: Tensor  # [] float32, number of tokens in the whole batch where `loss_mask` is 1
    fuse: VisionPlacement  # vision tokens among this context-parallel rank's next tokens
    measured: bool = False  # whether predictions are computed and counted outside of training, too


@dataclass(frozen=True)
class ModelInputs(Transferable):
    """The tokens, images and labels of a batch that the model of one rank reads."""

    input_ids: Tensor  # [b, s] int64
    position_ids: Tensor  # [3, b, s] int64, temporal, height and width position
    labels: Tensor | None  # [b, s] int64, already shifted, or None
    loss_mask: Tensor | None  # [b, s] float32, or None
    # [b, s / sp] bool, True for padding and for `excluded_from_aux_loss` tokens of this sequence-parallel rank.
    padding_mask: Tensor
    layout: SequenceLayout  # of the whole batch; attention reads it in packed rows
    fuse: VisionPlacement  # vision tokens of this context-parallel rank
    deepstack: VisionPlacement  # vision tokens of this context- and sequence-parallel rank
    vision: VisionInputs | None = None  # the images and videos that this rank encodes, or None
    vision_exchange: VisionExchange | None = None  # None if the rank encodes all vision tokens that it needs
    # For each separate vision rank, the shard that it sends for this batch. None without separate vision ranks.
    vision_shards: tuple[VisionShard, ...] | None = None
    next_tokens: NextTokens | None = None  # None if multi-token prediction is not trained
    # [L, s / sp, b, heads] int64, hashed n-grams of the tokens of this sequence-parallel rank, for each of the L layers
    # with n-gram embeddings; None without such layers.
    ngram_ids: Tensor | None = None

    def without_labels(self) -> Self:
        """Return the same inputs without labels, for which the model returns logits."""
        return replace(self, labels=None, loss_mask=None, next_tokens=None)


@dataclass(frozen=True)
class DocumentGroups(Transferable):
    """The grouping of a packed row's segments by record, for objectives that compare documents.

    The segments of a record follow one another. R is the number of records.
    """

    objective: str  # `objective.kind` of the runs that the records are for
    sizes: tuple[int, ...]  # [R], number of segments of each record
    is_desirable: Tensor | None = None  # [R] float64, 1 for desirable answers (KTO)
    reference_logps: Tensor | None = None  # [R, 2] float64, log-probabilities under a reference model, if known
    answer_tokens: tuple[int, int] | None = None  # ids of the tokens "yes" and "no" (reranker)

    @property
    def num_documents(self) -> int:
        """Return the number of segments that belong to records. All later segments of the row are padding."""
        return sum(self.sizes)


@dataclass(frozen=True)
class TokenBatch(Transferable):
    """A batch of padded rows, or a packed row, before it is divided over ranks."""

    input_ids: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64, labels[t] is the token after t in the same segment; undefined where loss_mask is 0
    loss_mask: Tensor  # [B, S] float32, 1 where the label is trained on
    position_ids: Tensor  # [3, B, S] int64
    vision_slot: Tensor  # [T] int64, index of each token in the output of the vision tower, or -1
    layout: SequenceLayout
    # Images and videos; None if there are none, or for a pipeline stage that does not encode them.
    vision: VisionInputs | None = None
    sample_ids: tuple[str, ...] = ()  # ids of the segments' samples, in order, for messages
    dropped: tuple[int, ...] = ()  # per data set, the number of samples dropped up to these rows
    # For streams: the number dropped since the previous rows, because each process knows only its own rows.
    newly_dropped: tuple[int, ...] = ()
    # Per data set, the number of samples in these rows that could not be read and are a blank token instead.
    unreadable: tuple[int, ...] = ()
    # [B, S] bool, True for real tokens that MoE routers leave out of their load balancing; None if there are none.
    excluded_from_aux_loss: Tensor | None = None
    groups: DocumentGroups | None = None  # None for supervised training

    def __contains__(self, key: object) -> bool:
        # Megatron-Bridge's own forward steps look for keys of a dict.
        raise TypeError(
            f"the forward step looked for {key!r} in a qwen3vl_bridge.core.batch.TokenBatch, which is not a dict: use "
            "qwen3vl_bridge.forward_step, as in finetune(cfg, qwen3vl_bridge.forward_step, "
            "callbacks=qwen3vl_bridge.training_callbacks(cfg))"
        )

    @classmethod
    def build(
        cls,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        layout: SequenceLayout,
        settings: VisionSettings,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        position_ids: Tensor | None = None,
        excluded_from_aux_loss: Tensor | None = None,
        sample_ids: tuple[str, ...] = (),
        encode_vision: bool = True,
    ) -> Self:
        """Make a batch on the host: derive positions, vision slots and the inputs of the vision tower.

        Args:
            input_ids, labels, loss_mask, layout, sample_ids, excluded_from_aux_loss: see the fields of the class.
            settings: the sizes and token ids of the model's vision tower.
            pixel_values, pixel_values_videos: [patches, features] from the processor; they may be on a device.
            image_grid_thw, video_grid_thw: [K, 3], grids in patches, in the order of their tokens.
            position_ids: [3, B, S] to use instead of the derived positions, except for padding.
            encode_vision: False for a pipeline stage that does not encode images and videos.

        Raises:
            ValueError: tokens, grids, pixels and layout do not match.
        """
        # Positions are always derived, because this checks that tokens and grids match.
        positions = mrope_positions(input_ids, layout, image_grid_thw, video_grid_thw, settings)
        if position_ids is not None:
            positions = position_ids.long().masked_fill(layout.padding_mask().view(input_ids.shape), 0)
        vision = None
        if encode_vision:
            vision = make_vision_inputs(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, settings)
        return cls(
            input_ids=input_ids,
            labels=labels,
            loss_mask=loss_mask,
            position_ids=positions,
            vision_slot=vision_slots(input_ids, image_grid_thw, settings),
            layout=layout,
            vision=vision,
            sample_ids=sample_ids,
            excluded_from_aux_loss=excluded_from_aux_loss,
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
        with_next_tokens: bool = False,
        encode_vision: bool = True,
        ngram_hashes: Sequence[NgramHash] = (),
    ) -> ModelInputs:
        """Return the inputs of one rank, on the host. Tokens are gathered by `token_index`.

        Args:
            cp_size, cp_rank, sp_size, sp_rank: size of context and sequence parallelism, and the rank in each group.
            vision_work: cost of encoding a frame, by which frames are divided over context-parallel ranks. None: each
                rank encodes all frames.
            vision_ranks: number of separate vision ranks, which then encode all images; None if there are none.
            with_next_tokens: whether multi-token prediction is trained.
            encode_vision: False for a pipeline stage that does not encode images and videos.
            ngram_hashes: the hash heads of each layer with n-gram embeddings.
        """
        cp_index = token_index(self.layout, cp_size, cp_rank)  # [s, b]
        sp_index = token_index(self.layout, cp_size, cp_rank, sp_size, sp_rank)  # [s / sp, b]

        vision, exchange, shards = self.vision if encode_vision else None, None, None
        # [M], index of each vision token among the tokens that this rank receives; None if it encodes all of them.
        received_index = None
        if encode_vision and vision_ranks is not None:
            assert vision_work is not None
            assignment = assign_vision(self.vision, vision_work, vision_ranks)
            # The rank receives the tokens of all vision ranks, concatenated: both indices are equal.
            vision, shards, received_index = None, self.vision_shards_of(assignment), assignment.encoded_index
        elif vision is not None and vision_work is not None and cp_size > 1:
            assignment = assign_vision(vision, vision_work, cp_size)
            slots = []  # for each context-parallel rank, the vision slots of all tokens that it reads
            for rank in range(cp_size):
                index = token_index(self.layout, cp_size, rank).flatten()
                if with_next_tokens:
                    index = torch.cat((index, next_token_index(self.layout)[0][index]))
                slots.append(self.vision_slot[index])
            exchange, received_index = VisionExchange.plan(assignment, slots, cp_rank)
            vision = assignment.select(vision, cp_rank)

        excluded = self.layout.padding_mask()
        if self.excluded_from_aux_loss is not None:
            excluded = excluded | self.excluded_from_aux_loss.flatten()
        return ModelInputs(
            input_ids=self.input_ids.flatten()[cp_index.T],
            position_ids=self.position_ids.flatten(1)[:, cp_index.T],
            labels=self.labels.flatten()[cp_index.T],
            loss_mask=self.loss_mask.flatten()[cp_index.T],
            padding_mask=excluded[sp_index.T],
            layout=self.layout,
            vision=vision,
            vision_exchange=exchange,
            vision_shards=shards,
            fuse=self._vision_placement(cp_index, received_index),
            deepstack=self._vision_placement(sp_index, received_index),
            next_tokens=self._next_tokens(cp_index, sp_index, received_index) if with_next_tokens else None,
            # N-grams may reach into the chunks of other ranks, so they are hashed before tokens are selected.
            ngram_ids=ngram_ids(self.input_ids, self.layout, ngram_hashes)[:, sp_index] if ngram_hashes else None,
        )

    def vision_shards_of(self, assignment: VisionAssignment) -> tuple[VisionShard, ...]:
        """Return size and checksum of the vision tokens that each separate vision rank sends for this batch."""
        samples = zlib.crc32(repr((self.sample_ids, self.layout.lengths)).encode())
        samples = zlib.crc32(self.input_ids.numpy(), samples)  # samples may have no ids
        lengths = () if self.vision is None else self.vision.lengths
        return tuple(
            VisionShard(tokens, zlib.crc32(repr([lengths[frame] for frame in frames]).encode(), samples))
            for frames, tokens in zip(assignment.frames, assignment.counts, strict=True)
        )

    def _next_tokens(self, cp_index: Tensor, sp_index: Tensor, received_index: Tensor | None) -> NextTokens:
        next_index, has_next = next_token_index(self.layout)
        labels, next_of_local = self.labels.flatten(), next_index[cp_index]
        # Callers may mark untrained tokens by negative labels, and may leave padding unmarked.
        mask = self.loss_mask.flatten() * (labels >= 0) * ~self.layout.padding_mask()
        next_mask = mask[next_index] * has_next
        return NextTokens(
            input_ids=self.input_ids.flatten()[next_of_local.T],
            labels=labels[next_of_local.T].clamp(min=0),
            loss_mask=next_mask[cp_index.T],
            padding_mask=~has_next[sp_index.T],
            num_trained=mask.sum(),
            num_predicted=next_mask.sum(),
            fuse=self._vision_placement(next_of_local, received_index),
        )

    def _vision_placement(self, index: Tensor, received_index: Tensor | None) -> VisionPlacement:
        """Return which vision tokens replace which of the tokens with the indices `index` [s, b] in the batch.

        `received_index` [M]: index of each vision token among the tokens that this rank receives, from itself and from
        other ranks. None if it encodes all vision tokens of the batch.
        """
        slots = self.vision_slot[index.flatten()]
        targets = (slots >= 0).nonzero().squeeze(-1)
        sources = slots[targets]
        return VisionPlacement(sources=sources if received_index is None else received_index[sources], targets=targets)


@dataclass(frozen=True)
class VisionRankInputs(Transferable):
    """Inputs of one forward pass of a separate vision rank: images to encode, and sizes of the tensors to send."""

    vision: VisionInputs | None  # images and videos that this rank encodes, ordered by receiver; None without any
    shards: tuple[VisionShard, ...]  # the shard for each receiver
    max_tokens: int  # largest number of vision tokens in a shard for these receivers; shards are padded to it

    @classmethod
    def from_batches(cls, batches: Sequence[TokenBatch], work: VisionWork, vision_ranks: int, share: int) -> Self:
        """Return the inputs of a vision rank for one microbatch of each language replica that it serves.

        Args:
            batches: the microbatches, one for each replica.
            work: cost of encoding a frame.
            vision_ranks: number of vision ranks that divide the images of a batch.
            share: index of this vision rank among them.
        """
        assignments = [assign_vision(batch.vision, work, vision_ranks) for batch in batches]
        pairs = list(zip(batches, assignments, strict=True))
        shards = [batch.vision_shards_of(assignment) for batch, assignment in pairs]
        selected = [assignment.select(batch.vision, share) for batch, assignment in pairs]
        encoded = [vision for vision in selected if vision is not None]
        return cls(
            vision=VisionInputs.concatenate(encoded) if encoded else None,
            shards=tuple(of_batch[share] for of_batch in shards),
            max_tokens=max(shard.tokens for of_batch in shards for shard in of_batch),
        )
