"""The model's door: a batch in a caller's convention becomes `ModelInputs`.

What lives here: the conventions people call vision-language models with, each turned into a layout. What may not:
the model's own work. Batches of our own data path do not come through here.
"""

from __future__ import annotations

from qwen3vl_bridge.parallel import sequence_ranks
from qwen3vl_bridge.provider import Qwen3VLModelProvider
from qwen3vl_bridge.sequence import (
    ModelInputs,
    PackedBatch,
    SequenceLayout,
    make_vision_inputs,
    mrope_positions,
    vision_slots,
)

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


def as_model_inputs(
    config: Qwen3VLModelProvider,
    groups: ProcessGroupCollection,
    input_ids: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
) -> ModelInputs:
    """This rank's share of a whole batch as transformers or Megatron callers pass it.

    Lengths, positions and indices are worked out on the host, which waits for the device to read the token ids: use
    `PackedBatch` where that matters.

    Args:
        config: the provider.
        groups: process groups.
        input_ids: [B, S] rows, or one flat row [1, T] with `packed_seq_params`.
        position_ids: [3, B, S], or None to derive them.
        attention_mask: [B, S] 1 for real tokens, rows padded on the right; or None for rows without padding.
        labels: [B, S] already shifted, every one a token id: the model gives a loss for each, and the caller leaves
            out those that don't count. Or None for logits.
        packed_seq_params: the segments of a flat row.
        pixel_values, image_grid_thw: patches and grids of the images, as the processor gives them.
        pixel_values_videos, video_grid_thw: the same of videos.

    Raises:
        ValueError: shapes that don't belong together, padding on the left, pictures that don't fit the tokens.
    """
    if input_ids is None or input_ids.dim() != 2:
        found = None if input_ids is None else list(input_ids.shape)
        raise ValueError(f"input_ids has shape {found}, expected [rows, tokens]")
    if position_ids is not None and position_ids.shape != (3, *input_ids.shape):
        raise ValueError(
            f"position_ids has shape {list(position_ids.shape)}, expected {[3, *input_ids.shape]} (temporal, height "
            "and width position of each token), or None to derive them from the tokens and grids"
        )
    if labels is not None and (labels.shape != input_ids.shape or bool((labels < 0).any())):
        raise ValueError(
            f"labels has shape {list(labels.shape)} and smallest entry {int(labels.min())}, expected "
            f"{list(input_ids.shape)} token ids: mask losses of labels such as -100 instead"
        )
    device, ids = input_ids.device, input_ids.cpu()
    grids = [None if grid is None else grid.cpu() for grid in (image_grid_thw, video_grid_thw)]
    layout = _layout(ids, attention_mask, packed_seq_params)
    derived = mrope_positions(  # in any case: it checks that tokens and pictures fit
        ids,
        layout,
        *grids,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        spatial_merge_size=config.vision_config.spatial_merge_size,
    )
    image_tokens = 0 if grids[0] is None else int(grids[0].prod(-1).sum()) // config.vision_config.spatial_merge_size**2
    batch = PackedBatch(
        input_ids=input_ids,
        labels=torch.zeros_like(input_ids) if labels is None else labels,
        loss_mask=torch.ones(input_ids.shape, device=device),
        position_ids=derived if position_ids is None else position_ids,
        vision_slot=vision_slots(ids, config.image_token_id, config.video_token_id, image_tokens),
        layout=layout,
        vision=make_vision_inputs(
            pixel_values,
            grids[0],
            pixel_values_videos,
            grids[1],
            num_position_embeddings=config.vision_config.num_position_embeddings,
            spatial_merge_size=config.vision_config.spatial_merge_size,
        ),
    )
    inputs = batch.to(device).local(**sequence_ranks(config, groups))
    return inputs if labels is not None else inputs.without_labels()


def _layout(ids: Tensor, attention_mask: Tensor | None, packed: PackedSeqParams | None) -> SequenceLayout:
    if packed is not None:
        return _packed_layout(ids, attention_mask, packed)
    rows, tokens = ids.shape
    if attention_mask is None:
        return SequenceLayout.rows([tokens] * rows, tokens)
    if attention_mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected {list(ids.shape)}: 1 for real tokens"
        )
    keep = attention_mask.cpu().bool()
    lengths = keep.sum(-1)
    if not torch.equal(keep, torch.arange(tokens) < lengths[:, None]):
        raise ValueError("attention_mask has padding before real tokens; rows must be padded on the right")
    return SequenceLayout.rows(lengths.tolist(), tokens)


def _packed_layout(ids: Tensor, attention_mask: Tensor | None, packed: PackedSeqParams) -> SequenceLayout:
    if packed.qkv_format != "thd" or ids.shape[0] != 1:
        raise ValueError(
            f"packed_seq_params has qkv_format {packed.qkv_format!r} and input_ids shape {list(ids.shape)}, expected "
            "'thd' and one flat row [1, tokens]"
        )
    if attention_mask is not None:
        raise ValueError("attention_mask and packed_seq_params are both given; a packed row needs only the latter")
    logical = packed.cu_seqlens_q.cpu().int()
    padded = logical if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded.cpu().int()
    if int(padded[-1]) != ids.shape[1]:
        raise ValueError(f"packed_seq_params describes {int(padded[-1])} tokens, input_ids has {ids.shape[1]}")
    return SequenceLayout(
        cu_seqlens=logical,
        cu_seqlens_padded=padded,
        num_rows=1,
        lengths=tuple(logical.diff().tolist()),
        padded_lengths=tuple(padded.diff().tolist()),
    )
