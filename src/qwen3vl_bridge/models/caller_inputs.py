"""The callers' interface: a batch in the convention of transformers, Megatron or an RL framework, as `ModelInputs`.

Batches of our own data path do not pass through this module. In a layout, the real tokens of a segment come first and
its padding follows, so that causal attention needs no mask; rows with padding on the left are therefore rolled, and
their outputs are rolled back.
Legend: B rows, S tokens per row, T tokens of the layout, n segments, b and s a rank's local sizes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

from qwen3vl_bridge.batch import (
    ModelInputs,
    PackedBatch,
    SequenceLayout,
    gathered_index,
    make_vision_inputs,
    mrope_positions,
    vision_slots,
)
from qwen3vl_bridge.batch.device_transfer import Movable, on_host, sent
from qwen3vl_bridge.models.caller_masks import (
    arguments_on_host,
    check_counts,
    check_mask,
    packed_layout,
    real_tokens,
    runs,
    segment_lengths,
    without_trailing,
)
from qwen3vl_bridge.models.cp_sharded_inputs import check_agreement, gather_slices, with_whole_row
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.refusals import ON_FORWARD, ON_TRAIN
from qwen3vl_bridge.models.rules import check

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup

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
) -> tuple[ModelInputs, OutputConversion | None]:
    """This rank's part of a batch given in the convention of transformers or Megatron: whole, or a slice of a flat row.

    Lengths, positions and indices are computed on the host, which synchronizes with the device once, to read all
    arguments except pixels; use `PackedBatch` to avoid this. Slices are first gathered from all context-parallel ranks,
    see `with_whole_row`, and outputs then cover the slice.

    Args:
        config, groups: the provider and its process groups.
        input_ids: as for `as_packed_batch`, or a slice [1, T / cp] of a flat row.
        labels: [B, S], already shifted, token ids where they are trained on: the model returns a loss for
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
    ranks, vocabulary, device = config.sequence_ranks(groups), config.vocab_size, input_ids.device
    if not encodes:
        ranks |= dict(vision_work=None, encoders=None)
    ranks["predicts"] = predicts = _predicts(config, groups, labels, mask, device)
    sharded = are_cp_sharded(arranged, labels, mask, ranks["cp_size"])
    # Labels split from a packed row are in the layout's order. Those of rows that were rolled are not.
    order = None if sharded and arranged.packed else _caller_order(arranged, labels, ranks["cp_size"])
    if sharded and not predicts:
        return _with_conversion(with_local_labels(batch.local(**ranks), labels, mask, vocabulary), None, None, device)
    if sharded:
        batch = with_gathered_labels(batch, labels, mask, vocabulary, groups.cp, device)
    else:
        batch = with_labels(batch, arranged, labels, mask, vocabulary)
    inputs = batch.local(**ranks)
    comes_back = ranks["cp_size"] > 1 and loss_mask is not None and loss_mask.shape != inputs.input_ids.shape
    own_mask = inputs.loss_mask if comes_back else None
    return _with_conversion(inputs if labels is not None else inputs.without_labels(), order, own_mask, device)


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


def _with_conversion(
    inputs: ModelInputs, order: CallerOrder | None, loss_mask: Tensor | None, device: torch.device
) -> tuple[ModelInputs, OutputConversion | None]:
    inputs, unlabelled = without_ignored(inputs)
    nothing = order is None and unlabelled is None and loss_mask is None
    conversion = None if nothing else OutputConversion(order, unlabelled, loss_mask).sent_to(device)
    return inputs.sent_to(device), conversion


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
            text positions first; [B, S] text positions, see `given_positions`; or None to derive them.
        attention_mask: [B, S], 1 for real tokens, with padding on the left or the right of each row, or on both sides;
            or a square mask, see `real_tokens`. None, and combinations with packing: see `arrange`.
        padding_mask: [B, S], 1 for padding: the inverse, under megatron-core's name.
        packed_seq_params: the segments of a packed row.
        pixel_values, image_grid_thw: patches and grids of the images, as returned by the processor.
        pixel_values_videos, video_grid_thw: the same for videos.
        mm_token_type_ids: the processor's token types; not used, so any shape is accepted.
        others: arguments of other models, see `REFUSED`; only None is accepted.

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


_NO_CACHE = "forward keeps no cache; `qwen3vl_bridge.generate` does"
_FROM_IDS = "it is worked out from the token ids and grids"

