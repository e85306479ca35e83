"""Arrange the real tokens of a caller's rows as a `SequenceLayout`, and return outputs to the caller's order.

In a layout, the padding of a segment follows its real tokens, so that causal attention needs no mask. Rows with padding
on the left are therefore rolled, and `OutputConversion` rolls their outputs back.

Legend: B rows, S tokens per row, T tokens of the layout, n segments; b and s local sizes of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.core.layout import SequenceLayout, segment_ids, segment_offsets

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

# Fields of PackedSeqParams with the offsets of segments.
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass(frozen=True)
class CallerLayout:
    """The `SequenceLayout` of a caller's batch, and where the tokens of the layout are in the caller's rows."""

    layout: SequenceLayout
    shape: tuple[int, int]  # B and S of the caller
    # [T] int64, the caller's token at each position of the layout, -1 for padding that the caller's rows do not have;
    # None if the order is the same.
    sources: Tensor | None = None
    packed: bool = False  # whether the caller has given packed-sequence parameters

    def arrange(self, values: Tensor, fill: int = 0) -> Tensor:
        """Rearrange values [..., rows, tokens] from the caller's rows to the layout's rows, with `fill` for padding."""
        flat = values.flatten(-2)
        if self.sources is not None:
            flat = F.pad(flat, (0, 1), value=fill)[..., self.sources]  # index -1 reads the appended fill value
        return flat.unflatten(-1, (self.layout.num_rows, -1))


def detect_layout(
    ids: Tensor, attention_mask: Tensor | None, packed: PackedSeqParams | None, pad_token_id: int | None
) -> CallerLayout:
    """Return the layout of a batch of token ids [B, S] on the host, from masks and packed-sequence parameters.

    Without `packed`, each row is a segment. With it, the offsets decide:

    - As many segments as rows: segment i contains the real tokens of row i, padded or truncated to the segment's length
      in the packed row. (A single row that is as long as its segment is the packed row, unless it begins with padding.)
    - Otherwise the concatenated rows are the packed row, and each row begins a segment.

    Real tokens are determined by `attention_mask` [B, S]; without it by the lengths in `packed`; without both, all
    tokens are real except a run of `pad_token_id` at the end of a row. The last rule is a heuristic: a document may end
    with that token. It affects which tokens experts process and count, but not the results of tokens before the run.

    Raises:
        ValueError: masks and offsets that contradict each other or match none of these formats.
    """
    keep = None if attention_mask is None else attention_mask.bool()
    rows, tokens = ids.shape
    if packed is None:
        if keep is None:
            keep = _mask_trailing_padding(ids, pad_token_id)
        first, lengths = _find_real_tokens(keep)
        rolled = (torch.arange(tokens) + first[:, None]) % tokens + torch.arange(rows)[:, None] * tokens
        layout = SequenceLayout.padded_rows(lengths.tolist(), tokens)
        return CallerLayout(layout, (rows, tokens), sources=rolled.flatten() if first.any() else None)
    logical, physical = read_segment_lengths(packed)
    flat = rows == 1 and physical[0] == tokens and (keep is None or bool(keep[0, 0]))
    if len(physical) == rows and not flat:
        return _pack_rows((rows, tokens), keep, logical, physical)
    return _split_packed_row((rows, tokens), keep, logical, physical)


# Slices of context-parallel ranks have already been gathered when offsets are compared with rows, see `gather_row`.
_SLICES = (
    "Under context parallelism, forward also takes one flat row with only this rank's share of the tokens; "
    "packed_seq_params then counts the tokens of all ranks"
)


def _pack_rows(shape: tuple[int, int], keep: Tensor | None, logical: Tensor, physical: Tensor) -> CallerLayout:
    """Return the layout of a packed row in which each segment has the real tokens of one of the caller's rows.

    `logical` and `physical` are the lengths of the segments without and with padding.
    """
    tokens = shape[1]
    if keep is None:
        keep = torch.arange(tokens) < logical[:, None]
        if int(logical.max()) > tokens:
            row = int(logical.argmax())
            raise ValueError(
                f"packed_seq_params has {int(logical[row])} tokens for row {row}, which is only {tokens} tokens long. "
                f"Give the number of its real tokens, or an attention_mask that marks them. {_SLICES}"
            )
    first, lengths = _find_real_tokens(keep)
    _check_counts(lengths, logical, physical)
    layout = make_packed_layout(lengths, physical)
    segment, offset = segment_ids(physical), segment_offsets(physical)
    sources = torch.where(offset < lengths[segment], segment * tokens + first[segment] + offset, -1)
    return CallerLayout(layout, shape, sources, packed=True)


def _split_packed_row(shape: tuple[int, int], keep: Tensor | None, logical: Tensor, physical: Tensor) -> CallerLayout:
    """Return the layout of a packed row that the caller has divided into rows of equal length."""
    rows, tokens = shape
    rest = rows * tokens - int(physical.sum())
    if rest > 0 and rows == 1 and keep is not None and not keep[0, -rest:].any():
        logical, physical = F.pad(logical, (0, 1)), F.pad(physical, (0, 1), value=rest)
    elif rest:
        raise ValueError(
            f"packed_seq_params has {len(physical)} segments of {int(physical.sum())} tokens in all, input_ids has "
            f"shape {list(shape)}: expected {rows * tokens} tokens, the full batch"
            + (", or an attention_mask that marks the rest as padding" if rows == 1 and rest > 0 else "")
            + (f", or one segment for each of {rows} rows" if rows > 1 else "")
            + (f". {_SLICES}" if rest < 0 else "")
        )
    ends = physical.cumsum(0)
    inside = [row for row in range(1, rows) if row * tokens not in ends]
    if inside:
        raise ValueError(
            f"packed_seq_params has {len(physical)} segments; row {inside[0]} of {tokens} tokens begins inside a "
            f"segment. Give one segment for each of {rows} rows, or segments that do not cross the ends of rows"
        )
    lengths = logical
    if keep is not None:
        segment = segment_ids(physical)
        lengths = torch.zeros_like(physical).index_add(0, segment, keep.flatten().long())
        wrong = (keep.flatten() != (segment_offsets(physical) < lengths[segment])).nonzero()
        if len(wrong):
            raise ValueError(
                f"attention_mask has padding before real tokens in segment {int(segment[wrong[0]])} of the packed row; "
                "expected a segment's real tokens first and its padding after them"
            )
        _check_counts(lengths, logical, physical)
    return CallerLayout(make_packed_layout(lengths, physical), shape, packed=True)


def make_packed_layout(lengths: Tensor, physical: Tensor) -> SequenceLayout:
    """Return the layout of one packed row, from the logical and physical lengths [n] of its segments."""
    if (lengths > physical).any() or not physical.any():
        raise ValueError(
            f"packed_seq_params has segments of {lengths.tolist()} tokens in padded lengths of {physical.tolist()}: "
            "give padded lengths that are not smaller than the numbers of tokens, and not all 0"
        )
    exists = physical > 0  # offset tables of a fixed size repeat their last entry
    return SequenceLayout.from_lengths(1, lengths[exists].tolist(), physical[exists].tolist())


def read_segment_lengths(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """Return the segment lengths without and with padding, two tensors [segments] int64, from offsets on the host.

    Raises:
        ValueError: the offsets are malformed or contradict each other.
    """
    given = {name: tensor.long() for name in OFFSETS if (tensor := getattr(packed, name)) is not None}
    logical = given.get("cu_seqlens_q")
    if packed.qkv_format != "thd" or logical is None:
        raise ValueError(
            f"packed_seq_params has qkv_format {packed.qkv_format!r} and cu_seqlens_q {packed.cu_seqlens_q}, expected "
            "'thd' and the offsets of the segments"
        )
    if packed.local_cp_size is not None:
        raise ValueError(
            f"packed_seq_params has local_cp_size {packed.local_cp_size}, expected None: this model's rows are shared "
            "by all context-parallel ranks; turn dynamic context parallelism off"
        )
    physical = given.get("cu_seqlens_q_padded", logical)
    for name, offsets in given.items():
        if offsets.dim() != 1 or len(offsets) < 2 or offsets[0] != 0 or (offsets.diff() < 0).any():
            raise ValueError(f"{name} is {offsets.tolist()}, expected offsets that ascend from 0")
        expected = physical if "padded" in name else logical
        if not torch.equal(offsets, expected):
            raise ValueError(
                f"{name} is {offsets.tolist()}, expected {expected.tolist()} as for queries: give the same offsets for "
                "queries and keys"
            )
    if logical.shape != physical.shape:
        raise ValueError(
            f"cu_seqlens_q has {len(logical)} entries, cu_seqlens_q_padded {len(physical)}: give the offsets of the "
            "same segments, without and with padding"
        )
    return logical.diff(), physical.diff()


def _find_real_tokens(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first real token and the number of real tokens of each row, two tensors [rows].

    Raises:
        ValueError: the real tokens of a row are not consecutive.
    """
    first, lengths = keep.int().argmax(-1), keep.sum(-1)
    token = torch.arange(keep.shape[1])
    run = (token >= first[:, None]) & (token < (first + lengths)[:, None])
    holes = (keep != run).any(-1).nonzero()
    if len(holes):
        raise ValueError(
            f"attention_mask has padding between real tokens in row {int(holes[0])}; expected padding on the left or "
            "right of a row. If a row contains several documents, give packed_seq_params"
        )
    return first, lengths


