"""Batches in the formats of callers: padded rows, masks, packed-sequence parameters; and transformers' results."""

import types
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from tests.helpers.batches import Sample, make_samples, pictures
from tests.parity.conftest import Pair

ALONE = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = types.SimpleNamespace(tp=ALONE, cp=ALONE)
SECOND_OF_TWO = types.SimpleNamespace(tp=ALONE, cp=types.SimpleNamespace(size=lambda: 2, rank=lambda: 1))


def packed_params(logical: Sequence[int], padded: Sequence[int] | None = None) -> PackedSeqParams:
    offsets = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (logical, padded)]
    return PackedSeqParams("thd", offsets[0], offsets[0], offsets[1], offsets[1])


def offsets(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def unpack(packed: torch.Tensor, lengths: Sequence[int], padded: Sequence[int]) -> torch.Tensor:
    """Return the real tokens of a packed row [1, T, ...]."""
    starts = offsets(padded)
    return torch.cat([packed[0, a : a + n] for a, n in zip(starts, lengths, strict=False)])


def share_of(whole: torch.Tensor, padded: Sequence[int], cp: int, rank: int) -> torch.Tensor:
    """Return a rank's slice [..., T / cp] of a packed row [..., T], as RL frameworks divide it.

    It restates `token_index`, which is tested against it.
    """
    held = []
    for segment in whole.split(list(padded), -1):
        chunks = segment.split(segment.shape[-1] // (2 * cp), -1)
        held += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(held, -1)


@dataclass
class Rows:
    samples: list[Sample]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor

    @property
    def pixels(self) -> dict[str, torch.Tensor]:
        return pictures(self.samples)

    @property
    def lengths(self) -> list[int]:
        return [len(sample.ids) for sample in self.samples]

    def real(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.attention_mask.bool()]

    def types(self, config) -> torch.Tensor:
        return (self.input_ids == config.image_token_id).int() + 2 * (self.input_ids == config.video_token_id).int()


def make_rows(samples: list[Sample], left: list[int], extra: int = 5, pad: int = 7) -> Rows:
    """Return rows where row i has `left[i]` padding tokens before its sample."""
    length = max(len(s.ids) for s in samples) + extra
    shape = (len(samples), length)
    ids, mask, labels = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long), torch.zeros(shape).long()
    loss_mask = torch.zeros(shape)
    for row, (sample, start) in enumerate(zip(samples, left, strict=True)):
        where = slice(start, start + len(sample.ids))
        ids[row, where], mask[row, where], labels[row, where] = sample.ids, 1, sample.labels
        loss_mask[row, where] = sample.loss_mask
    return Rows(samples, ids, mask, labels, loss_mask)


def gaps(samples: list[Sample], extra: int = 5) -> list[int]:
    longest = max(len(s.ids) for s in samples) + extra
    return [longest - len(s.ids) for s in samples]


SIDES = ("right", "left", "mixed", "both")  # "mixed": left and right in turn


def rows_of(pair: Pair, side: str, content: str = "mixed") -> Rows:
    """Return rows with padding on a side, one of `SIDES`."""
    samples = make_samples(content, pair.config, seed=2)
    room = gaps(samples)
    left = {"right": [0] * len(room), "left": room, "both": [n // 2 for n in room]}
    return make_rows(samples, left.get(side) or [n * (i % 2) for i, n in enumerate(room)])


def reference_logits(pair: Pair, rows: Rows, **more) -> torch.Tensor:
    with torch.no_grad():
        return pair.reference(
            input_ids=rows.input_ids, attention_mask=rows.attention_mask, mm_token_type_ids=rows.types(pair.config),
            **rows.pixels, **more,
        ).logits  # fmt: skip


def no_grad(model: torch.nn.Module, *arguments, **named):
    with torch.no_grad():
        return model(*arguments, **named)
