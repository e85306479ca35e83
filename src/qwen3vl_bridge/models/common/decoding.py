"""Keys, values and states of earlier tokens in generation, and attention of one new token of each row to them.

megatron-core's static inference context stores keys and values of all rows at the same offset. Here rows may have
different lengths: a prompt is padded on the right, and new tokens overwrite its padding. Only the first token of a step
is real. The others, which sequence parallelism and FP8 need as padding, are not stored.

`key_value_memory_dict` of the context contains two tensors per layer number, in both of which the second dimension is
the rows, as megatron-core requires to exchange rows (`swap_key_value_dict`): keys and values [S, b, groups, d], or the
last inputs of the convolution [w - 1, b, channels] and the state [h, b, d, e] of linear attention. Number 0 has the
difference of `store_positions`.

Legend of shapes: b rows, s tokens of a step, S tokens for which the cache has space, d and e head dimensions of keys
and values, w width of the convolution, h heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import BaseInferenceContext, StaticInferenceContext
from torch import Tensor


class RowLengthContext(StaticInferenceContext):
    """megatron-core's static inference context, for rows of different lengths.

    Call `begin_step` before each step after the first one, which is the forward pass of all prompts.

    Args:
        lengths: numbers of tokens of the prompts, without padding.
        max_tokens: maximum number of tokens of a row, padding included.
        device: the device of the model.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int, device: torch.device) -> None:
        super().__init__(len(lengths), max_tokens)
        self.sequence_len_offset = 0
        self.longest = max(lengths)
        self.row_lengths = torch.tensor(lengths).to(device)  # [b] tokens of each row before this step, or the prompts'

    def begin_step(self) -> None:
        """Begin a step with one new token of each row."""
        if self.sequence_len_offset:
            self.longest += 1
            self.row_lengths = self.row_lengths + 1
        self.sequence_len_offset = self.longest
        self.enable_decode_mode()


def has_tokens(context: BaseInferenceContext | None) -> bool:
    """Return whether a step adds one token to a cache that contains earlier tokens."""
    return context is not None and context.sequence_len_offset > 0


def row_lengths(context: BaseInferenceContext, rows: int, tokens: int, device: torch.device) -> Tensor:
    """Return the number of tokens [b] of each row: in the first step of its prompt, in others before the new token.

    `tokens` is the number of tokens of a prompt if the context stores no lengths.
    """
    if isinstance(context, RowLengthContext):
        return context.row_lengths
    return torch.full((rows,), context.sequence_len_offset or tokens, device=device)


def step_batch(input_ids: Tensor, position_ids: Tensor) -> TokenBatch:
    """Return a batch of new tokens [b, s] at positions [3, b, s]. The first token of each row is real.

    Placeholders of images that the model has generated are tokens like others.
    """
    rows, tokens = input_ids.shape
    return TokenBatch(
        input_ids=input_ids,
        labels=torch.zeros_like(input_ids),
        loss_mask=torch.zeros(input_ids.shape, device=input_ids.device),
        position_ids=position_ids,
        vision_slot=torch.full_like(input_ids, -1).flatten(),
        layout=SequenceLayout.padded_rows([1] * rows, tokens).to(input_ids.device),
    )


def store_positions(context: BaseInferenceContext, position_ids: Tensor) -> None:
    """Store how many positions [3, b, s] the prompts have more or less than tokens, because of images and videos."""
    difference = position_ids.amax((0, 2)) + 1 - position_ids.size(2)
    context.key_value_memory_dict[0] = (difference[None],) * 2  # layers are numbered from 1


def next_positions(context: BaseInferenceContext) -> Tensor:
    """Return the positions [3, b, 1] of the tokens after those in a context whose rows have the same length."""
    difference, _ = context.key_value_memory_dict[0]
    return (context.sequence_len_offset + difference[0])[None, :, None].expand(3, -1, 1)


def clear_unused(context: BaseInferenceContext, layer: int, tokens: int) -> None:
    """Set keys and values after the first `tokens` of each row to 0: attention multiplies masked values by 0."""
    for memory in context.key_value_memory_dict[layer]:
        memory[tokens:].zero_()


def attend_to_cache(
    context: BaseInferenceContext, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    """Store keys and values of one token of each row, and return its attention [1, b, heads * e] to all its tokens.

    Args:
        context: the cache.
        layer: number of the layer.
        query: [1, b, heads, d].
        key, value: [1, b, groups, d or e].
        scale: factor of the products of queries and keys; None for 1 / sqrt(d).
    """
    keys, values = context.key_value_memory_dict[layer]
    rows, groups = key.shape[1:3]
    lengths = row_lengths(context, rows, 0, key.device)
    number = torch.arange(rows, device=key.device)
    keys[lengths, number], values[lengths, number] = key[0], value[0]
    used = context.sequence_len_offset + 1
    # The queries of a group are the "tokens" of the kernel, so that no key is copied for each of them.
    grouped = query[0].unflatten(1, (groups, -1))  # [b, groups, heads / groups, d]
    keys, values = (memory[:used, :rows].permute(1, 2, 0, 3) for memory in (keys, values))
    visible = torch.arange(used, device=key.device) <= lengths[:, None]
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible[:, None, None], scale=scale)
    return output.flatten(1)[None]