# Arguments that transformers, Megatron-Bridge or RL frameworks may pass, with the reason why this model accepts only
# None.
REFUSED = {
    "inputs_embeds": "the model embeds input_ids itself, images and videos included",
    "past_key_values": _NO_CACHE,
    "inference_params": _NO_CACHE,
    "cu_seqlens": "give packed_seq_params",
    "extra_block_kwargs": "they carry DeepStack features, which the model makes itself",
    "second_per_grid_ts": "Qwen3-VL has times in the text",
    "image_input_mask": _FROM_IDS,
    "video_input_mask": _FROM_IDS,
    "cp_img_num": _FROM_IDS,
    "images_padded": _FROM_IDS,
    "return_logprobs_for_linear_ce_fusion": "logits are made and then a loss; NeMo-RL: use_fused_linear_logprobs=false",
    "temperature": "give output_processor, which divides logits by itself as verl's fused kernels do",
}

# Returned by processors, and passed by NeMo-RL with another row length: redundant with the token ids.
_NOT_NEEDED = {"mm_token_type_ids"}


def check_settings(config: VisionLanguageProvider, training: bool) -> None:
    """Refuse (ValueError) settings that the model cannot compute, or cannot train with, before a step begins.

    Frameworks that build models with `provide` or Megatron-Bridge's `get_model` (miles, NeMo-RL) do not declare
    beforehand that they will train them; `provide_distributed_model` does. A model that is only loaded, or called in
    evaluation mode or without gradients, may have the schedule settings of the run that saved it.
    """
    check(ON_TRAIN if training and torch.is_grad_enabled() else ON_FORWARD, config)


def checked_ids(input_ids: Tensor | None) -> Tensor:
    """Return the token ids; refuse anything other than a non-empty integer tensor [rows, tokens]."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
        found = None if input_ids is None else f"{list(input_ids.shape)} {input_ids.dtype}"
        raise ValueError(f"input_ids has shape {found}, expected [rows, tokens] of integers")
    return input_ids


def check_pixels(config: VisionLanguageProvider, **pixels: Tensor | None) -> None:
    """Refuse pixels other than floating point [patches, features], naming the argument."""
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    for name, values in pixels.items():
        if values is not None and (values.dim() != 2 or values.shape[1] != width or not values.is_floating_point()):
            raise ValueError(
                f"{name} has shape {list(values.shape)} {values.dtype}, expected [patches, {width}] floating point, as "
                "the processor gives it"
            )


def check_inference(context: Any, runtime_gather_output: bool | None, labels: Tensor | None) -> None:
    """Refuse arguments of Megatron's inference, except those for a forward pass over whole prompts."""
    if context is not None and getattr(context, "sequence_len_offset", None) != 0:
        raise ValueError(f"inference_context holds tokens already, expected it to hold none: {_NO_CACHE}")
    if runtime_gather_output and labels is not None:
        raise ValueError("runtime_gather_output is True with labels, expected None: the loss is of logits as they lie")


def check_others(others: dict[str, Any]) -> None:
    """Refuse arguments that the model does not use; None is accepted and means that the argument is not given.

    Raises:
        ValueError: an argument in `REFUSED` is given.
        TypeError: an unknown argument.
    """
    for name in others.keys() - _NOT_NEEDED:
        value = others[name]
        if name not in REFUSED:
            raise TypeError(f"unexpected argument {name!r}; expected those of as_model_inputs")
        if value is not None:
            raise ValueError(f"{name} is given, expected None: {REFUSED[name]}")


# Such rows have already been gathered, see `with_whole_row`.
_SHARE = (
    "The model's forward also takes one flat row that is a context-parallel rank's share, of offsets that count its "
    "tokens times the ranks"
)


