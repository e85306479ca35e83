"""What a caller's mask and packed-sequence parameters say, read and checked on the host.

What lives here: one thing at a time, as lengths and booleans. What may not: which convention they make together
(`conventions.py`).
Legend: B rows, S tokens a row, n segments.
"""

from __future__ import annotations

from qwen3vl_bridge.sequence import SequenceLayout

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


def check_mask(mask: Tensor, ids: Tensor) -> Tensor:
    """[B, S] bool on the host."""
    if mask.shape != ids.shape:
        more = ". Causal attention and padding need no larger mask" if mask.dim() > 2 else ""
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, expected {list(ids.shape)}: 1 for real tokens, 0 for "
            f"padding{more}"
        )
    mask = mask.cpu()
    keep = mask.bool()
    if not torch.equal(keep.to(mask.dtype), mask):
        wrong = mask[keep.to(mask.dtype) != mask][0].item()
        raise ValueError(f"attention_mask has an entry {wrong}, expected 1 for real tokens and 0 for padding")
    return keep


def runs(keep: Tensor) -> tuple[Tensor, Tensor]:
    """[B] first real token and [B] their number, of rows whose real tokens are one run."""
    first, lengths = keep.int().argmax(-1), keep.sum(-1)
    place = torch.arange(keep.shape[1])
    run = (place >= first[:, None]) & (place < (first + lengths)[:, None])
    holes = (keep != run).any(-1).nonzero()
    if len(holes):
        raise ValueError(
            f"attention_mask has padding between real tokens in row {int(holes[0])}; expected padding on the left or "
            "right of a row. Several documents in a row need packed_seq_params"
        )
    return first, lengths


def without_trailing(ids: Tensor, pad_token_id: int | None) -> Tensor:
    """[B, S] bool, False for a run of `pad_token_id` at the end of a row."""
    real = torch.ones_like(ids, dtype=torch.bool) if pad_token_id is None else ids != pad_token_id
    return real.flip(-1).cummax(-1).values.flip(-1)


def segment_lengths(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """Logical and physical lengths [n], int64 on the host."""
    given = {name: getattr(packed, f"cu_seqlens_{name}") for name in ("q", "kv", "q_padded", "kv_padded")}
    offsets = {name: tensor.cpu().long() for name, tensor in given.items() if tensor is not None}
    logical = offsets.get("q")
    if packed.qkv_format != "thd" or logical is None:
        raise ValueError(
            f"packed_seq_params has qkv_format {packed.qkv_format!r} and cu_seqlens_q {given['q']}, expected 'thd' "
            "and the offsets of the segments"
        )
    if packed.local_cp_size is not None:
        raise ValueError(f"packed_seq_params has local_cp_size {packed.local_cp_size}, expected None")
    physical = offsets.get("q_padded", logical)
    for name, tensor in offsets.items():
        if tensor.dim() != 1 or len(tensor) < 2 or tensor[0] != 0 or (tensor.diff() < 0).any():
            raise ValueError(f"cu_seqlens_{name} is {tensor.tolist()}, expected offsets that ascend from 0")
        ours = physical if "padded" in name else logical
        if not torch.equal(tensor, ours):
            raise ValueError(f"cu_seqlens_{name} is {tensor.tolist()}, expected {ours.tolist()} as for queries")
    if logical.shape != physical.shape:
        raise ValueError(f"cu_seqlens_q has {len(logical)} entries, cu_seqlens_q_padded {len(physical)}")
    return logical.diff(), physical.diff()


def check_counts(lengths: Tensor, logical: Tensor, physical: Tensor) -> None:
    """Refuses a mask whose real tokens are not as many as the offsets have.

    Offsets may have counted a segment's padding in: RL frameworks round lengths up and keep only those.
    """
    agree = (lengths == logical) | ((logical == physical) & (lengths <= logical))
    wrong = (~agree).nonzero()
    if len(wrong):
        segment = int(wrong[0])
        raise ValueError(
            f"segment {segment}: attention_mask has {int(lengths[segment])} real tokens, packed_seq_params "
            f"{int(logical[segment])} in a length of {int(physical[segment])}"
        )


def packed_layout(lengths: Tensor, physical: Tensor) -> SequenceLayout:
    """One packed row. Segments without a token are left out: tables of a fixed size repeat their last offset."""
    if (lengths > physical).any() or not physical.any():
        raise ValueError(
            f"packed_seq_params has segments of {lengths.tolist()} tokens in lengths of {physical.tolist()}, expected "
            "no more tokens than their lengths, and at least one token"
        )
    lengths, physical = lengths[physical > 0], physical[physical > 0]
    offsets = (F.pad(values.cumsum(0), (1, 0)).int() for values in (lengths, physical))
    return SequenceLayout(*offsets, 1, tuple(lengths.tolist()), tuple(physical.tolist()))
