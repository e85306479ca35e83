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

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from qwen3vl_bridge.batch import EncoderShard
from qwen3vl_bridge.batch.device_transfer import HostCopy

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
    heads = _headers(shards, len(features), tokens.size(-1))
    heads = (heads.pin_memory() if padded.device.type == "cuda" else heads).to(padded, non_blocking=True)
    return padded + F.pad(heads[:, None], (0, 0, 0, rows))


class Header(NamedTuple):
    """What a sender says of its shard, and what its receiver expects.

    Attributes:
        found: [P, 4 * digits], on its way to the host.
        expected: (tokens, mark, taps, width) of each of the P shards.
    """

    found: HostCopy
    expected: list[tuple[int, ...]]

    def check(self) -> None:
        """Wait for what was sent, and compare.

        Raises:
            ValueError: it is of other pictures.
        """
        found = [_numbers(digits) for digits in self.found.tolist()]
        if found != self.expected:
            raise ValueError(
                f"the vision ranks sent shards of (tokens, mark, features, width) {found}, expected {self.expected}: "
                "both sides must read the same batches in the same order with the same configuration"
            )


class Headers:
    """The headers of a step's payloads, compared without waiting for them: as they arrive, and all when it is over.

    By then the weights have changed, and nothing has been saved.
    """

    def __init__(self) -> None:
        self._waiting: deque[Header] = deque()

    def add(self, header: Header) -> None:
        """Compare it later, and now those that have arrived. Raises as `Header.check`."""
        while self._waiting and self._waiting[0].found.is_there():
            self._waiting.popleft().check()
        self._waiting.append(header)

    def check_all(self) -> None:
        """Compare all that are left. Raises as `Header.check`."""
        while self._waiting:
            self._waiting.popleft().check()


def unpack(payload: Tensor, shards: Sequence[EncoderShard], taps: int, hidden: int) -> tuple[Tensor, Tensor, Header]:
    """What was packed for this receiver.

    Args:
        payload: [P, 1 + R, (t + 1) * h], a shard of each of the senders.
        shards: what they should have sent.
        taps: t.
        hidden: h.

    Returns:
        Vision tokens [M, h] and DeepStack features [t, M, h]; and the header, which is to be compared.

    Raises:
        ValueError: a payload of another shape.
    """
    width, most = (taps + 1) * hidden, max(shard.tokens for shard in shards)
    if payload.ndim != 3 or len(payload) != len(shards) or payload.size(2) != width or payload.size(1) <= most:
        raise ValueError(
            f"the vision ranks sent {list(payload.shape)}, expected {[len(shards), f'{1 + most} or more', width]}: "
            f"{len(shards)} shards of up to {most} vision tokens, with {taps} DeepStack features of width {hidden} "
            "and their embedding each"
        )
    header = Header(HostCopy(payload[:, 0, : 4 * _DIGITS]), _said(shards, taps, hidden))
    rows = torch.cat([part[1 : 1 + shard.tokens] for part, shard in zip(payload, shards, strict=True)])
    each = rows.view(-1, taps + 1, hidden).transpose(0, 1)
    return each[-1], each[:-1], header


def _headers(shards: Sequence[EncoderShard], taps: int, hidden: int) -> Tensor:
    """[P, (t + 1) * h] the header rows of shards, on the host."""
    said = _said(shards, taps, hidden)
    digits = [[digit for number in one for digit in number.to_bytes(_DIGITS, "big")] for one in said]
    return F.pad(torch.tensor(digits), (0, (taps + 1) * hidden - 4 * _DIGITS))


def _said(shards: Sequence[EncoderShard], taps: int, hidden: int) -> list[tuple[int, ...]]:
    return [(shard.tokens, shard.mark, taps, hidden) for shard in shards]


def _numbers(digits: list[float]) -> tuple[int, ...]:
    """The numbers of a header row."""
    each = [digits[first : first + _DIGITS] for first in range(0, 4 * _DIGITS, _DIGITS)]
    return tuple(sum(int(digit) * _BASE**p for p, digit in enumerate(reversed(number))) for number in each)