def _mask_trailing_padding(ids: Tensor, pad_token_id: int | None) -> Tensor:
    """Return a bool mask [rows, tokens] that is False for the `pad_token_id`s at the end of each row."""
    real = torch.ones_like(ids, dtype=torch.bool) if pad_token_id is None else ids != pad_token_id
    return real.flip(-1).cummax(-1).values.flip(-1)


def _check_counts(lengths: Tensor, logical: Tensor, physical: Tensor) -> None:
    """Raise ValueError if the numbers of real tokens per segment in a mask contradict packed-sequence parameters.

    `lengths` are the numbers in the mask, `logical` and `physical` the segment lengths without and with padding.
    """
    agree = (lengths == logical) | ((logical == physical) & (lengths <= logical))
    wrong = (~agree).nonzero()
    if len(wrong):
        segment = int(wrong[0])
        raise ValueError(
            f"segment {segment}: attention_mask has {int(lengths[segment])} real tokens, but packed_seq_params gives "
            f"{int(logical[segment])} tokens and a padded length of {int(physical[segment])}: give the number of real "
            "tokens in packed_seq_params, or omit attention_mask"
        )


@dataclass(frozen=True)
class OutputConversion(Transferable):
    """Conversion of the outputs of one forward pass to the order and shape of the caller's rows."""

    # [B, S] int64, index of each of the caller's tokens in the flat layout, -1 if the layout lacks it; None if outputs
    # are in the caller's order.
    slots: Tensor | None = None
    drops_tokens: bool = False  # whether `slots` has -1
    ignored_labels: Tensor | None = None  # [b, s] bool, True where the loss must be 0
    # [b, s], this rank's slice of a mask given for the full batch, to be returned with the output as Megatron-Bridge's
    # own model does; None if the caller already has the slice.
    loss_mask: Tensor | None = None

    @classmethod
    def to_caller_order(cls, caller: CallerLayout, labels: Tensor | None) -> Self:
        """Return the conversion of outputs to the order of the caller's `input_ids`, [rows, tokens, ...].

        With packed-sequence parameters, only the losses of labels in this order are converted. Logits, and losses of
        labels in the order of the packed row, are returned as the packed row, as by Megatron-Bridge's own model. RL
        frameworks unpack this row.
        """
        (rows, tokens), layout = caller.shape, caller.layout
        stays_packed = caller.packed and (labels is None or labels.shape != caller.shape)
        if stays_packed or (caller.sources is None and rows == layout.num_rows):
            return cls()
        sources = torch.arange(layout.total) if caller.sources is None else caller.sources
        slots = torch.full((rows * tokens,), -1)
        slots[sources[sources >= 0]] = (sources >= 0).nonzero().squeeze(-1)
        return cls(slots.view(caller.shape), drops_tokens=bool((slots < 0).any()))

    @property
    def is_needed(self) -> bool:
        """Return True if outputs have to be converted."""
        return any(part is not None for part in (self.slots, self.ignored_labels, self.loss_mask))

    def convert(self, output: Any) -> Any:
        """Return outputs of the model in the order of the caller's rows.

        Padding tokens of the caller that the layout does not contain get zeros.

        If the field `loss_mask` is set, return a tuple (outputs, `loss_mask`).
        """
        if self.ignored_labels is not None:
            output = output.masked_fill(self.ignored_labels, 0)
        if self.slots is not None:
            flat = output.flatten(0, 1)
            if self.drops_tokens:
                flat = torch.cat((flat, flat.new_zeros(1, *flat.shape[1:])))  # index -1 reads this row
            output = flat.index_select(0, (self.slots % len(flat)).flatten()).unflatten(0, self.slots.shape)
        return output if self.loss_mask is None else (output, self.loss_mask)

    def for_output_processor(self) -> Self:
        """Return the conversion for the outputs of a caller's `output_processor`.

        Raises:
            ValueError: the processor would get tokens in another order than the caller's.
        """
        if self.slots is not None:
            raise ValueError(
                "output_processor is given, but the model computes the rows in another token order than the caller's, "
                "and cannot reorder what output_processor returns. Pad rows on the right, or give packed_seq_params "
                "and labels in the packed row's order, [1, tokens]"
            )
        return replace(self, ignored_labels=None)
