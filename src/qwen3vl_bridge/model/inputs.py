"""The model's door: a batch in a caller's convention becomes `ModelInputs`.

What lives here: what people call vision-language models with, turned into a batch of ours. What may not: where real
tokens lie (`conventions.py`), rows that context-parallel ranks have shared out already (`shares.py`), checks of single
arguments (`arguments.py`), the model's own work. Batches of our own data path do not come through here.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.model.arguments import check_others, check_pixels, check_types
from qwen3vl_bridge.model.conventions import Arrangement, CallerOrder, arrange
from qwen3vl_bridge.model.shares import with_whole_row
from qwen3vl_bridge.parallel import sequence_ranks
from qwen3vl_bridge.provider import Qwen3VLModelProvider
from qwen3vl_bridge.sequence import ModelInputs, PackedBatch, make_vision_inputs, mrope_positions, vision_slots

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


def as_model_inputs(
    config: Qwen3VLModelProvider,
    groups: ProcessGroupCollection,
    input_ids: Tensor | None,
    *,
    labels: Tensor | None = None,
    **arguments: Any,
) -> tuple[ModelInputs, CallerOrder | None]:
    """This rank's share of a batch as transformers or Megatron callers pass it: whole, or that share of a flat row.

    Lengths, positions and indices are worked out on the host, which waits for the device to read the token ids: use
    `PackedBatch` where that matters. Shares are put together from all context-parallel ranks first, see
    `shares.with_whole_row`, and outputs are of the share.

    Args:
        config: the provider.
        groups: process groups.
        input_ids: as for `as_packed_batch`, or a share [1, T / cp] of a flat row.
        labels: [B, S] already shifted, every one a token id: the model gives a loss for each, and the caller leaves
            out those that don't count. With `packed_seq_params` also [1, T], in the packed row's order, or [1, T / cp]
            with a share. Or None for logits.
        arguments: the rest as for `as_packed_batch`; the caller multiplies the losses by `loss_mask`.

    Returns:
        The inputs, and how outputs come back to the caller's order; None where they lie in it.

    Raises:
        ValueError: shapes that don't belong together, masks with holes, pictures that don't fit the tokens.
        TypeError: an unknown argument.
    """
    whole = with_whole_row(dict(arguments, input_ids=input_ids, labels=labels), groups.cp)
    batch, arranged = as_packed_batch(config, **whole)
    ranks = sequence_ranks(config, groups)
    order = _way_back(arranged, whole["labels"], ranks["cp_size"])
    assert input_ids is not None
    inputs = batch.to(input_ids.device).local(**ranks)
    return inputs if labels is not None else inputs.without_labels(), order


def as_packed_batch(
    config: Qwen3VLModelProvider,
    input_ids: Tensor | None,
    *,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    mm_token_type_ids: Tensor | None = None,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    **others: Any,
) -> tuple[PackedBatch, Arrangement]:
    """A whole batch in a caller's convention as one of ours.

    Args:
        config: the provider.
        input_ids: [B, S] rows, or one flat row [1, T] with `packed_seq_params`.
        labels: [B, S] already shifted; with `packed_seq_params` also [1, T]. Or None: all zero then.
        loss_mask: as labels, 0 where a label may be anything, such as -100. None: every label counts.
        position_ids: [3, B, S] temporal, height and width position of each token; [4, B, S], where transformers has
            text positions first; [B, S] for text alone; or None to derive them.
        attention_mask: [B, S], 1 for real tokens, on the left, on the right or in the middle of each row. None: see
            `conventions.arrange`, as for all that rows and packing mean together.
        packed_seq_params: the segments of a packed row.
        mm_token_type_ids: [B, S], 1 for image and 2 for video tokens, as the processor gives them; checked only.
        pixel_values, image_grid_thw: patches and grids of the images, as the processor gives them.
        pixel_values_videos, video_grid_thw: the same of videos.
        others: what other models take, see `arguments.REFUSED`; None alone is accepted.

    Returns:
        The batch, and where the caller's tokens lie in it. What was worked out is on the host, pixels and labels are
        where they were.

    Raises:
        ValueError: shapes that don't belong together, masks with holes, pictures that don't fit the tokens.
        TypeError: an unknown argument.
    """
    check_others(others)
    if labels is None and loss_mask is not None:
        raise ValueError("loss_mask is given without labels, expected both or neither")
    if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
        found = None if input_ids is None else f"{list(input_ids.shape)} {input_ids.dtype}"
        raise ValueError(f"input_ids has shape {found}, expected [rows, tokens] of integers")
    ids = input_ids.cpu()
    pictures = [pixel_values, _host(image_grid_thw), pixel_values_videos, _host(video_grid_thw)]
    check_pixels(config, pixel_values=pixel_values, pixel_values_videos=pixel_values_videos)
    arranged = arrange(ids, attention_mask, packed_seq_params, config.pad_token_id)
    check_types(config, ids, mm_token_type_ids, arranged)
    # The padding that a layout adds is told by its mask, so any id serves.
    ids = arranged.take(ids, fill=config.pad_token_id or 0)
    has_masks = attention_mask is not None or packed_seq_params is not None
    axes = None if position_ids is None else _three_axes(config, position_ids, ids, arranged, has_masks)
    batch = PackedBatch(
        input_ids=ids,
        labels=_arranged_labels(labels, loss_mask, ids, arranged, config.vocab_size),
        loss_mask=_arranged_mask(loss_mask, ids, arranged),
        position_ids=_positions(config, ids, arranged, pictures[1], pictures[3], axes),
        vision_slot=_slots(config, ids, pictures[1]),
        layout=arranged.layout,
        vision=make_vision_inputs(
            *pictures,
            num_position_embeddings=config.vision_config.num_position_embeddings,
            spatial_merge_size=config.vision_config.spatial_merge_size,
        ),
    )
    return batch, arranged


def _arranged_labels(
    labels: Tensor | None, loss_mask: Tensor | None, ids: Tensor, arranged: Arrangement, vocab_size: int
) -> Tensor:
    """[b, s] labels of arranged tokens, 0 where they don't count or there are none."""
    if labels is None:
        return torch.zeros_like(ids)
    if loss_mask is not None and loss_mask.shape != labels.shape:
        raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {list(labels.shape)} as labels")
    counting = labels if loss_mask is None else labels.masked_fill(loss_mask == 0, 0)
    return arranged.take_labels(counting, vocab_size)


