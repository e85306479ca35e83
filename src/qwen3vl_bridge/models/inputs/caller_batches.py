"""Convert a batch in the format of a caller (transformers, Megatron-Bridge, RL frameworks) to `ModelInputs`.

Batches of our own data path do not pass through this package. The steps:

1. `read_arguments` copies the arguments to the host and checks them.
2. `detect_layout` finds real tokens and segments, and moves the padding of each segment behind its tokens.
3. `as_model_inputs` derives positions and vision inputs (`TokenBatch.build`), adds labels, selects the rank's tokens.
4. `OutputConversion` returns outputs to the caller's order.

`cp_sharded.py` gathers rows and labels that the caller has already divided over context-parallel ranks.

Legend: B rows, S tokens per row, T tokens of the layout, b and s local sizes of a rank, cp context-parallel ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from qwen3vl_bridge.config.fields import VisionLanguageFields
from qwen3vl_bridge.core.batch import ModelInputs, TokenBatch
from qwen3vl_bridge.core.device_transfer import to_host
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.models.inputs.caller_layout import (
    OFFSETS,
    CallerLayout,
    OutputConversion,
    detect_layout,
    make_packed_layout,
    read_segment_lengths,
)
from qwen3vl_bridge.models.inputs.cp_sharded import check_ranks_agree, gather_labels, gather_row

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

# The ignore_index of torch's cross_entropy, which collators set for tokens that are not trained on.
IGNORE_INDEX = -100


def as_model_inputs(
    config: VisionLanguageFields,
    groups: ProcessGroupCollection,
    input_ids: Tensor | None,
    *,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    stage_arguments: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> tuple[ModelInputs, OutputConversion | None]:
    """Return this rank's inputs for a batch in the format of transformers or Megatron.

    The host synchronizes with the device once, to read all arguments except pixels; pass a `TokenBatch` to avoid this.
    If `input_ids` is a context-parallel slice of a packed row, the full row is gathered from all ranks, see
    `gather_row`, and outputs cover the slice.

    Args:
        config, groups: the provider and its process groups.
        input_ids: as for `as_token_batch`, or a slice [1, tokens / cp] of a packed row.
        labels: [rows, tokens], already shifted, with token ids where a token is trained on; None to get logits. The
            model returns a loss for each label, and the caller masks the losses. With `packed_seq_params`, labels may
            be [1, tokens] in the order of the packed row. Labels may also cover only this context-parallel rank,
            [rows, tokens / cp] or [1, tokens / cp], although `input_ids` is full, as in Megatron-Bridge's
            `qwen3_vl_step` and verl's fused kernels.
        loss_mask: same shape as labels, 0 where a label is arbitrary; the caller multiplies losses by the mask. Under
            context parallelism, this rank's slice of a full mask is returned with the outputs. No effect without
            labels.
        stage_arguments: result of the model's `stage_arguments`; None for a model without other pipeline stages.
        arguments: all others as for `as_token_batch`.

    Returns:
        The inputs, and the conversion of outputs; None if outputs already have the form that the caller expects.

    Raises:
        ValueError: inconsistent shapes, masks with padding between real tokens, images or videos that do not match the
            tokens.
        TypeError: an unknown argument.
    """
    given = read_arguments(dict(arguments, input_ids=input_ids, labels=labels, loss_mask=loss_mask), groups.cp)
    labels, mask = given.pop("labels"), given.pop("loss_mask")
    stage = dict(encode_vision=True) | dict(stage_arguments or {})
    batch, caller = _build_batch(config, encode_vision=stage["encode_vision"], **given)
    assert input_ids is not None
    device, layout = input_ids.device, caller.layout
    trains_mtp = config.trains_mtp and torch.is_grad_enabled()
    if trains_mtp:  # multi-token prediction gathers labels, so all ranks must have the same kind of labels
        check_ranks_agree(dict(labels=labels, loss_mask=mask), None, groups.cp, device)
        trains_mtp = labels is not None
    # The arguments of `VisionLanguageModel.select_local`; the model passes its `stage_arguments`.
    ranks = config.local_arguments(groups) | dict(with_next_tokens=trains_mtp) | stage

    cp_size = ranks["cp_size"]
    local_shape = (layout.num_rows, layout.total // cp_size // layout.num_rows)
    shapes = [values.shape for values in (labels, mask) if values is not None]
    labels_are_local = cp_size > 1 and bool(shapes) and all(shape == local_shape for shape in shapes)
    if labels_are_local and caller.packed:
        conversion = OutputConversion()  # labels of a packed row are already in the layout's order
    else:
        conversion = OutputConversion.to_caller_order(caller, labels)
    if conversion.slots is not None and cp_size > 1:
        raise ValueError(
            f"context parallelism over {cp_size} ranks: no rank can return outputs in the caller's token order, "
            "because each computes only its share. Pad rows on the right, or give labels in the packed row's order, "
            "[1, tokens]"
        )
    if labels_are_local and trains_mtp:
        # The next token of a chunk's last token is on another rank.
        labels, mask = gather_labels(labels, mask, layout, groups.cp, device)
        labels = _check_labels(labels, mask, [batch.input_ids.shape], config.vocab_size)
        batch = replace(batch, labels=labels, loss_mask=batch.loss_mask if mask is None else mask.float())
    elif not labels_are_local:
        batch = _add_labels(batch, caller, labels, mask, config.vocab_size)
    inputs = batch.local(**ranks)
    if labels_are_local and not trains_mtp:
        if labels is not None:
            labels = _check_labels(labels, mask, [inputs.input_ids.shape], config.vocab_size)
        inputs = replace(inputs, labels=labels, loss_mask=None if mask is None else mask.float())
    elif cp_size > 1 and loss_mask is not None and loss_mask.shape != inputs.input_ids.shape:
        conversion = replace(conversion, loss_mask=inputs.loss_mask)
    if labels is None and not labels_are_local:
        inputs = inputs.without_labels()
    if inputs.labels is not None and (inputs.labels < 0).any():
        conversion = replace(conversion, ignored_labels=inputs.labels < 0)
        inputs = replace(inputs, labels=inputs.labels.clamp(min=0))
    return inputs.to(device), conversion.to(device) if conversion.is_needed else None


def as_token_batch(
    config: VisionLanguageFields,
    input_ids: Tensor | None,
    *,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[TokenBatch, CallerLayout]:
    """Convert a full batch to a `TokenBatch` on the host; pixels stay on their device.

    Args:
        config: the provider.
        input_ids: [rows, tokens], or one packed row [1, tokens] with `packed_seq_params`.
        labels, loss_mask: labels and mask of the full batch. By default, labels are 0. The default mask is 1 for every
            label except -100.
        position_ids: [3, rows, tokens] temporal, height and width position of each token; [4, rows, tokens], where
            transformers puts text positions first; [rows, tokens] text positions, see `_check_position_ids`; or None to
            derive them.
        attention_mask: [rows, tokens], 1 for real tokens, with padding on either side of each row, or both; or a square
            mask or Transformer Engine's, see `read_arguments`. For None, and for combinations with packing, see
            `detect_layout`.
        padding_mask: [rows, tokens] or, for the packed row, [1, tokens]: 1 for padding, as in megatron-core. If another
            mask is given too, this mask may be 1 for real tokens, which routers then leave out of load balancing.
        packed_seq_params: the segments of a packed row.
        pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw: as returned by the processor.
        mm_token_type_ids: the processor's token types; not used, so any shape is accepted.
        others: arguments of other models, see `UNSUPPORTED`; only None is accepted.

    Returns:
        The batch, and how the caller's tokens are arranged in it.
    """
    given = read_arguments(dict(arguments, input_ids=input_ids, labels=labels, loss_mask=loss_mask))
    labels, loss_mask = given.pop("labels"), given.pop("loss_mask")
    batch, caller = _build_batch(config, encode_vision=True, **given)
    batch = _add_labels(batch, caller, labels, loss_mask, config.vocab_size)
    return replace(batch, labels=batch.labels.clamp(min=0)), caller


def _build_batch(
    config: VisionLanguageFields,
    input_ids: Tensor | None,
    *,
    encode_vision: bool,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    padding_mask: Tensor | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    **others: Any,
) -> tuple[TokenBatch, CallerLayout]:
    """Return a batch with zeros as labels, and the caller's layout. Arguments are the results of `read_arguments`."""
    check_unsupported(others)
    if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
        raise ValueError(f"input_ids has shape {shape_and_dtype(input_ids)}, expected [rows, tokens] of integers")
    check_pixels(config, pixel_values=pixel_values, pixel_values_videos=pixel_values_videos)

    padding_of_packed_row = (
        packed_seq_params is not None and padding_mask is not None and padding_mask.shape != input_ids.shape
    )
    real = merge_masks(attention_mask, None if padding_of_packed_row else padding_mask, input_ids)
    if config.moe_layers and real is None and packed_seq_params is None and (input_ids[:, -1] == 0).any():
        _warn_once(
            "rows end in token 0, which Megatron-Bridge's collators and steps append as padding, but there is no "
            "attention_mask: load balancing of experts counts this padding as real tokens. Give an attention_mask "
            "(dataset.skip_getting_attention_mask_from_dataset=False), or use qwen3vl_bridge.forward_step, which reads "
            "it"
        )
    caller = detect_layout(input_ids, real, packed_seq_params, config.pad_token_id)
    layout = caller.layout
    # Padding added by the layout is identified by its mask, so any token id is valid.
    ids = caller.arrange(input_ids, fill=config.pad_token_id or 0)

    excluded = None
    if padding_mask is not None:
        masked = padding_mask if padding_of_packed_row else caller.arrange(padding_mask, fill=1)
        masked = check_mask(masked, ids, *PADDING_MASK)
        padding = layout.padding_mask().view(ids.shape)
        wrong = (padding & ~masked).flatten().nonzero()
        if len(wrong):
            raise ValueError(
                f"padding_mask has 0 for token {int(wrong[0])} of the packed row, expected 1 for padding: "
                "packed_seq_params or attention_mask mark the token as padding"
            )
        excluded = masked & ~padding
    if position_ids is not None:
        has_masks = real is not None or packed_seq_params is not None
        position_ids = _check_position_ids(config, position_ids, ids, caller, has_masks)
    batch = TokenBatch.build(
        ids,
        torch.zeros_like(ids),
        torch.ones(ids.shape),
        layout,
        VisionSettings.from_config(config),
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        pixel_values_videos=pixel_values_videos,
        video_grid_thw=video_grid_thw,
        position_ids=None if position_ids is None else caller.arrange(position_ids),
        excluded_from_aux_loss=excluded,
        encode_vision=encode_vision,
    )
    return batch, caller


