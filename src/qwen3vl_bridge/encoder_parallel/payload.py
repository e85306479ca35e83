"""What ranks of the vision tower send to language ranks: one tensor, packed and unpacked here and nowhere else.

What lives here: the order of things in the tensor. What may not: sending and receiving, which are megatron-core's;
which pictures are in it (`batch/encoder_shards.py`).

A payload is [P, 1 + R, (t + 1) * h]: for each of P shards a header row, then a row for each vision
token, then rows of zeros up to the longest shard. A token's row has its DeepStack features first, in the order of
their layers, and its final embedding last. megatron-core joins shards of several senders, and parts those of several
receivers, along the first dimension, so pictures may have any size.

Legend: t DeepStack features of a token, h the text model's hidden size, M vision tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwen3vl_bridge.batch import EncoderShard

import torch
import torch.nn.functional as F
from torch import Tensor

# A number's digits in this base are whole in every floating-point type that models train in.
_BASE, _DIGITS = 256, 4


def pack(tokens: Tensor, features: Tensor, shards: Sequence[EncoderShard], rows: int) -> Tensor:
    """What the tower has encoded, as it is sent.

    Args:
        tokens: [M, h] vision tokens, one shard's after the other's; more may follow, as of a blank picture.
        features: [t, M, h] the same of DeepStack.
        shards: what each receiver is sent.
        rows: R, no less than any shard's tokens.

    Returns:
        [P, 1 + R, (t + 1) * h]; no view, or the schedules could not free it once it is sent.
    """
    each = torch.cat((*features, tokens), -1)
    counts = [shard.tokens for shard in shards]
    parts = each[: sum(counts)].split(counts)
    padded = torch.stack([F.pad(part, (0, 0, 1, rows - len(part))) for part in parts])
    heads = _headers(shards, len(features), tokens.size(-1)).to(padded, non_blocking=True)
    return padded + F.pad(heads[:, None], (0, 0, 0, rows))


def unpack(payload: Tensor, shards: Sequence[EncoderShard], taps: int, hidden: int) -> tuple[Tensor, Tensor]:
    """What was packed for this receiver, compared with what it expects.

    Args:
        payload: [P, 1 + R, (t + 1) * h], a shard of each of the senders.
        shards: what they should have sent.
        taps: t.
        hidden: h.

    Returns:
        Vision tokens [M, h] and DeepStack features [t, M, h].

    Raises:
        ValueError: a payload of another shape, or of other pictures.
    """
    width, most = (taps + 1) * hidden, max(shard.tokens for shard in shards)
    if payload.ndim != 3 or len(payload) != len(shards) or payload.size(2) != width or payload.size(1) <= most:
        raise ValueError(
            f"the vision ranks sent {list(payload.shape)}, expected {[len(shards), f'{1 + most} or more', width]}: "
            f"{len(shards)} shards of up to {most} vision tokens, with {taps} DeepStack features of width {hidden} "
            "and their embedding each"
        )
    expected = _headers(shards, taps, hidden).to(payload, non_blocking=True)
    if not torch.equal(payload[:, 0].detach(), expected):
        found = [_read(head) for head in payload[:, 0].detach()]
        raise ValueError(
            f"the vision ranks sent shards of (tokens, mark, features, width) {found}, expected "
            f"{[(shard.tokens, shard.mark, taps, hidden) for shard in shards]}: both sides have to read the same "
            "batches in the same order, with the same configuration"
        )
    rows = torch.cat([part[1 : 1 + shard.tokens] for part, shard in zip(payload, shards, strict=True)])
    each = rows.view(-1, taps + 1, hidden).transpose(0, 1)
    return each[-1], each[:-1]


def _headers(shards: Sequence[EncoderShard], taps: int, hidden: int) -> Tensor:
    """[P, (t + 1) * h] the header rows of shards, on the host."""
    said = [(shard.tokens, shard.mark, taps, hidden) for shard in shards]
    digits = [[digit for number in one for digit in number.to_bytes(_DIGITS, "big")] for one in said]
    return F.pad(torch.tensor(digits), (0, (taps + 1) * hidden - 4 * _DIGITS))


def _read(head: Tensor) -> tuple[int, ...]:
    """The numbers of such a row, for a message."""
    digits = head[: 4 * _DIGITS].double().cpu().view(4, _DIGITS)
    return tuple(int(digits[i] @ torch.tensor([_BASE**p for p in reversed(range(_DIGITS))]).double()) for i in range(4))
