"""Convert batches of Megatron-Bridge's collators (dicts) to `TokenBatch`, and reject batches with wrong targets.

Batches are converted on the host, where the data loader leaves them. So the step does not synchronize with the device.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import segment_offsets
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.inputs.caller_batches import as_token_batch, check_mask
from qwen3vl_bridge.models.inputs.caller_layout import OFFSETS, CallerLayout

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

logger = logging.getLogger(__name__)

_USED_KEYS = {
    *("input_ids", "tokens", "labels", "loss_mask", "position_ids", "attention_mask"),
    *("visual_inputs", *OFFSETS),
}
# Keys that repeat what other keys say, or that are only for logging.
_IGNORED_KEYS = {"max_seqlen_q", "max_seqlen_kv", "total_tokens", "metadata", "token_count", "mm_token_type_ids"}
_PACK_IN_STEP = ("enable_in_batch_packing", "defer_in_batch_packing_to_step")  # fields of a dataset
_OUR_DATASET = "qwen3vl_bridge.Qwen3VLConversationProvider"
_WARNINGS = {
    "image_grid_thw": "Megatron-Bridge's collators resize images twice, which can change their aspect ratio, and use "
    f"other limits than the checkpoint's processor. {_OUR_DATASET} follows the processor",
    "video_grid_thw": "Megatron-Bridge's collators drop frames of videos, and the times in the text are wrong: they "
    f"assume 24 frames per second for every video. {_OUR_DATASET} uses each video's own times",
    "cut": "Megatron-Bridge's collators cut rows at dataset.seq_length, here in the middle of an answer. "
    f"{_OUR_DATASET} rejects, drops or truncates such samples according to on_long, and counts them",
}
_IMAGE_KEYS = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"}


def from_collator(batch: Mapping[str, Any], config: VisionLanguageProvider, dataset: Any = None) -> TokenBatch:
    """Convert a batch of a Megatron-Bridge collator to a `TokenBatch`.

    Padded rows stay padded, and a packed row stays packed. If `dataset` requests packing in the step, padded rows are
    packed without their padding.

    Args:
        batch: on the host: input_ids (or tokens), labels (already shifted) and loss_mask, all [rows, tokens];
            attention_mask [rows, tokens]; for a packed row cu_seqlens_q and, if its segments are padded,
            cu_seqlens_q_padded; position_ids; visual_inputs with pixels [patches, features] and grids [images, 3].
        dataset: configuration of the dataset, which may request packing; or None.

    Returns:
        The batch on the host. Pixels are not copied.

    Raises:
        ValueError: Keys are missing or unknown; shapes, masks, offsets or images are inconsistent; labels are not the
            next tokens; or loss_mask is not 0 for padding.
        TypeError: The batch is not a mapping.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"found a batch of type {type(batch).__name__}, expected a TokenBatch or a collator's dict")
    given = _check_keys(batch)
    images = _read_images(given.get("visual_inputs"))
    ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
    packed = None
    if "cu_seqlens_q" in given:
        packed = PackedSeqParams("thd", **{name: given.get(name) for name in OFFSETS})
    elif mask is not None and all(getattr(dataset, name, False) for name in _PACK_IN_STEP):
        lengths, multiple = check_mask(mask, ids).sum(-1), dataset.in_batch_packing_pad_to_multiple_of
        padded = -(-lengths // multiple) * multiple
        logical, physical = (F.pad(values.cumsum(0), (1, 0)).int() for values in (lengths, padded))
        packed = PackedSeqParams("thd", logical, logical, physical, physical)
    try:
        converted, arranged = as_token_batch(
            config,
            ids,
            labels=given["labels"],
            loss_mask=given["loss_mask"],
            # Text positions [B, S] ignore images. Only M-RoPE positions [3, B, S] are used; without them, positions are
            # computed.
            position_ids=positions if positions is not None and positions.dim() == 3 else None,
            attention_mask=mask,
            packed_seq_params=packed,
            **images,
        )
    except ValueError as error:
        if images:
            error.add_note(
                "Megatron-Bridge's collators cut rows at dataset.seq_length, even within images: increase it to the "
                "length of the longest sample. If dataset.dataloader_type is 'batch', its loop passes all images to "
                "each microbatch: use 'single' or 'cyclic' for data with images"
            )
        raise
    if positions is not None and positions.dim() != 3:
        _check_positions(positions, converted, arranged)
    _check_labels(converted)
    return replace(converted, sample_ids=tuple(str(key) for key in batch.get("__keys__") or ()))


def _check_keys(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a batch that are used, by key, with the key `tokens` renamed to `input_ids`.

    Raises ValueError for unknown, missing or contradictory keys.
    """
    # Energon's metadata keys start with an underscore.
    unknown = sorted(
        k for k, v in batch.items() if v is not None and k not in _USED_KEYS | _IGNORED_KEYS and k[:2] != "__"
    )
    if unknown:
        raise ValueError(f"the batch has the keys {unknown}, expected only {sorted(_USED_KEYS | _IGNORED_KEYS)}")
    given = {key: batch[key] for key in _USED_KEYS if batch.get(key) is not None}
    tokens = given.pop("tokens", None)
    if tokens is not None and not torch.equal(given.setdefault("input_ids", tokens), tokens):
        raise ValueError("the batch contains tokens that differ from input_ids: remove one of the two keys")
    if missing := sorted({"input_ids", "labels", "loss_mask"} - given.keys()):
        raise ValueError(f"the batch does not have {missing}; found {sorted(batch)}: add these keys in the collator")
    if "cu_seqlens_q" not in given and (stray := sorted(given.keys() & set(OFFSETS))):
        raise ValueError(f"the batch has {stray} without cu_seqlens_q: add cu_seqlens_q, the offsets without padding")
    shape = given["input_ids"].shape
    for name in ("labels", "loss_mask"):
        if given[name].shape != shape:
            raise ValueError(f"{name} has shape {list(given[name].shape)}, expected {list(shape)} like input_ids")
    return given


def _read_images(visual: Any) -> dict[str, Tensor]:
    """Return the images and videos in `visual_inputs` of a batch, as keyword arguments of `as_token_batch`."""
    if visual is None:
        return {}
    given = visual.normalized_for_model()
    if unknown := sorted(given.keys() - _IMAGE_KEYS - {"mm_token_type_ids"}):
        raise ValueError(f"visual_inputs has the keys {unknown}, expected only {sorted(_IMAGE_KEYS)}")
    for name in sorted(given.keys() & _WARNINGS.keys()):
        _warn(name)
    return {name: value for name, value in given.items() if name in _IMAGE_KEYS}


@cache
def _warn(kind: str) -> None:
    """Log a warning of `_WARNINGS` about Megatron-Bridge's collators, each kind once per process."""
    logger.warning(_WARNINGS[kind])


def _check_positions(given: Tensor, batch: TokenBatch, arranged: CallerLayout) -> None:
    """Raise ValueError if the given text positions do not count up from 0 in each segment of the batch.

    Other positions would mean that a segment contains several packed documents.
    """
    if given.shape != arranged.shape:
        raise ValueError(f"position_ids has shape {list(given.shape)}, expected {list(arranged.shape)} like input_ids")
    layout = batch.layout
    expected = segment_offsets(layout.cu_seqlens_padded.diff(), layout.total)
    wrong = (arranged.arrange(given.cpu()).flatten() != expected) & ~layout.padding_mask()
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"position_ids has {int(arranged.arrange(given.cpu()).flatten()[first])} for token {int(expected[first])} "
            "of a segment, expected positions that count up from 0; for packed documents, add cu_seqlens_q"
        )


def _check_labels(batch: TokenBatch) -> None:
    """Raise ValueError if the loss mask is not 0 for padding, or labels are not the next tokens."""
    layout, ids = batch.layout, batch.input_ids.flatten()
    trained, labels = batch.loss_mask.flatten() != 0, batch.labels.flatten()
    padding, segment = layout.padding_mask(), layout.segment_ids()
    if on_padding := int((trained & padding).sum()):
        raise ValueError(f"loss_mask counts {on_padding} tokens of padding, expected 0 where attention_mask is 0")
    has_next = ~padding[1:] & (segment[1:] == segment[:-1])
    if (trained & ~F.pad(has_next, (0, 1))).any():
        _warn("cut")
    wrong = (trained[:-1] & has_next & (labels[:-1] != ids[1:])).nonzero()
    if len(wrong):
        token = int(wrong[0])
        raise ValueError(
            f"labels has {int(labels[token])} at token {token} of the batch, but the next token is "
            f"{int(ids[token + 1])}: shift labels and loss_mask by one token"
        )