def _check_position_ids(
    config: VisionLanguageFields, position_ids: Tensor, ids: Tensor, caller: CallerLayout, has_masks: bool
) -> Tensor | None:
    """Return the caller's positions on three axes, [3, rows, tokens], or None if they have to be derived.

    transformers uses [rows, tokens] for all three axes, and [4, rows, tokens] with text positions first. It detects the
    documents of a packed row from text positions that do not increase by one, unless a mask is given. Positions
    [rows, tokens] of a batch with images or videos are text positions, which callers often pass by default. Like
    Megatron-Bridge, this function ignores them if they only express the order of tokens.

    Args:
        config: the provider.
        position_ids: the caller's positions.
        ids: token ids in the order of the layout.
        caller: the caller's layout.
        has_masks: whether the caller has given a mask or packed-sequence parameters.

    Raises:
        ValueError: positions have another shape, or text positions do not increase by one where they have to.
    """
    rows = list(caller.shape)
    if position_ids.is_floating_point() or list(position_ids.shape) not in (rows, [3, *rows], [4, *rows]):
        raise ValueError(
            f"position_ids has shape {shape_and_dtype(position_ids)}, expected {[3, *rows]} integers "
            f"(temporal, height and width position of each token), {[4, *rows]} (text positions first), {rows} "
            "(text positions), or None to derive positions from the tokens and grids"
        )
    if position_ids.dim() == 3 and len(position_ids) == 3:
        return position_ids
    text = caller.arrange(position_ids if position_ids.dim() == 2 else position_ids[0]).flatten()
    segment, real = caller.layout.segment_ids(), ~caller.layout.padding_mask()
    same_segment = real[1:] & (segment[1:] == segment[:-1])
    in_order = not bool((same_segment & (text.diff() != 1)).any())  # counts up by one, from any first value
    if not has_masks and not in_order:
        raise ValueError(
            "position_ids has text positions that do not count up by one in a row. If a row packs several documents, "
            "give packed_seq_params; if it is padded, give an attention_mask"
        )
    if position_ids.dim() == 3:
        return position_ids[1:]
    if not ((ids == config.image_token_id) | (ids == config.video_token_id)).any():
        return position_ids.expand(3, *rows)
    if not in_order:
        raise ValueError(
            f"position_ids has shape {rows} in a batch with images or videos, and does not count up by one over the "
            f"tokens. Vision tokens have three positions: give {[3, *rows]}, or None to derive the positions"
        )
    _warn_once(
        "position_ids [rows, tokens] are text positions, but the batch has images or videos: position_ids is ignored, "
        "and positions on three axes are derived from the tokens and grids"
    )
    return None


