"""The callers' interface: a batch in the convention of transformers, Megatron or an RL framework, as `ModelInputs`.

Batches of our own data path do not pass through this module. The way of a batch, from top to bottom: `as_model_inputs`
copies the arguments to the host (`read_arguments`), finds the real tokens (`real_tokens`) and the segments (`arrange`),
then positions and labels; and says how outputs return to the caller (`OutputConversion`).

In a layout, the real tokens of a segment come first and its padding follows, so that causal attention needs no mask;
rows with padding on the left are therefore rolled, and their outputs are rolled back.
Legend: B rows, S tokens per row, T tokens of the layout, n segments, b and s a rank's local sizes.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

from qwen3vl_bridge.batch import (
    ModelInputs,
    SequenceLayout,
    TokenBatch,
    make_vision_inputs,
    mrope_positions,
    vision_slots,
)
from qwen3vl_bridge.batch.device_transfer import Movable, on_host
from qwen3vl_bridge.models.cp_sharded_inputs import check_agreement, gather_labels, whole_row
from qwen3vl_bridge.models.provider import VisionLanguageProvider

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
    arguments except pixels; use `TokenBatch` to avoid this. Slices are first gathered from all context-parallel ranks,
    see `whole_row`, and outputs then cover the slice.

    Args:
        config, groups: the provider and its process groups.
        input_ids: as for `as_token_batch`, or a slice [1, T / cp] of a flat row.
        labels: [B, S], already shifted, token ids where they are trained on: the model returns a loss for each, and
            the caller masks them. With `packed_seq_params` also [1, T], in the order of the packed row. Or only this
            context-parallel rank's tokens, [B, S / cp] or [1, T / cp], as Megatron-Bridge's `qwen3_vl_step` and verl's
            fused kernels pass them beside whole rows of tokens. Or None for logits.
        loss_mask: same shape as labels, 0 where a label is arbitrary; the caller multiplies losses by it. Under context
            parallelism, this rank's slice of a whole mask is returned with the outputs. No effect without labels.
        encodes: whether this pipeline stage encodes images and videos; other stages need only their grids.
        arguments: all others as for `as_token_batch`.

    Returns:
        The inputs, and the conversion of outputs; None if outputs already have the form that the caller expects.

    Raises:
        ValueError: inconsistent shapes, masks with holes, images or videos that do not match the tokens.
        TypeError: an unknown argument.
    """
    given = read_arguments(dict(arguments, input_ids=input_ids, labels=labels, loss_mask=loss_mask), groups.cp)
    labels, mask = given.pop("labels"), given.pop("loss_mask")
    batch, arranged = _without_labels(config, encodes=encodes, **given)
    assert input_ids is not None
    vocabulary, device = config.vocab_size, input_ids.device
    predicts = config.trains_mtp and torch.is_grad_enabled()
    if predicts:  # which needs the same kind of labels on all ranks
        check_agreement(dict(labels=labels, loss_mask=mask), None, groups.cp, device)
        predicts = labels is not None
    ranks = config.local_arguments(groups) | dict(predicts=predicts, encodes=encodes)

    layout, cp_size = arranged.layout, ranks["cp_size"]
    of_a_rank = (layout.num_rows, layout.total // cp_size // layout.num_rows)
    shapes = [values.shape for values in (labels, mask) if values is not None]
    sharded = cp_size > 1 and bool(shapes) and all(shape == of_a_rank for shape in shapes)
    # Labels split from a packed row are in the layout's order. Those of rows that were rolled are not.
    conversion = OutputConversion() if sharded and arranged.packed else arranged.output_order(labels)
    if conversion.slots is not None and cp_size > 1:
        raise ValueError(
            f"context parallelism over {cp_size} ranks gives each its share of the outputs, which cannot come back in "
            "the caller's order: expected rows padded on the right, or labels in the packed row's order, [1, tokens]"
        )
    if sharded and predicts:
        labels, mask = gather_labels(labels, mask, layout, groups.cp, device)
        labels = _readable(labels, mask, [batch.input_ids.shape], vocabulary)
        batch = replace(batch, labels=labels, loss_mask=batch.loss_mask if mask is None else mask.float())
    elif not sharded:
        batch = with_labels(batch, arranged, labels, mask, vocabulary)
    inputs = batch.local(**ranks)
    if sharded and not predicts:
        own = None if labels is None else _readable(labels, mask, [inputs.input_ids.shape], vocabulary)
        inputs = replace(inputs, labels=own, loss_mask=None if mask is None else mask.float())
    elif cp_size > 1 and loss_mask is not None and loss_mask.shape != inputs.input_ids.shape:
        conversion = replace(conversion, loss_mask=inputs.loss_mask)
    if labels is None and not sharded:
        inputs = inputs.without_labels()
    if inputs.labels is not None and (inputs.labels < 0).any():
        conversion = replace(conversion, unlabelled=inputs.labels < 0)
        inputs = replace(inputs, labels=inputs.labels.clamp(min=0))
    return inputs.to(device), conversion.to(device) if conversion.changes_outputs else None


def as_token_batch(
    config: VisionLanguageProvider,
    input_ids: Tensor | None,
    *,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[TokenBatch, Arrangement]:
    """Like `as_model_inputs`, a whole batch on the host (pixels stay on their device); and its arrangement.

    Args:
        config: the provider.
        input_ids: [B, S] rows, or one flat row [1, T] with `packed_seq_params`.
        labels, loss_mask: of the whole batch. Labels default to 0, the mask to every label except -100.
        position_ids: [3, B, S] temporal, height and width position of each token; [4, B, S], where transformers puts
            text positions first; [B, S] text positions, see `given_positions`; or None to derive them.
        attention_mask: [B, S], 1 for real tokens, with padding on either side of each row, or both; or a square mask
            or Transformer Engine's, see `read_arguments`. None, and combinations with packing: see `arrange`.
        padding_mask: [B, S], 1 for padding: the inverse, under megatron-core's name; or [1, T] of the packed row.
            Beside other masks it may have 1 for real tokens too, which routers then don't count.
        packed_seq_params: the segments of a packed row.
        pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw: as returned by the processor.
        mm_token_type_ids: the processor's token types; not used, so any shape is accepted.
        others: arguments of other models, see `REFUSED`; only None is accepted.
    """
    given = read_arguments(dict(arguments, input_ids=input_ids, labels=labels, loss_mask=loss_mask))
    labels, loss_mask = given.pop("labels"), given.pop("loss_mask")
    batch, arranged = _without_labels(config, encodes=True, **given)
    batch = with_labels(batch, arranged, labels, loss_mask, config.vocab_size)
    return replace(batch, labels=batch.labels.clamp(min=0)), arranged


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


def check_inference(context: Any, runtime_gather_output: bool | None, labels: Tensor | None) -> None:
    """Refuse arguments of Megatron's inference, except those for a forward pass over whole prompts."""
    if context is not None and getattr(context, "sequence_len_offset", None) != 0:
        raise ValueError(f"inference_context holds tokens already, expected it to hold none: {_NO_CACHE}")
    if runtime_gather_output and labels is not None:
        raise ValueError("runtime_gather_output is True with labels, expected None: the loss is of logits as they lie")


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _without_labels(
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
) -> tuple[TokenBatch, Arrangement]:
    """Like `as_token_batch`, of `read_arguments` and without labels; a stage that `encodes` needs pixels too."""
    for name in others.keys() - _NOT_NEEDED:
        if name not in REFUSED:
            raise TypeError(f"unexpected argument {name!r}; expected those of as_model_inputs")
        if others[name] is not None:
            raise ValueError(f"{name} is given, expected None: {REFUSED[name]}")
    if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
        given = None if input_ids is None else f"{list(input_ids.shape)} {input_ids.dtype}"
        raise ValueError(f"input_ids has shape {given}, expected [rows, tokens] of integers")
    tower = config.vision_config
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    for name, pixels in (("pixel_values", pixel_values), ("pixel_values_videos", pixel_values_videos)):
        if pixels is not None and (pixels.dim() != 2 or pixels.shape[1] != width or not pixels.is_floating_point()):
            raise ValueError(
                f"{name} has shape {list(pixels.shape)} {pixels.dtype}, expected [patches, {width}] floating point, as "
                "the processor gives it"
            )
    of_row = packed_seq_params is not None and padding_mask is not None and padding_mask.shape != input_ids.shape
    real = real_tokens(attention_mask, None if of_row else padding_mask, input_ids)
    if config.moe_layers and real is None and packed_seq_params is None and (input_ids[:, -1] == 0).any():
        _warn_once(
            "rows end in token 0, as Megatron-Bridge's collators and steps lengthen them, and no attention_mask says "
            "that this is padding: experts are balanced over it like over any token. Give a mask "
            "(dataset.skip_getting_attention_mask_from_dataset=False), or use qwen3vl_bridge.forward_step, which reads "
            "it"
        )
    arranged = arrange(input_ids, real, packed_seq_params, config.pad_token_id)
    layout = arranged.layout
    # Padding added by the layout is identified by its mask, so any token id is valid.
    ids = arranged.take(input_ids, fill=config.pad_token_id or 0)
    uncounted = None
    if padding_mask is not None:
        excluded = check_mask(padding_mask if of_row else arranged.take(padding_mask, fill=1), ids, *_PADDING_MASK)
        padding = layout.padding_mask().view(ids.shape)
        wrong = (padding & ~excluded).flatten().nonzero()
        if len(wrong):
            raise ValueError(
                f"padding_mask has 0 for token {int(wrong[0])} of the packed row, expected 1 for padding, as "
                "packed_seq_params or attention_mask have it"
            )
        uncounted = excluded & ~padding
    axes = None
    if position_ids is not None:
        has_masks = real is not None or packed_seq_params is not None
        axes = given_positions(config, position_ids, ids, arranged, has_masks)
    merge, tokens = tower.spatial_merge_size, (config.image_token_id, config.video_token_id)
    vision = None
    if encodes:
        vision = make_vision_inputs(
            pixel_values,
            image_grid_thw,
            pixel_values_videos,
            video_grid_thw,
            num_position_embeddings=tower.num_position_embeddings,
            spatial_merge_size=merge,
        )
    positions = mrope_positions(  # always computed: it checks that tokens and grids match
        ids,
        layout,
        image_grid_thw,
        video_grid_thw,
        image_token_id=tokens[0],
        video_token_id=tokens[1],
        spatial_merge_size=merge,
    )
    if axes is not None:
        positions = arranged.take(axes).long().masked_fill(layout.padding_mask().view(ids.shape), 0)
    image_patches = 0 if image_grid_thw is None else int(image_grid_thw.prod(-1).sum())
    batch = TokenBatch(
        input_ids=ids,
        labels=torch.zeros_like(ids),
        loss_mask=torch.ones(ids.shape),
        position_ids=positions,
        vision_slot=vision_slots(ids, *tokens, image_patches // merge**2),
        layout=layout,
        vision=vision,
        uncounted=uncounted,
    )
    return batch, arranged


OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_READ = (
    *("input_ids", "position_ids", "attention_mask", "padding_mask", "labels", "loss_mask"),
    *("image_grid_thw", "video_grid_thw"),
)


def read_arguments(arguments: dict[str, Any], cp_group: ProcessGroup | None = None) -> dict[str, Any]:
    """The arguments of a call, as for `as_model_inputs`, with those that are read copied to the host, in one wait.

    Slices of a row, which its lengths tell (one row [1, n] with `packed_seq_params` whose physical lengths add up to
    cp * n), are replaced by the whole row, see `whole_row`. The host then waits twice more, to compare and to read.

    A square attention mask, [B or 1, 1, S, S] or [B or 1, S, S], is replaced by that of real tokens, [B, S], which is
    computed on its device, because its size is quadratic in the tokens. It has to be causal, with padding that no real
    token attends to: attention here is always causal, and padding is placed last. The value that means "masked" is
    determined from the first token's entry for the last token, which it must not attend to; so Megatron's booleans,
    transformers' inverted ones and additive masks are all supported. A token that does not attend to itself is padding.
    One causal mask shared by all rows says nothing about padding, and is replaced by None.

    A mask [B, 1, 1, S] is Transformer Engine's: booleans, True for padding, which is on the right.

    Raises:
        ValueError: a square mask with another shape, other values or another meaning; and see `whole_row`.
    """
    given = {name: value for name in _READ if isinstance(value := arguments.get(name), Tensor)}
    ids, mask, brief = given.get("input_ids"), None, {}
    shape = given["attention_mask"].shape if "attention_mask" in given else ()
    of_keys = len(shape) == 4 and shape[1] == shape[2] == 1 < shape[3]
    if of_keys:
        given["attention_mask"] = given["attention_mask"][:, 0, 0]
    elif len(shape) > 2:
        mask = given.pop("attention_mask")
        squares = mask.squeeze(1) if mask.dim() == 4 else mask
        readable = ids is not None and ids.dim() == 2 and ids.numel() > 0  # or they are refused
        if readable and len(squares) in (1, len(ids)) and squares.shape[1:] == (ids.shape[1],) * 2:
            read_squares = (_of_square(square, squares[0, 0, -1]) for square in squares)
            brief = {str(row): torch.cat((real, wrong.any()[None])) for row, (real, wrong) in enumerate(read_squares)}
    packed = copy.copy(arguments.get("packed_seq_params"))
    offsets = {name: value for name in OFFSETS if isinstance(value := getattr(packed, name, None), Tensor)}
    read = on_host(given | offsets | brief)
    for name in offsets:
        setattr(packed, name, read.pop(name))
    brief = [read.pop(row) for row in brief]
    read = arguments | read | (dict(packed_seq_params=packed) if offsets else {})

    if of_keys:
        padding = read["attention_mask"]
        if padding.dtype != torch.bool or padding[:, :1].any():
            raise ValueError(
                f"attention_mask has shape {list(shape)} {padding.dtype}, expected one of that shape to be Transformer "
                "Engine's, booleans, True for padding, and a token first in each row; or [rows, tokens], 1 for real "
                "tokens"
            )
        read["attention_mask"] = ~padding
    ids = read["input_ids"]
    if ids is None or ids.dim() != 2 or not ids.numel():
        return read  # which is refused
    cp_size = 1 if cp_group is None else cp_group.size()
    if cp_size > 1 and packed is not None and len(ids) == 1:
        logical, physical = segment_lengths(packed)
        if int(physical.sum()) == cp_size * ids.shape[1]:
            read |= whole_row(arguments, _packed_layout(logical, physical), cp_group)
    if mask is None:
        return read
    rows, tokens = ids.shape
    if not brief:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, expected [{rows}, {tokens}], 1 for real tokens and 0 for "
            f"padding, or what tokens see, [{rows} or 1, 1, {tokens}, {tokens}]"
        )
    if tokens == 1:
        return read | dict(attention_mask=None)
    real, wrong = torch.stack(brief).split((tokens, 1), -1)
    if wrong.any() or not real.any():
        row = int(wrong.int().argmax())
        entries = _of_square(squares[row], squares[0, 0, -1])[1].nonzero()
        token, other = entries[0].tolist() if len(entries) else (0, tokens - 1)
        raise ValueError(
            f"attention_mask says what each token sees, and has {squares[row, token, other].item()} for "
            f"token {token} and token {other} of row {row}. Expected a causal mask that also hides padding, of "
            "booleans, 0 and 1, or numbers to be added; or [rows, tokens] that only marks padding; several documents "
            "in a row need packed_seq_params"
        )
    return read | dict(attention_mask=None if len(real) == 1 and real.all() else real.expand(rows, tokens))


# Entries of an additive mask at or below this value mean "masked"; the constant is Megatron's.
_NEVER = -10000.0


def _of_square(square: Tensor, hides: Tensor) -> tuple[Tensor, Tensor]:
    """Of one row's mask on its device, without a wait: real tokens [S], and [S, S] entries that a causal mask with
    padding does not have.
    """
    hidden = square.bool() == hides.bool()
    known = square.bool().to(square.dtype) == square
    if square.is_floating_point():
        added = hides < 0
        hidden = torch.where(added, square <= _NEVER, hidden)
        known = torch.where(added, hidden | (square == 0), known)
    real = ~hidden.diagonal()
    wrong = ~known | ((hidden == real.expand(square.shape).tril()) & real[:, None])
    wrong[0, -1] |= square[0, -1] != hides
    return real, wrong


_PADDING_MASK = ("padding_mask", "1 for padding, 0 for real tokens")


def real_tokens(attention_mask: Tensor | None, padding_mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """The real (non-padding) tokens [B, S] by masks [B, S] on the host; None without a mask."""
    real = None if attention_mask is None else check_mask(attention_mask, ids)
    if padding_mask is None:
        return real
    without = ~check_mask(padding_mask, ids, *_PADDING_MASK)
    if real is None:
        return without
    if (without & ~real).any():
        row, token = (int(index) for index in (without & ~real).nonzero()[0])
        raise ValueError(f"padding_mask has 0 for token {token} of row {row}, expected 1 to agree with attention_mask")
    return real


def check_mask(
    mask: Tensor, ids: Tensor, name: str = "attention_mask", meaning: str = "1 for real tokens, 0 for padding"
) -> Tensor:
    """Check a mask of 0 and 1 with any dtype and return it as [B, S] bool."""
    if mask.shape != ids.shape:
        raise ValueError(f"{name} has shape {list(mask.shape)}, expected {list(ids.shape)}: {meaning}")
    wrong = mask.bool().to(mask.dtype) != mask
    if wrong.any():
        raise ValueError(f"{name} has an entry {mask[wrong][0].item()}, expected {meaning}")
    return mask.bool()


@dataclass(frozen=True)
class Arrangement:
    """A caller's batch as a layout."""

    layout: SequenceLayout  # the segments
    shape: tuple[int, int]  # B and S of the caller
    # [T] int64, the caller's token at each position of the layout, -1 for padding that the caller's rows do not have;
    # or None if the order is the same.
    sources: Tensor | None = None
    packed: bool = False  # whether the caller describes a packed row

    def take(self, values: Tensor, fill: int = 0) -> Tensor:
        """[..., B, S] values of the caller's tokens -> [..., b, s] in the layout, with `fill` for added padding."""
        flat = values.flatten(-2)
        if self.sources is not None:
            flat = F.pad(flat, (0, 1), value=fill)[..., self.sources]  # index -1 reads the appended fill value
        return flat.unflatten(-1, (self.layout.num_rows, -1))

    def output_order(self, labels: Tensor | None) -> OutputConversion:
        """How outputs in the order of the layout get the caller's order, [B, S, ...] as the ids.

        With packed-sequence parameters only losses do, if their labels are [B, S]. Logits, and losses of labels [1, T],
        stay the packed row that the parameters describe: Megatron-Bridge's own model returns them so, and RL frameworks
        unpack them.
        """
        wanted = labels is not None and labels.shape == self.shape if self.packed else True
        if not wanted or (self.sources is None and self.shape[0] == self.layout.num_rows):
            return OutputConversion()
        sources = torch.arange(self.layout.total) if self.sources is None else self.sources
        slots = torch.full((self.shape[0] * self.shape[1],), -1)
        slots[sources[sources >= 0]] = (sources >= 0).nonzero().squeeze(-1)
        return OutputConversion(slots.view(self.shape), drops=bool((slots < 0).any()))


def arrange(
    ids: Tensor, attention_mask: Tensor | None, packed: PackedSeqParams | None, pad_token_id: int | None
) -> Arrangement:
    """Detect the convention of a batch of ids [B, S] on the host and return its layout.

    Without `packed`, each row is a segment. With it, the offsets decide:

    - As many segments as rows: segment i contains the real tokens of row i, padded or truncated to the segment's length
      in the packed row. (One row that is as long as its segment is a flat row, see below, unless it begins with
      padding.)
    - Otherwise the concatenated rows are the packed row, and a segment begins at each row.

    Real tokens are those of `attention_mask` [B, S] if it is given, else those counted by `packed`, else all but a
    trailing run of `pad_token_id` in each row. The last rule is a heuristic used as the last resort: a document may end
    with that token. It affects which tokens experts process and count, but not the results of tokens before the run.

    Raises:
        ValueError: masks and offsets that contradict each other or match none of these conventions.
    """
    keep = None if attention_mask is None else attention_mask.bool()
    rows, tokens = ids.shape
    if packed is None:
        keep = without_trailing(ids, pad_token_id) if keep is None else keep
        first, lengths = _runs(keep)
        rolled = (torch.arange(tokens) + first[:, None]) % tokens + torch.arange(rows)[:, None] * tokens
        layout = SequenceLayout.rows(lengths.tolist(), tokens)
        return Arrangement(layout, (rows, tokens), sources=rolled.flatten() if first.any() else None)
    logical, physical = segment_lengths(packed)
    flat = rows == 1 and physical[0] == tokens and (keep is None or bool(keep[0, 0]))
    if len(physical) == rows and not flat:
        return _packed_rows((rows, tokens), keep, logical, physical)
    return _packed_row((rows, tokens), keep, logical, physical)


# Such rows have already been gathered, see `whole_row`.
_SHARE = (
    "The model's forward also takes one flat row that is a context-parallel rank's share, of offsets that count its "
    "tokens times the ranks"
)


def _packed_rows(shape: tuple[int, int], keep: Tensor | None, logical: Tensor, physical: Tensor) -> Arrangement:
    """The real tokens of each row are a segment of a packed row."""
    tokens = shape[1]
    if keep is None:
        keep = torch.arange(tokens) < logical[:, None]
        if int(logical.max()) > tokens:
            row = int(logical.argmax())
            raise ValueError(
                f"packed_seq_params has {int(logical[row])} tokens for row {row} of {tokens}; expected its real "
                f"tokens, or an attention_mask that tells them. {_SHARE}"
            )
    first, lengths = _runs(keep)
    _check_counts(lengths, logical, physical)
    layout = _packed_layout(lengths, physical)
    segment, within = _places(physical)
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
        segment, within = _places(physical)
        lengths = torch.zeros_like(physical).index_add(0, segment, keep.flatten().long())
        wrong = (keep.flatten() != (within < lengths[segment])).nonzero()
        if len(wrong):
            raise ValueError(
                f"attention_mask has padding before real tokens in segment {int(segment[wrong[0]])} of the packed row; "
                "expected a segment's real tokens first and its padding after them"
            )
        _check_counts(lengths, logical, physical)
    return Arrangement(_packed_layout(lengths, physical), shape, packed=True)


def _places(physical: Tensor) -> tuple[Tensor, Tensor]:
    """[T] the segment of each token of a packed row, and its place in the segment."""
    segment = torch.arange(len(physical)).repeat_interleave(physical)
    return segment, torch.arange(len(segment)) - (physical.cumsum(0) - physical)[segment]


def _runs(keep: Tensor) -> tuple[Tensor, Tensor]:
    """First real token [B] and number of real tokens [B], for rows whose real tokens are contiguous."""
    first, lengths = keep.int().argmax(-1), keep.sum(-1)
    token = torch.arange(keep.shape[1])
    run = (token >= first[:, None]) & (token < (first + lengths)[:, None])
    holes = (keep != run).any(-1).nonzero()
    if len(holes):
        raise ValueError(
            f"attention_mask has padding between real tokens in row {int(holes[0])}; expected padding on the left or "
            "right of a row. Several documents in a row need packed_seq_params"
        )
    return first, lengths


def without_trailing(ids: Tensor, pad_token_id: int | None) -> Tensor:
    """[B, S] bool, False for a trailing run of `pad_token_id` in a row."""
    real = torch.ones_like(ids, dtype=torch.bool) if pad_token_id is None else ids != pad_token_id
    return real.flip(-1).cummax(-1).values.flip(-1)


def segment_lengths(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """Logical and physical segment lengths [n], int64, from offsets on the host."""
    given = {name: tensor.long() for name in OFFSETS if (tensor := getattr(packed, name)) is not None}
    logical = given.get("cu_seqlens_q")
    if packed.qkv_format != "thd" or logical is None:
        raise ValueError(
            f"packed_seq_params has qkv_format {packed.qkv_format!r} and cu_seqlens_q {packed.cu_seqlens_q}, expected "
            "'thd' and the offsets of the segments"
        )
    if packed.local_cp_size is not None:
        raise ValueError(
            f"packed_seq_params has local_cp_size {packed.local_cp_size}, expected None: this model's rows are shared "
            "by all context-parallel ranks; turn dynamic context parallelism off"
        )
    physical = given.get("cu_seqlens_q_padded", logical)
    for name, offsets in given.items():
        if offsets.dim() != 1 or len(offsets) < 2 or offsets[0] != 0 or (offsets.diff() < 0).any():
            raise ValueError(f"{name} is {offsets.tolist()}, expected offsets that ascend from 0")
        ours = physical if "padded" in name else logical
        if not torch.equal(offsets, ours):
            raise ValueError(f"{name} is {offsets.tolist()}, expected {ours.tolist()} as for queries")
    if logical.shape != physical.shape:
        raise ValueError(f"cu_seqlens_q has {len(logical)} entries, cu_seqlens_q_padded {len(physical)}")
    return logical.diff(), physical.diff()


def _check_counts(lengths: Tensor, logical: Tensor, physical: Tensor) -> None:
    """Refuse a mask whose number of real tokens differs from that of the offsets.

    Offsets may include a segment's padding: RL frameworks round lengths up and keep only the rounded ones.
    """
    agree = (lengths == logical) | ((logical == physical) & (lengths <= logical))
    wrong = (~agree).nonzero()
    if len(wrong):
        segment = int(wrong[0])
        raise ValueError(
            f"segment {segment}: attention_mask has {int(lengths[segment])} real tokens, packed_seq_params "
            f"{int(logical[segment])} in a length of {int(physical[segment])}"
        )


def _packed_layout(lengths: Tensor, physical: Tensor) -> SequenceLayout:
    """Layout of one packed row. Empty segments are dropped: offset tables of a fixed size repeat their last entry."""
    if (lengths > physical).any() or not physical.any():
        raise ValueError(
            f"packed_seq_params has segments of {lengths.tolist()} tokens in lengths of {physical.tolist()}, expected "
            "no more tokens than their lengths, and at least one token"
        )
    return SequenceLayout.of(1, lengths[physical > 0].tolist(), physical[physical > 0].tolist())


def given_positions(
    config: VisionLanguageProvider, position_ids: Tensor, ids: Tensor, arranged: Arrangement, has_masks: bool
) -> Tensor | None:
    """The given positions on three axes, [3, B, S], or None if they have to be derived; `ids` [b, s] are arranged.

    transformers uses [B, S] for all three axes and [4, B, S] with text positions first, and detects the documents of a
    packed row from text positions that do not increase by one, unless a mask is given. Positions [B, S] for a batch
    with images or videos are text positions, which callers often pass by default: Megatron-Bridge ignores them, and so
    does this function if they only express the order of tokens. Others are refused with a ValueError.
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
    text = arranged.take(position_ids if position_ids.dim() == 2 else position_ids[0]).flatten()
    layout = arranged.layout
    segment, real = layout.per_token(torch.arange(len(layout.lengths))), ~layout.padding_mask()
    together = real[1:] & (segment[1:] == segment[:-1])
    in_order = not bool((together & (text.diff() != 1)).any())  # counts up by one, from any first value
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
    _warn_once(
        "position_ids [rows, tokens] are those of text, in a batch with images or videos: they are ignored, and "
        "positions on three axes are worked out from the tokens and grids"
    )
    return None


# The ignore_index of torch's cross_entropy, which collators set for tokens that are not trained on.
IGNORE_INDEX = -100


def with_labels(
    batch: TokenBatch, arranged: Arrangement, labels: Tensor | None, loss_mask: Tensor | None, vocab_size: int
) -> TokenBatch:
    """A batch with labels and mask of the whole of it: [B, S] in the caller's order, or [1, T] for a packed row.

    Labels are `IGNORE_INDEX` where no loss is defined: where the mask is 0, anything is allowed.

    Raises:
        ValueError: other shapes, one that could be either order, or unmasked labels that are not token ids below
            `vocab_size`.
    """
    in_layout = (1, arranged.layout.total) if arranged.packed else None
    shapes = [arranged.shape, in_layout] if in_layout not in (None, arranged.shape) else [arranged.shape]
    if labels is not None:
        if loss_mask is not None and loss_mask.shape != labels.shape:
            raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {list(labels.shape)} as labels")
        labels = _readable(labels, loss_mask, shapes, vocab_size)
    elif loss_mask is not None and loss_mask.shape not in shapes:
        raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {_words(shapes)}")
    for name, values in (("labels", labels), ("loss_mask", None if loss_mask is None else loss_mask.float())):
        if values is None:
            continue
        if values.shape != in_layout:
            values = arranged.take(values)
        elif in_layout == arranged.shape and arranged.sources is not None:
            raise ValueError(
                f"labels or loss_mask has shape {list(in_layout)} for a row that begins with padding and is as long as "
                "its segment in packed_seq_params, so its order could be either's: expected a row without padding on "
                "the left"
            )
        batch = replace(batch, **{name: values})
    return batch


def _readable(labels: Tensor, loss_mask: Tensor | None, shapes: list, vocab_size: int) -> Tensor:
    """Check that unmasked labels are token ids, and replace all entries that are not token ids by `IGNORE_INDEX`."""
    right = (labels >= 0) & (labels < vocab_size)
    free = labels == IGNORE_INDEX if loss_mask is None else loss_mask == 0
    if labels.is_floating_point() or labels.shape not in shapes or not bool((right | free).all()):
        entries = [labels.min().item(), labels.max().item()] if labels.numel() else []
        raise ValueError(
            f"labels has shape {list(labels.shape)} {labels.dtype} and entries in {entries}, expected "
            f"{_words(shapes)} token ids below {vocab_size}, and anything else only where loss_mask is 0, or "
            f"{IGNORE_INDEX} without one"
        )
    return torch.where(right, labels, IGNORE_INDEX)


def _words(shapes: list) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)


@dataclass(frozen=True)
class OutputConversion(Movable):
    """The conversion of the outputs of one call, on their device."""

    # [B, S] int64, each of the caller's tokens in the flat layout, -1 if dropped; None if outputs are in that order.
    slots: Tensor | None = None
    drops: bool = False  # whether tokens were dropped
    unlabelled: Tensor | None = None  # [b, s] bool, True where a label is ignored and the loss is 0
    # [b, s] this rank's slice of a mask given for the whole batch, returned with the output as in Megatron-Bridge's own
    # model; None if the caller already has the slice.
    loss_mask: Tensor | None = None

    @property
    def changes_outputs(self) -> bool:
        """Whether there is anything to convert."""
        return any(part is not None for part in (self.slots, self.unlabelled, self.loss_mask))

    def of(self, output: Any) -> Any:
        """[b, s, ...] outputs in the caller's form, with zeros for dropped tokens, which were padding; with the slice
        of the loss mask if there is one.
        """
        if self.unlabelled is not None:
            output = output.masked_fill(self.unlabelled, 0)
        if self.slots is not None:
            flat = output.flatten(0, 1)
            if self.drops:
                flat = torch.cat((flat, flat.new_zeros(1, *flat.shape[1:])))  # the row read by index -1
            output = flat.index_select(0, (self.slots % len(flat)).flatten()).unflatten(0, self.slots.shape)
        return output if self.loss_mask is None else (output, self.loss_mask)

    def of_processor(self) -> Self:
        """Like `of`, for what a caller's own `output_processor` computes from hidden states.

        Raises:
            ValueError: the processor would see tokens in an order that differs from the caller's.
        """
        if self.slots is not None:
            raise ValueError(
                "output_processor is given for rows that reach the model in another order than the caller's, which "
                "only the caller can undo in what it returns: expected rows padded on the right, or packed_seq_params "
                "and labels in the packed row's order, [1, tokens]"
            )
        return replace(self, unlabelled=None)