@dataclass(frozen=True)
class Arrangement:
    """A caller's batch as a layout.

    Attributes:
        layout: the segments.
        shape: B and S of the caller.
        sources: [T] int64, the caller's token at each position of the layout, -1 for padding that the caller's rows do
            not have; or None if the order is the same.
        packed: whether the caller describes a packed row.
    """

    layout: SequenceLayout
    shape: tuple[int, int]
    sources: Tensor | None = None
    packed: bool = False

    def take(self, values: Tensor, fill: int = 0) -> Tensor:
        """[..., B, S] values of the caller's tokens -> [..., b, s] in the layout, with `fill` for added padding."""
        flat = values.flatten(-2)
        if self.sources is not None:
            flat = F.pad(flat, (0, 1), value=fill)[..., self.sources]  # index -1 reads the appended fill value
        return flat.unflatten(-1, (self.layout.num_rows, -1))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Allowed shapes of labels: [B, S] in the caller's order and, for a packed row, [1, T] in the layout's."""
        in_layout = (1, self.layout.total)
        return [self.shape, in_layout] if self.packed and self.shape != in_layout else [self.shape]

    def take_given(self, values: Tensor) -> Tensor:
        """[b, s] values in the layout, from values with one of `shapes`.

        Raises:
            ValueError: the shape is ambiguous, and the two orders differ.
        """
        in_layout = self.packed and values.shape == (1, self.layout.total)
        if in_layout and values.shape == self.shape and self.sources is not None:
            raise ValueError(
                f"labels or loss_mask has shape {list(values.shape)} for a row that begins with padding and is as long "
                "as its segment in packed_seq_params, so its order could be either's: expected a row without padding "
                "on the left"
            )
        return values if in_layout else self.take(values)

    def caller_order(self, labels: Tensor | None) -> CallerOrder | None:
        """How outputs are converted to the caller's order; None if they are already in it.

        Outputs for rows without packed-sequence parameters are [B, S, ...]. With them, logits are a packed row [1, T,
        ...] as described by the parameters, which is what Megatron-Bridge's own model returns and RL frameworks unpack;
        losses have the shape of the labels.
        """
        wanted = labels is not None and labels.shape == self.shape if self.packed else True
        if not wanted or (self.sources is None and self.shape[0] == self.layout.num_rows):
            return None
        sources = torch.arange(self.layout.total) if self.sources is None else self.sources
        slots = torch.full((self.shape[0] * self.shape[1],), -1)
        slots[sources[sources >= 0]] = (sources >= 0).nonzero().squeeze(-1)
        return CallerOrder(slots.view(self.shape), complete=bool((slots >= 0).all()))


def arrange(
    ids: Tensor, attention_mask: Tensor | None, packed: PackedSeqParams | None, pad_token_id: int | None
) -> Arrangement:
    """Detect the convention of a batch and return its layout.

    Without `packed`, each row is a segment. With it, the offsets decide:

    - As many segments as rows: segment i contains the real tokens of row i, padded or truncated to the segment's length
      in the packed row. (One row that is as long as its segment is a flat row, see below, unless it begins with
      padding.)
    - Otherwise the concatenated rows are the packed row, and a segment begins at each row.

    Real tokens are those of `attention_mask` if it is given, else those counted by `packed`, else all but a trailing
    run of `pad_token_id` in each row. The last rule is a heuristic used as the last resort: a document may end with
    that token. It affects which tokens experts process and count, but not the results of tokens before the run.

    Args:
        ids: [B, S] on the host.
        attention_mask: [B, S], 1 for real tokens, of any dtype; they must be contiguous in each row. Or None.
        packed: the segments, or None.
        pad_token_id: None if every token is real unless specified otherwise.

    Raises:
        ValueError: masks and offsets that contradict each other or match none of these conventions.
    """
    keep = None if attention_mask is None else check_mask(attention_mask, ids)
    if packed is None:
        return _rows(without_trailing(ids, pad_token_id) if keep is None else keep)
    rows, tokens = ids.shape
    logical, physical = segment_lengths(packed)
    flat = rows == 1 and physical[0] == tokens and (keep is None or bool(keep[0, 0]))
    if len(physical) == rows and not flat:
        return _packed_rows((rows, tokens), keep, logical, physical)
    return _packed_row((rows, tokens), keep, logical, physical)


def _rows(keep: Tensor) -> Arrangement:
    """Each row is a segment; rows that begin with padding are rolled."""
    rows, tokens = keep.shape
    first, lengths = runs(keep)
    layout = SequenceLayout.rows(lengths.tolist(), tokens)
    rolled = (torch.arange(tokens) + first[:, None]) % tokens + torch.arange(rows)[:, None] * tokens
    return Arrangement(layout, (rows, tokens), sources=rolled.flatten() if first.any() else None)


def _packed_rows(shape: tuple[int, int], keep: Tensor | None, logical: Tensor, physical: Tensor) -> Arrangement:
    """The real tokens of each row are a segment of a packed row."""
    rows, tokens = shape
    if keep is None:
        keep = torch.arange(tokens) < logical[:, None]
        if int(logical.max()) > tokens:
            row = int(logical.argmax())
            raise ValueError(
                f"packed_seq_params has {int(logical[row])} tokens for row {row} of {tokens}; expected its real "
                f"tokens, or an attention_mask that tells them. {_SHARE}"
            )
    first, lengths = runs(keep)
    check_counts(lengths, logical, physical)
    layout = packed_layout(lengths, physical)
    segment = torch.arange(rows).repeat_interleave(physical)
    within = torch.arange(layout.total) - (physical.cumsum(0) - physical)[segment]
    sources = torch.where(within < lengths[segment], segment * tokens + first[segment] + within, -1)
    return Arrangement(layout, shape, sources, packed=True)


def _packed_row(shape: tuple[int, int], keep: Tensor | None, logical: Tensor, physical: Tensor) -> Arrangement:
    """The concatenated rows are the packed row."""
    rows, tokens = shape
    rest = rows * tokens - int(physical.sum())
    if rest > 0 and rows == 1 and keep is not None and not keep[0, -rest:].any():
        logical, physical = F.pad(logical, (0, 1)), F.pad(physical, (0, 1), value=rest)
    elif rest:
        raise ValueError(
            f"packed_seq_params has {len(physical)} segments of {int(physical.sum())} tokens in all, input_ids has "
            f"shape {list(shape)}: expected {rows * tokens} tokens, the whole batch"
            + (", or an attention_mask that says the rest is padding" if rows == 1 and rest > 0 else "")
            + (f", or one segment for each of {rows} rows" if rows > 1 else "")
            + (f". {_SHARE}" if rest < 0 else "")
        )
    ends = physical.cumsum(0)
    inside = [row for row in range(1, rows) if row * tokens not in ends]
    if inside:
        raise ValueError(
            f"packed_seq_params has {len(physical)} segments; row {inside[0]} of {tokens} tokens begins inside one. "
            f"Expected one segment for each of {rows} rows, or rows that begin segments"
        )
    lengths = logical
    if keep is not None:
        segment = torch.arange(len(physical)).repeat_interleave(physical)
        lengths = torch.zeros_like(physical).index_add(0, segment, keep.flatten().long())
        within = torch.arange(rows * tokens) - (ends - physical)[segment]
        wrong = (keep.flatten() != (within < lengths[segment])).nonzero()
        if len(wrong):
            raise ValueError(
                f"attention_mask has padding before real tokens in segment {int(segment[wrong[0]])} of the packed row; "
                "expected a segment's real tokens first and its padding after them"
            )
        check_counts(lengths, logical, physical)
    return Arrangement(packed_layout(lengths, physical), shape, packed=True)


def given_positions(
    config: VisionLanguageProvider, position_ids: Tensor, ids: Tensor, arranged: Arrangement, has_masks: bool
) -> Tensor | None:
    """The given positions on three axes, [3, B, S], or None if they have to be derived; `ids` [b, s] are arranged.

    transformers uses [B, S] for all three axes and [4, B, S] with text positions first, and detects the documents of a
    packed row from text positions that do not increase by one, unless a mask is given. Positions [B, S] for a batch
    with images or videos are text positions, which callers often pass by default: Megatron-Bridge ignores them, and so
    does this function if they only express the order of tokens.

    Raises:
        ValueError: another shape, or text positions that do not increase by one where they must.
    """
    rows = list(arranged.shape)
    if position_ids.is_floating_point() or list(position_ids.shape) not in (rows, [3, *rows], [4, *rows]):
        raise ValueError(
            f"position_ids has shape {list(position_ids.shape)} {position_ids.dtype}, expected {[3, *rows]} integers "
            f"(temporal, height and width position of each token), {[4, *rows]} (text positions first), {rows} of "
            "text, or None to derive them from the tokens and grids"
        )
    if position_ids.dim() == 3 and len(position_ids) == 3:
        return position_ids
    in_order = _counts_up(position_ids if position_ids.dim() == 2 else position_ids[0], arranged)
    if not has_masks and not in_order:
        raise ValueError(
            "position_ids has text positions that don't count up by one in a row: where it packs several documents, "
            "give packed_seq_params; where it is padded, an attention_mask"
        )
    if position_ids.dim() == 3:
        return position_ids[1:]
    if not ((ids == config.image_token_id) | (ids == config.video_token_id)).any():
        return position_ids.expand(3, *rows)
    if not in_order:
        raise ValueError(
            f"position_ids has shape {rows} in a batch with images or videos, whose tokens have three positions, and "
            f"does not count up by one over the tokens: expected {[3, *rows]}, or None to derive them"
        )
    _warn_of_text_positions()
    return None


def _counts_up(text: Tensor, arranged: Arrangement) -> bool:
    """Whether positions [B, S] increase by one over the real tokens of each segment, from any first value."""
    layout, flat = arranged.layout, arranged.take(text).flatten()
    segment, real = layout.per_token(torch.arange(len(layout.lengths))), ~layout.padding_mask()
    together = real[1:] & (segment[1:] == segment[:-1])
    return not bool((together & (flat.diff() != 1)).any())


@cache
def _warn_of_text_positions() -> None:
    """Warn once per process."""
    logger.warning(
        "position_ids [rows, tokens] are those of text, in a batch with images or videos: they are ignored, and "
        "positions on three axes are worked out from the tokens and grids"
    )


# Labels and loss masks, for the whole batch or only for this context-parallel rank's tokens: Megatron-Bridge's
# `qwen3_vl_step` and verl's fused kernels pass whole rows of tokens, which images and videos need, together with labels
# that are already split. The two cases are distinguished by shape. Labels of other ranks are needed only for
# multi-token prediction, which reads the labels of next tokens; at the end of a chunk these are on another rank.

# The ignore_index of torch's cross_entropy, which collators set for tokens that are not trained on.
IGNORED = -100


def are_cp_sharded(arranged: Arrangement, labels: Tensor | None, loss_mask: Tensor | None, cp_size: int) -> bool:
    """Whether the given labels and mask cover only this context-parallel rank's tokens."""
    given = [values.shape for values in (labels, loss_mask) if values is not None]
    return cp_size > 1 and bool(given) and all(shape == _of_a_rank(arranged, cp_size) for shape in given)