def _add_labels(
    batch: TokenBatch, caller: CallerLayout, labels: Tensor | None, loss_mask: Tensor | None, vocab_size: int
) -> TokenBatch:
    """Return the batch with labels and loss mask, given in the caller's order or in the order of the packed row.

    Labels are `IGNORE_INDEX` where no loss is defined. Where the mask is 0, any label is accepted.

    Raises:
        ValueError: labels or mask have another shape, or a shape that fits both orders; or a label that is not a token
            id contributes to the loss.
    """
    packed_shape = (1, caller.layout.total) if caller.packed else None
    shapes = [caller.shape] if packed_shape in (None, caller.shape) else [caller.shape, packed_shape]
    if labels is not None:
        if loss_mask is not None and loss_mask.shape != labels.shape:
            raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {list(labels.shape)} as labels")
        labels = _check_labels(labels, loss_mask, shapes, vocab_size)
    elif loss_mask is not None and loss_mask.shape not in shapes:
        raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {_join_shapes(shapes)}")
    for name, values in (("labels", labels), ("loss_mask", None if loss_mask is None else loss_mask.float())):
        if values is None:
            continue
        if values.shape != packed_shape:
            values = caller.arrange(values)
        elif packed_shape == caller.shape and caller.sources is not None:
            raise ValueError(
                f"labels or loss_mask has shape {list(packed_shape)}, which fits both the caller's row and the packed "
                "row. The row begins with padding, so their token orders differ: give a row without padding on the left"
            )
        batch = replace(batch, **{name: values})
    return batch


