"""Keys, values and states of earlier tokens in generation, and attention of one new token of each row to them.

Prompts of all lengths are padded on the right. The cache stores the padding too, and new tokens after it, at the same
index for all rows; a mask excludes padding. Only the first token of a step is real. The others, which sequence
parallelism and FP8 need as padding, are not stored.

Under context parallelism a rank stores its tokens of the prompts, and all new tokens. Ranks take turns to attend to the
new tokens. Their results are combined as in Flash-Decoding: https://pytorch.org/blog/flash-decoding.

`key_value_memory_dict` of the context contains two tensors per layer number, in both of which the second dimension is
the rows, as megatron-core requires to exchange rows (`swap_key_value_dict`): keys and values [S, b, groups, d], or the
last inputs of the convolution [w - 1, b, channels] and the state [h, b, d, e] of linear attention. Layer numbers start
at 1; the entry 0 is the position difference that `is_stored` stores.

Legend of shapes: b rows, s tokens of a step, S tokens for which a rank has space, d and e head dimensions of keys and
values, w width of the convolution, h heads.
"""

from __future__ import annotations

import contextlib

from qwen3vl_bridge.core.batch import ModelInputs, VisionPlacement
from qwen3vl_bridge.core.collectives import max_in_group, sum_in_group
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.common.sdpa_kernels import allowed_kernels

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import BaseInferenceContext, StaticInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup


