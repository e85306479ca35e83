"""The model's input interface: converts a batch in a caller's convention to `ModelInputs`.

What lives here: the arguments that callers pass to vision-language models, converted to our batch. What may not: the
positions of real tokens (`padding_and_packing.py`, `masks.py`), rows already split over context-parallel ranks
(`precut_rows.py`), labels (`labels.py`), positions (`position_ids.py`), checks of single arguments (`arguments.py`),
the model's own computation. Batches of our own data path do not pass through this module.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

from qwen3vl_bridge.batch import ModelInputs, PackedBatch, make_vision_inputs, mrope_positions, vision_slots
from qwen3vl_bridge.models.common.inputs.agreement import check_agreement
from qwen3vl_bridge.models.common.inputs.arguments import check_others, check_pixels, checked_ids
from qwen3vl_bridge.models.common.inputs.labels import (
    are_cut,
    with_joined_labels,
    with_labels,
    with_own_labels,
    without_ignored,
)
from qwen3vl_bridge.models.common.inputs.local_ranks import sequence_ranks
from qwen3vl_bridge.models.common.inputs.masks import real_tokens
from qwen3vl_bridge.models.common.inputs.outputs import Answer, CallerOrder
from qwen3vl_bridge.models.common.inputs.padding_and_packing import Arrangement, arrange
from qwen3vl_bridge.models.common.inputs.position_ids import given_positions
from qwen3vl_bridge.models.common.inputs.precut_rows import with_whole_row
from qwen3vl_bridge.models.common.inputs.reading import arguments_on_host
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

logger = logging.getLogger(__name__)


def as_model_inputs(
    config: VisionLanguageProvider,
    groups: ProcessGroupCollection,
    input_ids: Tensor | None,
    *,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    encodes: bool = True,
    **arguments: Any,
) -> tuple[ModelInputs, Answer | None]:
    """This rank's part of a batch given in the convention of transformers or Megatron: whole, or a slice of a flat row.

    Lengths, positions and indices are computed on the host, which synchronizes with the device once, to read all
    arguments except pixels; use `PackedBatch` to avoid this. Slices are first gathered from all context-parallel ranks,
    see `precut_rows.with_whole_row`, and outputs then cover the slice.

    Args:
        config: the provider.
        groups: process groups.
        input_ids: as for `as_packed_batch`, or a slice [1, T / cp] of a flat row.
        labels: [B, S], already shifted, token ids where they are trained on, see `labels`: the model returns a loss for
            each, and the caller masks them. With `packed_seq_params` also [1, T], in the order of the packed row. Or
            only this context-parallel rank's tokens, [B, S / cp] or [1, T / cp]. Or None for logits.
        loss_mask: same shape as labels, 0 where a label is arbitrary; the caller multiplies losses by it. Under context
            parallelism, this rank's slice of a whole mask is returned together with the outputs. Without labels it has
            no effect.
        encodes: whether this pipeline stage encodes images and videos; other stages need only their grids.
        arguments: all others as for `as_packed_batch`.

    Returns:
        The inputs, the positions of the caller's input_ids, and the conversion of outputs; None if outputs already have
        the form that the caller expects.

    Raises:
        ValueError: inconsistent shapes, masks with holes, images or videos that do not match the tokens.
        TypeError: an unknown argument.
    """
    given = dict(arguments, input_ids=input_ids, labels=labels, loss_mask=loss_mask)
    whole = with_whole_row(given, groups.cp)
    labels, mask = whole.pop("labels"), whole.pop("loss_mask")
    batch, arranged = _unlabelled(config, encodes=encodes, **whole)
    assert input_ids is not None
    ranks, vocabulary, device = sequence_ranks(config, groups), config.vocab_size, input_ids.device
    if not encodes:
        ranks |= dict(vision_work=None, encoders=None)
    ranks["predicts"] = predicts = _predicts(config, groups, labels, mask, device)
    cut = are_cut(arranged, labels, mask, ranks["cp_size"])
    # Labels split from a packed row are in the layout's order. Those of rows that were rolled are not.
    order = None if cut and arranged.packed else _caller_order(arranged, labels, ranks["cp_size"])
    if cut and not predicts:
        return _answered(with_own_labels(batch.local(**ranks), labels, mask, vocabulary), None, None, device)
    if cut:
        batch = with_joined_labels(batch, labels, mask, vocabulary, groups.cp, device)
    else:
        batch = with_labels(batch, arranged, labels, mask, vocabulary)
    inputs = batch.local(**ranks)
    comes_back = ranks["cp_size"] > 1 and loss_mask is not None and loss_mask.shape != inputs.input_ids.shape
    own_mask = inputs.loss_mask if comes_back else None
    return _answered(inputs if labels is not None else inputs.without_labels(), order, own_mask, device)


def _predicts(
    config: VisionLanguageProvider,
    groups: ProcessGroupCollection,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    device: torch.device,
) -> bool:
    """Whether multi-token prediction is trained by this call.

    It may need labels of other context-parallel ranks, so all ranks have to pass the same kind of labels.
    """
    if not (config.trains_mtp and torch.is_grad_enabled()):
        return False
    check_agreement(dict(labels=labels, loss_mask=loss_mask), None, groups.cp, device)
    return labels is not None


def _answered(
    inputs: ModelInputs, order: CallerOrder | None, loss_mask: Tensor | None, device: torch.device
) -> tuple[ModelInputs, Answer | None]:
    inputs, unlabelled = without_ignored(inputs)
    nothing = order is None and unlabelled is None and loss_mask is None
    answer = None if nothing else Answer(order, unlabelled, loss_mask).sent_to(device)
    return inputs.sent_to(device), answer


def as_packed_batch(
    config: VisionLanguageProvider,
    input_ids: Tensor | None,
    *,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[PackedBatch, Arrangement]:
    """Convert a whole batch in a caller's convention to a `PackedBatch`.

    Args:
        config: the provider.
        input_ids: [B, S] rows, or one flat row [1, T] with `packed_seq_params`.
        labels: [B, S], already shifted; with `packed_seq_params` also [1, T]. None: all zero.
        loss_mask: same shape as labels, 0 where a label is arbitrary. None: every label except -100 is trained on.
        position_ids: [3, B, S] temporal, height and width position of each token; [4, B, S], where transformers puts
            text positions first; [B, S] text positions, see `position_ids.given_positions`; or None to derive them.
        attention_mask: [B, S], 1 for real tokens, with padding on the left or the right of each row, or on both sides;
            or a square mask, see `masks.real_tokens`. None, and combinations with packing: see
            `padding_and_packing.arrange`.
        padding_mask: [B, S], 1 for padding: the inverse, under megatron-core's name.
        packed_seq_params: the segments of a packed row.
        pixel_values, image_grid_thw: patches and grids of the images, as returned by the processor.
        pixel_values_videos, video_grid_thw: the same for videos.
        mm_token_type_ids: the processor's token types; not used, so any shape is accepted.
        others: arguments of other models, see `arguments.REFUSED`; only None is accepted.

    Returns:
        The batch on the host, except for pixels, which stay on their device; and the positions of the caller's tokens
        in it.

    Raises:
        ValueError: inconsistent shapes, masks with holes, images or videos that do not match the tokens.
        TypeError: an unknown argument.
    """
    given = arguments_on_host(dict(arguments, input_ids=input_ids, labels=labels, loss_mask=loss_mask))
    labels, loss_mask = given.pop("labels"), given.pop("loss_mask")
    batch, arranged = _unlabelled(config, encodes=True, **given)
    batch = with_labels(batch, arranged, labels, loss_mask, config.vocab_size)
    return replace(batch, labels=batch.labels.clamp(min=0)), arranged


def _unlabelled(
    config: VisionLanguageProvider,
    input_ids: Tensor | None,
    *,
    encodes: bool,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    padding_mask: Tensor | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    **others: Any,
) -> tuple[PackedBatch, Arrangement]:
    """Like `as_packed_batch`, for a batch without labels with arguments on the host, see `arguments_on_host`.

    Pixels are needed in addition to grids if this stage `encodes`.
    """
    check_others(others)
    ids = checked_ids(input_ids)
    check_pixels(config, pixel_values=pixel_values, pixel_values_videos=pixel_values_videos)
    real = real_tokens(attention_mask, padding_mask, ids)
    if config.moe_layers and real is None and packed_seq_params is None and (ids[:, -1] == 0).any():
        _warn_of_zeros()
    arranged = arrange(ids, real, packed_seq_params, config.pad_token_id)
    # Padding added by the layout is identified by its mask, so any token id is valid.
    ids = arranged.take(ids, fill=config.pad_token_id or 0)
    axes = None
    if position_ids is not None:
        has_masks = real is not None or packed_seq_params is not None
        axes = given_positions(config, position_ids, ids, arranged, has_masks)
    vision = None
    if encodes:
        vision = make_vision_inputs(
            pixel_values,
            image_grid_thw,
            pixel_values_videos,
            video_grid_thw,
            num_position_embeddings=config.vision_config.num_position_embeddings,
            spatial_merge_size=config.vision_config.spatial_merge_size,
        )
    batch = PackedBatch(
        input_ids=ids,
        labels=torch.zeros_like(ids),
        loss_mask=torch.ones(ids.shape),
        position_ids=_positions(config, ids, arranged, image_grid_thw, video_grid_thw, axes),
        vision_slot=_slots(config, ids, image_grid_thw),
        layout=arranged.layout,
        vision=vision,
    )
    return batch, arranged


@cache
def _warn_of_zeros() -> None:
    """Warn once per process."""
    logger.warning(
        "rows end in token 0, as Megatron-Bridge's collators and steps lengthen them, and no attention_mask says that "
        "this is padding: experts are balanced over it like over any token. Give a mask "
        "(dataset.skip_getting_attention_mask_from_dataset=False), or use qwen3vl_bridge.forward_step, which reads it"
    )


def _caller_order(arranged: Arrangement, labels: Tensor | None, cp_size: int) -> CallerOrder | None:
    order = arranged.caller_order(labels)
    if order is not None and cp_size > 1:
        raise ValueError(
            f"context parallelism over {cp_size} ranks gives each its share of the outputs, which cannot come back in "
            "the caller's order: expected rows padded on the right, or labels in the packed row's order, [1, tokens]"
        )
    return order


def _positions(
    config: VisionLanguageProvider,
    ids: Tensor,
    arranged: Arrangement,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    given: Tensor | None,
) -> Tensor:
    """[3, b, s] positions of the arranged tokens, 0 for padding; taken from `given` [3, B, S] unless it is None."""
    derived = mrope_positions(  # always computed: it checks that tokens and grids match
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
    return arranged.take(given).long().masked_fill(arranged.layout.padding_mask().view(ids.shape), 0)


def _slots(config: VisionLanguageProvider, ids: Tensor, image_grid_thw: Tensor | None) -> Tensor:
    patches = 0 if image_grid_thw is None else int(image_grid_thw.prod(-1).sum())
    tokens = patches // config.vision_config.spatial_merge_size**2
    return vision_slots(ids, config.image_token_id, config.video_token_id, tokens)