def _check_labels(labels: Tensor, loss_mask: Tensor | None, shapes: list, vocab_size: int) -> Tensor:
    """Return labels with `IGNORE_INDEX` in place of all values that are not token ids.

    Raises:
        ValueError: a value that is not a token id contributes to the loss, or the shape of the labels is not one of
            `shapes`.
    """
    valid = (labels >= 0) & (labels < vocab_size)
    ignored = labels == IGNORE_INDEX if loss_mask is None else loss_mask == 0
    if labels.is_floating_point() or labels.shape not in shapes or not bool((valid | ignored).all()):
        entries = [labels.min().item(), labels.max().item()] if labels.numel() else []
        raise ValueError(
            f"labels has shape {shape_and_dtype(labels)} and entries in {entries}, expected "
            f"{_join_shapes(shapes)} token ids below {vocab_size}. Other values are allowed only where loss_mask is 0; "
            f"without a loss_mask, only {IGNORE_INDEX} is allowed"
        )
    return torch.where(valid, labels, IGNORE_INDEX)


def _join_shapes(shapes: list) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


_NO_CACHE = "pass a StaticInferenceContext as inference_context, or use qwen3vl_bridge.generate"
_FROM_IDS = "the model derives it from the token ids and grids"

# Arguments that transformers, Megatron-Bridge or RL frameworks may pass, and why this model accepts only None.
UNSUPPORTED = {
    "inputs_embeds": "the model embeds input_ids itself, images and videos included",
    "past_key_values": _NO_CACHE,
    "inference_params": _NO_CACHE,
    "cu_seqlens": "give packed_seq_params",
    "extra_block_kwargs": "they carry DeepStack features, which the model computes itself",
    "second_per_grid_ts": "Qwen3-VL gives the times of frames in the text",
    "image_input_mask": _FROM_IDS,
    "video_input_mask": _FROM_IDS,
    "cp_img_num": _FROM_IDS,
    "images_padded": _FROM_IDS,
    "return_logprobs_for_linear_ce_fusion": "the model computes logits first; NeMo-RL: use_fused_linear_logprobs=false",
    "temperature": "give an output_processor that divides logits by it, as verl's fused kernels do",
}

