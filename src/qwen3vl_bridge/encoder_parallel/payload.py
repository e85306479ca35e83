"""What vision ranks send to language ranks: one tensor, packed and unpacked only here.

What lives here: the layout of the tensor. What may not: sending and receiving, which are megatron-core's; which images
and videos are in it (`batch/encoder_inputs.py`).

A payload is [P, 1 + R, (t + 1) * h]: for each of P shards a header row, then a row for each vision token, then rows of
zeros up to the longest shard. A token's row has its DeepStack features first, in the order of their layers, and its
final embedding last. megatron-core concatenates shards of several senders, and splits those of several receivers, along
the first dimension, so images may have any size.

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

# Digits in this base are exact in every floating-point dtype that models train in.
_BASE, _DIGITS = 256, 4


def pack(tokens: Tensor, features: Tensor, shards: Sequence[EncoderShard], rows: int) -> Tensor:
    """Pack encoded vision tokens into a payload.

    Args:
        tokens: [M, h] vision tokens, ordered by shard; more may follow, as of a blank image.
        features: [t, M, h] DeepStack features of the same tokens.
        shards: the shard of each receiver.
        rows: R, no less than any shard's tokens.

    Returns:
        [P, 1 + R, (t + 1) * h]; not a view, because the schedules could not free a view after sending it.
    """
    each = torch.cat((*features, tokens), -1)
    counts = [shard.tokens for shard in shards]
    parts = each[: sum(counts)].split(counts)
    padded = torch.stack([F.pad(part, (0, 0, 1, rows - len(part))) for part in parts])
    heads = _headers(shards, len(features), tokens.size(-1))
    heads = (heads.pin_memory() if padded.device.type == "cuda" else heads).to(padded, non_blocking=True)
    return padded + F.pad(heads[:, None], (0, 0, 0, rows))


class Header(NamedTuple):
    """The received header, and the expected one.

    Attributes:
        found: [P, 4 * digits], an asynchronous copy to the host.
        expected: (tokens, mark, taps, width) of each of the P shards.
    """

    found: HostCopy
    expected: list[tuple[int, ...]]

    def check(self) -> None:
        """Wait for the received header, and compare it.

        Raises:
            ValueError: the payload is of other images or videos.
        """
        found = [_numbers(digits) for digits in self.found.tolist()]
        if found != self.expected:
            raise ValueError(
                f"the vision ranks sent shards of (tokens, mark, features, width) {found}, expected {self.expected}: "
                "both sides must read the same batches in the same order with the same configuration"
            )


class Headers:
    """The headers of a step's payloads, compared without waiting for them: as they arrive, and all at the step's end.

    By then the weights have changed, but nothing has been saved.
    """

    def __init__(self) -> None:
        self._waiting: deque[Header] = deque()

    def add(self, header: Header) -> None:
        """Add a header, and compare those that have arrived. Raises as `Header.check`."""
        while self._waiting and self._waiting[0].found.is_there():
            self._waiting.popleft().check()
        self._waiting.append(header)

    def check_all(self) -> None:
        """Compare all remaining headers. Raises as `Header.check`."""
        while self._waiting:
            self._waiting.popleft().check()


def unpack(payload: Tensor, shards: Sequence[EncoderShard], taps: int, hidden: int) -> tuple[Tensor, Tensor, Header]:
    """Unpack the payload for this receiver.

    Args:
        payload: [P, 1 + R, (t + 1) * h], a shard of each of the senders.
        shards: the expected shards.
        taps: t.
        hidden: h.

    Returns:
        Vision tokens [M, h] and DeepStack features [t, M, h]; and the header, to be compared.

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