def _arranged_mask(loss_mask: Tensor | None, ids: Tensor, arranged: Arrangement) -> Tensor:
    """[b, s] float32 loss mask of arranged tokens; its shape is that of labels, which are checked."""
    if loss_mask is None:
        return torch.ones(ids.shape)
    return (arranged.take(loss_mask) if loss_mask.shape == arranged.shape else loss_mask).float()


def _way_back(arranged: Arrangement, labels: Tensor | None, cp_size: int) -> CallerOrder | None:
    order = arranged.way_back(labels)
    if order is not None and cp_size > 1:
        raise ValueError(
            f"context parallelism over {cp_size} ranks gives each its share of the outputs, which cannot come back in "
            "the caller's order: expected rows padded on the right, or labels in the packed row's order, [1, tokens]"
        )
    return order


def _positions(
    config: Qwen3VLModelProvider,
    ids: Tensor,
    arranged: Arrangement,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    given: Tensor | None,
) -> Tensor:
    """[3, b, s] positions of arranged tokens, 0 for padding; `given` [3, B, S] if it is."""
    derived = mrope_positions(  # in any case: it checks that tokens and pictures fit
        ids,
        arranged.layout,
        image_grid_thw,
        video_grid_thw,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        spatial_merge_size=config.vision_config.spatial_merge_size,
    )
    if given is None:
        return derived
    return arranged.take(given.cpu()).long().masked_fill(arranged.layout.padding_mask().view(ids.shape), 0)


def _slots(config: Qwen3VLModelProvider, ids: Tensor, image_grid_thw: Tensor | None) -> Tensor:
    patches = 0 if image_grid_thw is None else int(image_grid_thw.prod(-1).sum())
    tokens = patches // config.vision_config.spatial_merge_size**2
    return vision_slots(ids, config.image_token_id, config.video_token_id, tokens)


def _three_axes(
    config: Qwen3VLModelProvider, position_ids: Tensor, ids: Tensor, arranged: Arrangement, has_masks: bool
) -> Tensor:
    """[3, B, S] of what was given; `ids` are arranged.

    transformers takes [B, S] for all three axes and [4, B, S] with text positions first, and reads documents of a
    packed row from text positions that don't count up, unless a mask is given.
    """
    rows = list(arranged.shape)
    if position_ids.is_floating_point() or list(position_ids.shape) not in (rows, [3, *rows], [4, *rows]):
        raise ValueError(
            f"position_ids has shape {list(position_ids.shape)} {position_ids.dtype}, expected {[3, *rows]} integers "
            f"(temporal, height and width position of each token), {[4, *rows]} (text positions first), {rows} for "
            "text alone, or None to derive them from the tokens and grids"
        )
    if position_ids.dim() == 3 and len(position_ids) == 3:
        return position_ids
    text = position_ids if position_ids.dim() == 2 else position_ids[0]
    real = ~arranged.layout.padding_mask().view(ids.shape)
    steps = arranged.take(text.cpu()).diff() - 1
    if not has_masks and (steps * real[:, 1:]).any():
        raise ValueError(
            "position_ids has text positions that don't count up by one in a row: where it packs several documents, "
            "give packed_seq_params; where it is padded, an attention_mask"
        )
    if position_ids.dim() == 3:
        return position_ids[1:]
    if ((ids == config.image_token_id) | (ids == config.video_token_id)).any():
        # transformers would give every token of a picture positions as if it were text, Megatron-Bridge ignores
        # positions of this shape. Both are silent, and only one can be what is meant.
        raise ValueError(
            f"position_ids has shape {rows} in a batch with pictures, whose tokens have three positions: expected "
            f"{[3, *rows]}, or None to derive them"
        )
    return position_ids.expand(3, *rows)


def _host(grid: Tensor | None) -> Tensor | None:
    return None if grid is None else grid.cpu()
