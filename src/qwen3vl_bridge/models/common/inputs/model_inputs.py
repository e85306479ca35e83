"""The model's input interface: a batch in a caller's convention becomes `ModelInputs`.

What lives here: what people call vision-language models with, turned into a batch of ours. What may not: where real
tokens lie (`padding_and_packing.py`, `masks.py`), rows that context-parallel ranks have shared out already
(`precut_rows.py`), labels (`labels.py`), positions (`position_ids.py`), checks of single arguments (`arguments.py`),
the model's own work. Batches of our own data path do not come through here.
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
    """This rank's share of a batch as transformers or Megatron callers pass it: whole, or that share of a flat row.

    Lengths, positions and indices are worked out on the host, which waits for the device once, to read all arguments
    but pixels: use `PackedBatch` where that matters. Shares are put together from all context-parallel ranks first, see
    `precut_rows.with_whole_row`, and outputs are of the share.

    Args:
        config: the provider.
        groups: process groups.
        input_ids: as for `as_packed_batch`, or a share [1, T / cp] of a flat row.
        labels: [B, S] already shifted, token ids where they count, see `labels`: the model gives a loss for each, and
            the caller leaves out those that don't count. With `packed_seq_params` also [1, T], in the packed row's
            order. Or of this context-parallel rank's tokens alone, [B, S / cp] or [1, T / cp]. Or None for logits.
        loss_mask: as labels, 0 where a label may be anything, and the caller's to multiply losses by. Under context
            parallelism a whole one comes back with the outputs, as this rank's share. Without labels it has no effect.
        encodes: whether this pipeline stage encodes pictures; others need their grids alone.
        arguments: the rest as for `as_packed_batch`.

    Returns:
        The inputs, where the caller's input_ids are, and what becomes of outputs; None where they are what the caller
        expects.

    Raises:
        ValueError: shapes that don't belong together, masks with holes, pictures that don't fit the tokens.
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
    # Labels that were cut from a packed row lie in the layout's order. Others of rows that were rolled do not.
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
    """Whether multi-token prediction learns from a call.

    It may need labels of other context-parallel ranks: all of them have to give the same kind.
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
    """A whole batch in a caller's convention as one of ours.

    Args:
        config: the provider.
        input_ids: [B, S] rows, or one flat row [1, T] with `packed_seq_params`.
        labels: [B, S] already shifted; with `packed_seq_params` also [1, T]. Or None: all zero then.
        loss_mask: as labels, 0 where a label may be anything. None: every label counts but those of -100.
        position_ids: [3, B, S] temporal, height and width position of each token; [4, B, S], where transformers has
            text positions first; [B, S] of text, see `position_ids.given_positions`; or None to derive them.
        attention_mask: [B, S], 1 for real tokens, on the left, on the right or in the middle of each row; or what each
            token sees, see `masks.real_tokens`. None: see `padding_and_packing.arrange`, as for all that rows and
            packing mean together.
        padding_mask: [B, S], 1 for padding: the same the other way round, as megatron-core names it.
        packed_seq_params: the segments of a packed row.
        pixel_values, image_grid_thw: patches and grids of the images, as the processor gives them.
        pixel_values_videos, video_grid_thw: the same of videos.
        mm_token_type_ids: what the processor says of tokens; not needed, so of any shape.
        others: what other models take, see `arguments.REFUSED`; None alone is accepted.

    Returns:
        The batch on the host, but for pixels, which are where they were; and where the caller's tokens lie in it.

    Raises:
        ValueError: shapes that don't belong together, masks with holes, pictures that don't fit the tokens.
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
    """As `as_packed_batch`, of a batch without labels whose arguments are on the host, see `arguments_on_host`.

    Pictures are needed besides their grids if it `encodes`.
    """
    check_others(others)
    ids = checked_ids(input_ids)
    check_pixels(config, pixel_values=pixel_values, pixel_values_videos=pixel_values_videos)
    real = real_tokens(attention_mask, padding_mask, ids)
    if config.moe_layers and real is None and packed_seq_params is None and (ids[:, -1] == 0).any():
        _warn_of_zeros()
    arranged = arrange(ids, real, packed_seq_params, config.pad_token_id)
    # The padding that a layout adds is told by its mask, so any id serves.
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
    """Once a process."""
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
    return arranged.take(given).long().masked_fill(arranged.layout.padding_mask().view(ids.shape), 0)


def _slots(config: VisionLanguageProvider, ids: Tensor, image_grid_thw: Tensor | None) -> Tensor:
    patches = 0 if image_grid_thw is None else int(image_grid_thw.prod(-1).sum())
    tokens = patches // config.vision_config.spatial_merge_size**2
    return vision_slots(ids, config.image_token_id, config.video_token_id, tokens)