# Arguments that are ignored. Processors return them, NeMo-RL passes them with another row length, and the token ids
# contain the same information.
_NOT_NEEDED = {"mm_token_type_ids"}

# Tensors that are copied to the host, besides the offsets of packed_seq_params.
_READ = (
    *("input_ids", "position_ids", "attention_mask", "padding_mask", "labels", "loss_mask"),
    *("image_grid_thw", "video_grid_thw"),
)

# Name and meaning of megatron-core's mask, for `check_mask`.
PADDING_MASK = ("padding_mask", "1 for padding, 0 for real tokens")


def read_arguments(arguments: dict[str, Any], cp_group: ProcessGroup | None = None) -> dict[str, Any]:
    """Copy all tensors except pixels to the host, with one synchronization. Return all arguments of `as_model_inputs`.

    Three formats of arguments for B rows of S tokens are converted:

    - One row [1, n] with `packed_seq_params` that count cp * n tokens is a context-parallel slice. Slices are replaced
      by the full row, see `gather_row`. The host then synchronizes twice more, to compare and to read.
    - A square attention mask, [B or 1, 1, S, S] or [B or 1, S, S], is replaced by the mask of real tokens, [B, S], or
      by None if it is one causal mask for all rows, which does not mark padding.
    - A mask [B, 1, 1, S] is Transformer Engine's: booleans, True for padding, which is on the right.

    Raises:
        ValueError: an attention mask with another shape, other values or another meaning; and see `gather_row`.
    """
    given = {name: value for name in _READ if isinstance(value := arguments.get(name), Tensor)}
    ids, square, summaries = given.get("input_ids"), None, {}
    shape = given["attention_mask"].shape if "attention_mask" in given else ()
    is_te_mask = len(shape) == 4 and shape[1] == shape[2] == 1 < shape[3]
    if is_te_mask:
        given["attention_mask"] = given["attention_mask"][:, 0, 0]
    elif len(shape) > 2:
        # Summarized on its device, because its size is quadratic in the tokens.
        square = given.pop("attention_mask")
        by_row = square.squeeze(1) if square.dim() == 4 else square
        has_rows = ids is not None and ids.dim() == 2 and ids.numel() > 0
        if has_rows and len(by_row) in (1, len(ids)) and by_row.shape[1:] == (ids.shape[1],) * 2:
            for row, mask in enumerate(by_row):
                real, wrong = _read_square_mask(mask, by_row[0, 0, -1])
                summaries[str(row)] = torch.cat((real, wrong.any()[None]))
    packed = copy.copy(arguments.get("packed_seq_params"))
    offsets = {name: value for name in OFFSETS if isinstance(value := getattr(packed, name, None), Tensor)}
    read = to_host(given | offsets | summaries)
    for name in offsets:
        setattr(packed, name, read.pop(name))
    summaries = [read.pop(row) for row in summaries]
    read = arguments | read | (dict(packed_seq_params=packed) if offsets else {})

    if is_te_mask:
        padding = read["attention_mask"]
        if padding.dtype != torch.bool or padding[:, :1].any():
            raise ValueError(
                f"attention_mask has shape {list(shape)} {padding.dtype}. A mask of this shape is read as Transformer "
                "Engine's: it must contain booleans, True for padding, and each row must begin with a real token. Or "
                "give a mask [rows, tokens], 1 for real tokens"
            )
        read["attention_mask"] = ~padding
    ids = read["input_ids"]
    if ids is None or ids.dim() != 2 or not ids.numel():
        return read  # the caller raises
    cp_size = 1 if cp_group is None else cp_group.size()
    if cp_size > 1 and packed is not None and len(ids) == 1:
        logical, physical = read_segment_lengths(packed)
        if int(physical.sum()) == cp_size * ids.shape[1]:
            read |= gather_row(arguments, make_packed_layout(logical, physical), cp_group)
    if square is not None:
        read["attention_mask"] = _check_square_mask(square, summaries, *ids.shape)
    return read