def with_labels(
    batch: PackedBatch, arranged: Arrangement, labels: Tensor | None, loss_mask: Tensor | None, vocab_size: int
) -> PackedBatch:
    """A batch with labels and a loss mask for the whole batch; labels are `IGNORED` where no loss is defined.

    Args:
        batch, arranged: a batch without labels, and its arrangement.
        labels: [B, S] in the caller's order or, for a packed row, [1, T] in the layout's order. None: zeros.
        loss_mask: same shape as labels, 0 where labels are arbitrary. None: ones.
        vocab_size: labels must be token ids below this size.

    Raises:
        ValueError: other shapes, or unmasked labels that are not token ids.
    """
    if labels is not None and loss_mask is not None and loss_mask.shape != labels.shape:
        raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {list(labels.shape)} as labels")
    if labels is not None:
        labels = _readable(labels, loss_mask, arranged.shapes, vocab_size)
        batch = replace(batch, labels=arranged.take_given(labels))
    if loss_mask is not None:
        if loss_mask.shape not in arranged.shapes:
            raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {_words(arranged.shapes)}")
        batch = replace(batch, loss_mask=arranged.take_given(loss_mask).float())
    return batch


def with_local_labels(
    inputs: ModelInputs, labels: Tensor | None, loss_mask: Tensor | None, vocab_size: int
) -> ModelInputs:
    """Add labels and a mask of the rank's local tokens [b, s] to its inputs; other arguments as for `with_labels`."""
    if labels is not None:
        labels = _readable(labels, loss_mask, [inputs.input_ids.shape], vocab_size)
    return replace(inputs, labels=labels, loss_mask=None if loss_mask is None else loss_mask.float())


