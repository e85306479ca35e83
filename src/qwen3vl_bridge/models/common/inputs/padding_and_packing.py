"""Callers' conventions for rows, masks and packing: the positions of real tokens in a batch, and our layout of them.

What lives here: detection of a batch's convention (left padding, right padding, packed), and the mapping from the
caller's token order to the layout's and back. What may not: reading masks and offsets (`masks.py`), labels
(`labels.py`), token positions, images and videos, the model.

In a layout, the real tokens of a segment come first and its padding follows, so that causal attention needs no mask.
Rows with padding on the left are therefore rolled, and their outputs are rolled back.
Legend: B rows, S tokens per row, T tokens of the layout, n segments.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.models.common.inputs.masks import (
    check_counts,
    check_mask,
    packed_layout,
    runs,
    segment_lengths,
    without_trailing,
)
from qwen3vl_bridge.models.common.inputs.outputs import CallerOrder

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

# Such rows have already been gathered, see `precut_rows.py`.
_SHARE = (
    "The model's forward also takes one flat row that is a context-parallel rank's share, of offsets that count its "
    "tokens times the ranks"
)


@dataclass(frozen=True)
class Arrangement:
    """A caller's batch as a layout.

    Attributes:
        layout: the segments.
        shape: B and S of the caller.
        sources: [T] int64, the caller's token at each position of the layout, -1 for padding that the caller's rows do
            not have; or None if the order is the same.
        packed: whether the caller describes a packed row.
    """

    layout: SequenceLayout
    shape: tuple[int, int]
    sources: Tensor | None = None
    packed: bool = False

    def take(self, values: Tensor, fill: int = 0) -> Tensor:
        """[..., B, S] values of the caller's tokens -> [..., b, s] in the layout, with `fill` for added padding."""
        flat = values.flatten(-2)
        if self.sources is not None:
            flat = F.pad(flat, (0, 1), value=fill)[..., self.sources]  # index -1 reads the appended fill value
        return flat.unflatten(-1, (self.layout.num_rows, -1))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Allowed shapes of labels: [B, S] in the caller's order and, for a packed row, [1, T] in the layout's."""
        in_layout = (1, self.layout.total)
        return [self.shape, in_layout] if self.packed and self.shape != in_layout else [self.shape]

    def take_given(self, values: Tensor) -> Tensor:
        """[b, s] values in the layout, from values with one of `shapes`.

        Raises:
            ValueError: the shape is ambiguous, and the two orders differ.
        """
        in_layout = self.packed and values.shape == (1, self.layout.total)
        if in_layout and values.shape == self.shape and self.sources is not None:
            raise ValueError(
                f"labels or loss_mask has shape {list(values.shape)} for a row that begins with padding and is as long "
                "as its segment in packed_seq_params, so its order could be either's: expected a row without padding "
                "on the left"
            )
        return values if in_layout else self.take(values)

    def caller_order(self, labels: Tensor | None) -> CallerOrder | None:
        """How outputs are converted to the caller's order; None if they are already in it.

        Outputs for rows without packed-sequence parameters are [B, S, ...]. With them, logits are a packed row [1, T,
        ...] as described by the parameters, which is what Megatron-Bridge's own model returns and RL frameworks unpack;
        losses have the shape of the labels.
        """
        wanted = labels is not None and labels.shape == self.shape if self.packed else True
        if not wanted or (self.sources is None and self.shape[0] == self.layout.num_rows):
            return None
        sources = torch.arange(self.layout.total) if self.sources is None else self.sources
        slots = torch.full((self.shape[0] * self.shape[1],), -1)
        slots[sources[sources >= 0]] = (sources >= 0).nonzero().squeeze(-1)
        return CallerOrder(slots.view(self.shape), complete=bool((slots >= 0).all()))


def arrange(
    ids: Tensor, attention_mask: Tensor | None, packed: PackedSeqParams | None, pad_token_id: int | None
) -> Arrangement:
    """Detect the convention of a batch and return its layout.

    Without `packed`, each row is a segment. With it, the offsets decide:

    - As many segments as rows: segment i contains the real tokens of row i, padded or truncated to the segment's length
      in the packed row. (One row that is as long as its segment is a flat row, see below, unless it begins with
      padding.)
    - Otherwise the concatenated rows are the packed row, and a segment begins at each row.

    Real tokens are those of `attention_mask` if it is given, else those counted by `packed`, else all but a trailing
    run of `pad_token_id` in each row. The last rule is a heuristic used as the last resort: a document may end with
    that token. It affects which tokens experts process and count, but not the results of tokens before the run.

    Args:
        ids: [B, S] on the host.
        attention_mask: [B, S], 1 for real tokens, of any dtype; they must be contiguous in each row. Or None.
        packed: the segments, or None.
        pad_token_id: None if every token is real unless specified otherwise.

    Raises:
        ValueError: masks and offsets that contradict each other or match none of these conventions.
    """
    keep = None if attention_mask is None else check_mask(attention_mask, ids)
    if packed is None:
        return _rows(without_trailing(ids, pad_token_id) if keep is None else keep)
    rows, tokens = ids.shape
    logical, physical = segment_lengths(packed)
    flat = rows == 1 and physical[0] == tokens and (keep is None or bool(keep[0, 0]))
    if len(physical) == rows and not flat:
        return _packed_rows((rows, tokens), keep, logical, physical)
    return _packed_row((rows, tokens), keep, logical, physical)


def _rows(keep: Tensor) -> Arrangement:
    """Each row is a segment; rows that begin with padding are rolled."""
    rows, tokens = keep.shape
    first, lengths = runs(keep)
    layout = SequenceLayout.rows(lengths.tolist(), tokens)
    rolled = (torch.arange(tokens) + first[:, None]) % tokens + torch.arange(rows)[:, None] * tokens
    return Arrangement(layout, (rows, tokens), sources=rolled.flatten() if first.any() else None)


def _packed_rows(shape: tuple[int, int], keep: Tensor | None, logical: Tensor, physical: Tensor) -> Arrangement:
    """The real tokens of each row are a segment of a packed row."""
    rows, tokens = shape
    if keep is None:
        keep = torch.arange(tokens) < logical[:, None]
        if int(logical.max()) > tokens:
            row = int(logical.argmax())
            raise ValueError(
                f"packed_seq_params has {int(logical[row])} tokens for row {row} of {tokens}; expected its real "
                f"tokens, or an attention_mask that tells them. {_SHARE}"
            )
    first, lengths = runs(keep)
    check_counts(lengths, logical, physical)
    layout = packed_layout(lengths, physical)
    segment = torch.arange(rows).repeat_interleave(physical)
    within = torch.arange(layout.total) - (physical.cumsum(0) - physical)[segment]
    sources = torch.where(within < lengths[segment], segment * tokens + first[segment] + within, -1)
    return Arrangement(layout, shape, sources, packed=True)


def _packed_row(shape: tuple[int, int], keep: Tensor | None, logical: Tensor, physical: Tensor) -> Arrangement:
    """The concatenated rows are the packed row."""
    rows, tokens = shape
    rest = rows * tokens - int(physical.sum())
    if rest > 0 and rows == 1 and keep is not None and not keep[0, -rest:].any():
        logical, physical = F.pad(logical, (0, 1)), F.pad(physical, (0, 1), value=rest)
    elif rest:
        raise ValueError(
            f"packed_seq_params has {len(physical)} segments of {int(physical.sum())} tokens in all, input_ids has "
            f"shape {list(shape)}: expected {rows * tokens} tokens, the whole batch"
            + (", or an attention_mask that says the rest is padding" if rows == 1 and rest > 0 else "")
            + (f", or one segment for each of {rows} rows" if rows > 1 else "")
            + (f". {_SHARE}" if rest < 0 else "")
        )
    ends = physical.cumsum(0)
    inside = [row for row in range(1, rows) if row * tokens not in ends]
    if inside:
        raise ValueError(
            f"packed_seq_params has {len(physical)} segments; row {inside[0]} of {tokens} tokens begins inside one. "
            f"Expected one segment for each of {rows} rows, or rows that begin segments"
        )
    lengths = logical
    if keep is not None:
        segment = torch.arange(len(physical)).repeat_interleave(physical)
        lengths = torch.zeros_like(physical).index_add(0, segment, keep.flatten().long())
        within = torch.arange(rows * tokens) - (ends - physical)[segment]
        wrong = (keep.flatten() != (within < lengths[segment])).nonzero()
        if len(wrong):
            raise ValueError(
                f"attention_mask has padding before real tokens in segment {int(segment[wrong[0]])} of the packed row; "
                "expected a segment's real tokens first and its padding after them"
            )
        check_counts(lengths, logical, physical)
    return Arrangement(packed_layout(lengths, physical), shape, packed=True)