# Entries of an additive mask at or below this value mean "masked"; the constant is Megatron's.
_MASKED = -10000.0


def _read_square_mask(mask: Tensor, masked_value: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bool tensors for a mask [S, S]: real tokens [S], and entries [S, S] that are wrong in a causal mask.

    A token that does not attend to itself is padding. Runs on the mask's device, without synchronization.

    Args:
        mask: the mask of one row of S tokens.
        masked_value: the entry that means "masked": the first token must not attend to the last. It differs between
            Megatron's booleans, transformers' inverted booleans and additive masks.
    """
    hidden = mask.bool() == masked_value.bool()
    valid = mask.bool().to(mask.dtype) == mask
    if mask.is_floating_point():
        is_additive = masked_value < 0
        hidden = torch.where(is_additive, mask <= _MASKED, hidden)
        valid = torch.where(is_additive, hidden | (mask == 0), valid)
    real = ~hidden.diagonal()
    wrong = ~valid | ((hidden == real.expand(mask.shape).tril()) & real[:, None])
    wrong[0, -1] |= mask[0, -1] != masked_value
    return real, wrong


def _check_square_mask(square: Tensor, summaries: list[Tensor], rows: int, tokens: int) -> Tensor | None:
    """Return the real tokens of a square mask as bool [rows, tokens]; None for one causal mask that all rows share.

    Args:
        square: the square attention mask.
        summaries: for each row of the mask, its real tokens and whether an entry is wrong, [tokens + 1]; empty if the
            mask has an unknown shape.
        rows, tokens: shape of `input_ids`.

    Raises:
        ValueError: the mask has an unknown shape or a wrong entry, or there are no real tokens.
    """
    if not summaries:
        raise ValueError(
            f"attention_mask has shape {list(square.shape)}, expected [{rows}, {tokens}], 1 for real tokens and 0 for "
            f"padding, or a causal mask, [{rows} or 1, 1, {tokens}, {tokens}]"
        )
    if tokens == 1:
        return None
    real, wrong = torch.stack(summaries).split((tokens, 1), -1)
    if wrong.any() or not real.any():
        row = int(wrong.int().argmax())
        by_row = square.squeeze(1) if square.dim() == 4 else square
        entries = _read_square_mask(by_row[row], by_row[0, 0, -1])[1].nonzero()
        token, other = entries[0].tolist() if len(entries) else (0, tokens - 1)
        raise ValueError(
            f"attention_mask says which tokens see each other, and has {by_row[row, token, other].item()} for token "
            f"{token} and token {other} of row {row}. Give a causal mask that also hides padding, with booleans, 0 and "
            "1, or numbers to be added; or a mask [rows, tokens] that only marks padding. If a row contains several "
            "documents, give packed_seq_params"
        )
    return None if len(real) == 1 and real.all() else real.expand(rows, tokens)


def merge_masks(attention_mask: Tensor | None, padding_mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """Return a bool mask [rows, tokens], True for real tokens, from one or both masks; None if both are None.

    Raises:
        ValueError: both masks are given and contradict each other.
    """
    real = None if attention_mask is None else check_mask(attention_mask, ids)
    if padding_mask is None:
        return real
    not_padding = ~check_mask(padding_mask, ids, *PADDING_MASK)
    if real is None:
        return not_padding
    if (not_padding & ~real).any():
        row, token = (int(index) for index in (not_padding & ~real).nonzero()[0])
        raise ValueError(f"padding_mask has 0 for token {token} of row {row}, expected 1 to agree with attention_mask")
    return real


def check_mask(
    mask: Tensor, ids: Tensor, name: str = "attention_mask", meaning: str = "1 for real tokens, 0 for padding"
) -> Tensor:
    """Return a mask of 0 and 1 in any dtype as bool. Raise ValueError for other values, or another shape than `ids`."""
    if mask.shape != ids.shape:
        raise ValueError(f"{name} has shape {list(mask.shape)}, expected {list(ids.shape)}: {meaning}")
    wrong = mask.bool().to(mask.dtype) != mask
    if wrong.any():
        raise ValueError(f"{name} has an entry {mask[wrong][0].item()}, expected {meaning}")
    return mask.bool()


def check_unsupported(others: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown argument, and ValueError if an argument in `UNSUPPORTED` is not None."""
    for name in others.keys() - _NOT_NEEDED:
        if name not in UNSUPPORTED:
            raise TypeError(f"unexpected argument {name!r}; as_model_inputs describes the arguments")
        if others[name] is not None:
            raise ValueError(f"{name} is given, expected None: {UNSUPPORTED[name]}")


def check_pixels(config: VisionLanguageFields, **given: Tensor | None) -> None:
    """Raise ValueError for pixels that do not have the processor's format, [patches, features] floating point."""
    tower = config.vision_config
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    for name, pixels in given.items():
        if pixels is not None and (pixels.dim() != 2 or pixels.shape[1] != width or not pixels.is_floating_point()):
            raise ValueError(
                f"{name} has shape {shape_and_dtype(pixels)}, expected [patches, {width}] floating point, as the "
                "processor returns it"
            )


def check_inference(context: Any, runtime_gather_output: bool | None, batch: Mapping[str, Any], *, keeps: bool) -> None:
    """Check the arguments of a forward pass that concern generation.

    The first step of a context, over full prompts, may be repeated. A later step adds one token per row.

    Args:
        context: the inference context; None outside generation.
        runtime_gather_output: whether to gather logits over tensor-parallel ranks.
        batch: arguments of `as_model_inputs`, by name.
        keeps: whether the model stores keys, values and states in the context.

    Raises:
        ValueError: the step cannot be added to the context, or gathered logits are requested with labels.
    """
    if context is not None and not context.is_static_batching():
        raise ValueError(f"inference_context is a {type(context).__name__}, expected a StaticInferenceContext")
    if context is not None and context.sequence_len_offset:
        if keeps and 0 not in context.key_value_memory_dict:
            raise ValueError(
                f"inference_context holds {context.sequence_len_offset} tokens, which this model has not stored: their "
                "rows had padding or several documents, or the model uses sequence or context parallelism. Use "
                "qwen3vl_bridge.generate"
            )
        if not keeps:
            raise ValueError(
                f"inference_context holds {context.sequence_len_offset} tokens, but this model stores none: pass all "
                "tokens again for each new token, or use qwen3vl_bridge.generate"
            )
        no_effect = {"input_ids", "position_ids", "attention_mask"}
        if given := [name for name, value in batch.items() if value is not None and name not in no_effect]:
            raise ValueError(
                f"{', '.join(given)} is given and inference_context holds {context.sequence_len_offset} tokens. After "
                "the prompts, give only input_ids with one new token of each row. Images and videos belong to the step "
                "with the prompts. Labels need a forward pass without inference_context"
            )
        input_ids = batch["input_ids"]
        if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] != 1:
            raise ValueError(
                f"input_ids has shape {shape_and_dtype(input_ids)} and inference_context holds "
                f"{context.sequence_len_offset} tokens, expected one new token of each row, [rows, 1]"
            )
    if runtime_gather_output and batch["labels"] is not None:
        raise ValueError(
            "runtime_gather_output is True with labels: the loss needs sharded logits. Set it to None, or omit labels"
        )


def shape_and_dtype(values: Tensor | None) -> str:
    """Return a tensor's shape and dtype, for messages."""
    return "None" if values is None else f"{list(values.shape)} {values.dtype}"