def with_gathered_labels(
    batch: PackedBatch,
    labels: Tensor,
    loss_mask: Tensor | None,
    vocab_size: int,
    group: ProcessGroup,
    device: torch.device,
) -> PackedBatch:
    """A batch with labels and a mask that each context-parallel rank gives as local slices [b, s]; as `with_labels`.

    The host synchronizes with the device once, to read the slices of all ranks, which have passed `check_agreement`.
    """
    given = {"labels": labels} if loss_mask is None else {"labels": labels, "loss_mask": loss_mask}
    slices = on_host({name: gather_slices(sent(own, device), group) for name, own in given.items()})
    index, shape = gathered_index(batch.layout, group.size()), batch.input_ids.shape
    whole = {name: of_ranks.flatten()[index].view(shape) for name, of_ranks in slices.items()}
    mask = whole.get("loss_mask")
    labels = _readable(whole["labels"], mask, [shape], vocab_size)
    return replace(batch, labels=labels, loss_mask=batch.loss_mask if mask is None else mask.float())


def without_ignored(inputs: ModelInputs) -> tuple[ModelInputs, Tensor | None]:
    """Replace `IGNORED` labels by token ids; also returns [b, s] where they were, or None if there were none."""
    if inputs.labels is None:
        return inputs, None
    ignored = inputs.labels < 0
    return (replace(inputs, labels=inputs.labels.clamp(min=0)), ignored) if ignored.any() else (inputs, None)