class PaddedContext(StaticInferenceContext):
    """megatron-core's static inference context, for prompts of different lengths that are padded on the right.

    The first step is the forward pass of the prompts. Call `begin_step` before each later step.

    Args:
        lengths: [b] number of tokens of each prompt without padding, on the host.
        columns: [s] indices of the tokens of a row that this context-parallel rank holds, on the host.
        max_new_tokens: maximum number of steps after the first one.
        group: the context-parallel ranks.
        device: the device of the model.
    """

    def __init__(
        self, lengths: Tensor, columns: Tensor, max_new_tokens: int, group: ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(len(lengths), len(columns) + max_new_tokens)
        self.lengths, self.columns, self.group = lengths.to(device), columns.to(device), group
        self.steps, self.prompt_slots = 0, len(columns)
        visible = columns < lengths[:, None]
        self.has_padding = not bool(visible.all())
        # [b, S] whether this rank's attention reads the token.
        self.visible = F.pad(visible, (0, max_new_tokens)).to(device)

    def begin_step(self) -> None:
        """Begin a step with one new token of each row."""
        self.sequence_len_offset = self.prompt_slots + self.steps
        self.visible[:, self.sequence_len_offset] = self.steps % self.group.size() == self.group.rank()
        self.steps += 1
        self.enable_decode_mode()


def has_tokens(context: BaseInferenceContext) -> bool:
    """Return whether the context contains tokens of earlier steps, so that the current step adds one token per row."""
    return context.sequence_len_offset > 0


def prompt_lengths(context: BaseInferenceContext, rows: int, tokens: int, device: torch.device) -> Tensor:
    """Return the lengths [b] of the prompts. If the context does not store lengths, every row has `tokens` tokens."""
    return context.lengths if isinstance(context, PaddedContext) else torch.full((rows,), tokens, device=device)


def step_inputs(input_ids: Tensor, position_ids: Tensor, sp_size: int = 1, sp_rank: int = 0) -> ModelInputs:
    """Return the inputs of one rank for new tokens [b, s] at positions [3, b, s], without waiting for the device.

    The first token of each row is real, the others are padding. Image placeholders that the model has generated are
    embedded like text.
    """
    rows, tokens = input_ids.shape
    is_padding = torch.arange(tokens, device=input_ids.device) > 0
    nowhere = VisionPlacement(*(torch.zeros(0, dtype=torch.int64, device=input_ids.device) for _ in range(2)))
    return ModelInputs(
        input_ids=input_ids,
        position_ids=position_ids,
        labels=None,
        loss_mask=None,
        padding_mask=is_padding.expand(rows, -1).chunk(sp_size, 1)[sp_rank],
        layout=SequenceLayout.padded_rows([1] * rows, tokens).to(input_ids.device),
        fuse=nowhere,
        deepstack=nowhere,
    )


def is_stored(
    context: BaseInferenceContext, inputs: ModelInputs, config: TransformerConfig, groups: ProcessGroupCollection
) -> bool:
    """Return True if the keys, values and states of a step are stored in a caller's context.

    All steps after the first are stored. The first step, with the prompts, is stored unless a row has padding or
    several documents, the context contains earlier rows of the batch, or sequence or context parallelism is on. If the
    first step is stored, also store the difference between each row's next position and its number of tokens. Images
    and videos cause this difference.
    """
    if has_tokens(context):
        return True
    layout = inputs.layout
    is_plain = len(layout.lengths) == layout.num_rows and layout.lengths == layout.padded_lengths
    if not is_plain or config.sequence_parallel or groups.cp.size() > 1 or context.batch_size_offset:
        context.key_value_memory_dict.pop(0, None)
        return False
    difference = inputs.position_ids.amax((0, 2)) + 1 - inputs.position_ids.size(2)
    context.key_value_memory_dict[0] = (difference[None],) * 2  # layers are numbered from 1
    return True


def next_positions(context: BaseInferenceContext) -> Tensor:
    """Return the positions [3, b, 1] of the next token of each row. All rows in the context have the same length."""
    difference, _ = context.key_value_memory_dict[0]
    return (context.sequence_len_offset + difference[0])[None, :, None].expand(3, -1, 1)


def attend_to_cache(
    context: BaseInferenceContext, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    """Store keys and values of one token per row. Return its attention [1, b, heads * e] to all tokens of the row.

    Args:
        context: the context with earlier keys and values.
        layer: number of the layer, from 1.
        query: [1, b, heads, d].
        key, value: [1, b, groups, d or e].
        scale: factor of the products of queries and keys; None for 1 / sqrt(d).
    """
    keys, values = context.key_value_memory_dict[layer]
    rows, groups = key.shape[1:3]
    slot = context.sequence_len_offset
    keys[slot, :rows], values[slot, :rows] = key[0], value[0]
    # The queries of a group are the "tokens" of the kernel, so that no key is copied for each of them.
    grouped = query[0].unflatten(1, (groups, -1))  # [b, groups, heads / groups, d]
    keys, values = (memory[: slot + 1, :rows].permute(1, 2, 0, 3) for memory in (keys, values))
    if isinstance(context, PaddedContext) and context.group.size() > 1:
        return _attend_over_ranks(context, grouped, keys, values, scale or query.size(-1) ** -0.5)
    has_padding = isinstance(context, PaddedContext) and context.has_padding
    mask = context.visible[:, None, None, : slot + 1] if has_padding else None
    with allowed_kernels() if query.is_cuda else contextlib.nullcontext():
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.flatten(1)[None]


def _attend_over_ranks(context: PaddedContext, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return attention [1, b, heads * e] of queries [b, groups, r, d] to the tokens of all context-parallel ranks."""
    visible, scores, sums = context.visible[:, None, : keys.size(2)], [], []
    for group in range(query.size(1)):  # one at a time, because products in float32 copy the keys
        found = (query[:, group].float() @ keys[:, group].float().mT) * scale  # [b, r, tokens]
        scores.append(found.masked_fill(~visible, float("-inf")))
    # Some rank has a token, so the maximum is finite.
    largest = max_in_group(torch.stack([one.amax(-1, keepdim=True) for one in scores], 1), context.group)
    for group, score in enumerate(scores):
        weights = (score - largest[:, group]).exp()
        sums.append(torch.cat((weights @ values[:, group].float(), weights.sum(-1, keepdim=True)), -1))
    total = sum_in_group(torch.stack(sums, 1), context.group)  # [b, groups, r, e + 1]
    return (total[..., :-1] / total[..., -1:]).to(query.dtype).flatten(1)[None]
