"""Hash the n-grams that end at each token of a batch to rows of n-gram tables.

Hashes depend only on token ids and segments. They are computed on the host for the full batch, before it is divided
over ranks.

Legend: B rows, S tokens per row, T = B * S, L layers with n-gram embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwen3vl_bridge.core.layout import SequenceLayout, segment_offsets

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class NgramHash:
    """The hash heads of one layer with n-gram embeddings.

    The hash of an n-gram is the XOR of its tokens, each multiplied by the multiplier of its position, in int64 that
    wraps around. Each head has its own n-gram table; the row of the n-gram in that table is the hash modulo the head's
    size. There are heads for n-grams of 2, 3, ..., `ngram_size` tokens, in this order.

    Source: transformers 5.20.2, Qwen4ExpTextNGramEmbedding.

    Raises:
        ValueError: the numbers of multipliers or head sizes do not match the sizes of n-grams.
    """

    multipliers: tuple[int, ...]  # for the token itself, the token before it, ...
    head_sizes: tuple[int, ...]
    ngram_size: int
    heads_per_ngram: int
    eos_token_id: int  # also stands for the tokens before the start of a text

    def __post_init__(self) -> None:
        heads = (self.ngram_size - 1) * self.heads_per_ngram
        if (len(self.multipliers), len(self.head_sizes)) != (self.ngram_size, heads):
            raise ValueError(
                f"found {len(self.multipliers)} multipliers and {len(self.head_sizes)} head sizes, expected "
                f"{self.ngram_size} and {heads} for n-grams of 2 to {self.ngram_size} tokens with "
                f"{self.heads_per_ngram} heads each"
            )


def ngram_ids(input_ids: Tensor, layout: SequenceLayout, hashes: Sequence[NgramHash]) -> Tensor:
    """Return the ids [L, T, heads] int64 of the n-grams that end at each token of the flat batch.

    An id is a row of the head's own n-gram table. A text starts at the first token of its segment, and after an eos
    token, which belongs to the text before it. An n-gram does not cross the start of a text: eos tokens take the place
    of the tokens before it. Padding is hashed like eos.

    Args:
        input_ids: [B, S].
        layout: the segments of the batch.
        hashes: the hash heads of each layer; all layers have the same number of heads.
    """
    tokens, padding = input_ids.flatten().long(), layout.padding_mask()
    offsets = segment_offsets(layout.cu_seqlens_padded.diff(), layout.total)
    return torch.stack([_hash_ngrams(tokens.masked_fill(padding, h.eos_token_id), offsets, h) for h in hashes])


def _hash_ngrams(tokens: Tensor, offsets: Tensor, ngram_hash: NgramHash) -> Tensor:
    """Return the ids [T, heads] of the n-grams that end at each of `tokens` [T], for one layer.

    `offsets` [T] is the index of each token in its segment.
    """
    eos, index = ngram_hash.eos_token_id, torch.arange(len(tokens), device=tokens.device)
    after_last_eos = torch.where(tokens == eos, index + 1, 0).cummax(0).values
    # An eos does not start a text itself: for each token, eos tokens before it count.
    offsets = torch.minimum(offsets, index - pad(after_last_eos[:-1], (1, 0)))  # in the text
    mixed, ids = tokens * ngram_hash.multipliers[0], []
    for back, multiplier in enumerate(ngram_hash.multipliers[1:], start=1):
        earlier = torch.where(offsets >= back, tokens.roll(back), eos)
        mixed = mixed ^ earlier * multiplier
        heads = slice((back - 1) * ngram_hash.heads_per_ngram, back * ngram_hash.heads_per_ngram)
        ids.append(mixed[:, None] % torch.tensor(ngram_hash.head_sizes[heads], device=tokens.device))
    return torch.cat(ids, -1)