def _of_a_rank(arranged: Arrangement, cp_size: int) -> tuple[int, int]:
    rows = arranged.layout.num_rows
    return rows, arranged.layout.total // cp_size // rows


def _readable(labels: Tensor, loss_mask: Tensor | None, shapes: list, vocab_size: int) -> Tensor:
    """Check that unmasked labels are token ids, and replace all entries that are not token ids by `IGNORED`."""
    right = (labels >= 0) & (labels < vocab_size)
    free = labels == IGNORED if loss_mask is None else loss_mask == 0
    if labels.is_floating_point() or labels.shape not in shapes or not bool((right | free).all()):
        found = [labels.min().item(), labels.max().item()] if labels.numel() else []
        raise ValueError(
            f"labels has shape {list(labels.shape)} {labels.dtype} and entries in {found}, expected "
            f"{_words(shapes)} token ids below {vocab_size}, and anything else only where loss_mask is 0, or {IGNORED} "
            "without one"
        )
    return torch.where(right, labels, IGNORED)


def _words(shapes: list) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)


@dataclass(frozen=True)
class CallerOrder(Movable):
    """Positions of the caller's tokens in the outputs.

    Attributes:
        slots: [B, S] int64, index of each of the caller's tokens in the flat layout; -1 if it was dropped. On the
            device of the outputs.
        complete: whether no token was dropped.
    """

    slots: Tensor
    complete: bool

    def restore(self, output: Tensor) -> Tensor:
        """[b, s, ...] outputs -> [B, S, ...], with zeros for dropped tokens, which were padding."""
        flat = output.flatten(0, 1)
        if not self.complete:
            flat = torch.cat((flat, flat.new_zeros(1, *flat.shape[1:])))  # the row read by index -1
        slots = self.slots % len(flat)
        return flat.index_select(0, slots.flatten()).unflatten(0, slots.shape)


@dataclass(frozen=True)
class OutputConversion(Movable):
    """The conversion of the outputs of one call.

    Attributes:
        order: order of the caller's tokens; None if outputs are already in it.
        unlabelled: [b, s] bool, True where a label is ignored and the loss is 0; None if there are no such labels.
        loss_mask: [b, s] this rank's slice of a mask given for the whole batch, returned with the output as in
            Megatron-Bridge's own model; None if the caller already has the slice.
    """

    order: CallerOrder | None = None
    unlabelled: Tensor | None = None
    loss_mask: Tensor | None = None

    def of(self, output: Any) -> Any:
        """Convert [b, s, ...] outputs to the caller's form, with the slice of the loss mask if there is one."""
        if self.unlabelled is not None:
            output = output.masked_fill(self.unlabelled, 0)
        if self.order is not None:
            output = self.order.restore(output)
        return output if self.loss_mask is None else (output, self.loss_mask)

    def of_processor(self) -> Self:
        """Like `of`, for the result that a caller's own `output_processor` computes from hidden states, of any type.

        Raises:
            ValueError: the processor would see tokens in an order that differs from the caller's.
        """
        if self.order is not None:
            raise ValueError(
                "output_processor is given for rows that reach the model in another order than the caller's, which "
                "only the caller can undo in what it returns: expected rows padded on the right, or packed_seq_params "
                "and labels in the packed row's order, [1, tokens]"
            )
        return replace(self, unlabelled=None)
