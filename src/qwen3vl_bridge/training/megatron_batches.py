"""Batches of Megatron-Bridge's collators (dicts) as `TokenBatch`; what would train on wrong targets is refused.

They are complete and on the host when they leave the data loader, and converted there, so that the step does not
synchronize with the device.
Legend: B rows, S tokens per row, T tokens of a packed row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.models.inputs import OFFSETS, Arrangement, as_token_batch, check_mask
from qwen3vl_bridge.models.provider import VisionLanguageProvider

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

logger = logging.getLogger(__name__)

_READ = {
    *("input_ids", "tokens", "labels", "loss_mask", "position_ids", "attention_mask"),
    *("visual_inputs", *OFFSETS),
}
# Derivable from the other keys, or for logging only.
_NOT_NEEDED = {"max_seqlen_q", "max_seqlen_kv", "total_tokens", "metadata", "token_count", "mm_token_type_ids"}
_OURS = "qwen3vl_bridge.Qwen3VLConversationProvider"
_WARNINGS = {
    "image_grid_thw": "Megatron-Bridge's collators resize images twice, which can change their aspect ratio, and use "
    f"other limits than the checkpoint's processor. {_OURS} follows the processor",
    "video_grid_thw": "Megatron-Bridge's collators drop frames of videos, and the times in the text are wrong: they "
    f"assume 24 frames per second for every video. {_OURS} uses each video's own times",
    "cut": f"Megatron-Bridge's collators cut rows at dataset.seq_length, here in the middle of an answer. {_OURS} "
    "rejects, drops or truncates such samples according to on_long, and counts them",
}
_PICTURES = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"}


def from_collator(batch: Mapping[str, Any], config: VisionLanguageProvider, dataset: Any = None) -> TokenBatch:
    """Convert a batch.

    Padded rows remain padded rows, and a row packed by the collator remains one packed row. If the configuration
    requests packing in the step, rows are packed here, without their padding.

    Args:
        batch: on the host: input_ids (or tokens), labels and loss_mask, all [B, S] or [1, T], integers and numbers,
            with labels already shifted; attention_mask [B, S]; for a packed row cu_seqlens_q and, if its segments are
            padded, cu_seqlens_q_padded; position_ids; visual_inputs with pixels [patches, features] and grids [K, 3].
        dataset: the dataset configuration of the batch, which may request packing; or None.

    Returns:
        The batch on the host. Pixels are passed through without a copy: they are most of a batch's bytes, are already
        in pinned memory if the loader pinned them, and are cast by the model, where casting is cheap.

    Raises:
        ValueError: missing or unknown keys; shapes, masks, offsets and images that are inconsistent; labels that are
            not the next tokens; a loss on padding.
        TypeError: the batch is not a mapping.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"found a batch of type {type(batch).__name__}, expected a TokenBatch or a collator's dict")
    given = _check_keys(batch)
    pictures = _pictures(given.get("visual_inputs"))
    try:
        ours, arranged = _arranged(given, pictures, config, dataset)
    except ValueError as error:
        if pictures:
            error.add_note(
                "Megatron-Bridge's collators cut rows at dataset.seq_length, even within images: expected one of at "
                "least the longest sample; and its loop gives each microbatch the images of all if "
                "dataset.dataloader_type is 'batch': expected 'single' or 'cyclic' for data with images"
            )
        raise
    _check_positions(given.get("position_ids"), ours, arranged)
    _check_labels(ours)
    return replace(ours, sample_ids=tuple(str(key) for key in batch.get("__keys__") or ()))


def _check_keys(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys and return those that are used, with the tokens as input_ids."""
    # Energon's metadata keys start with an underscore.
    unknown = sorted(k for k, v in batch.items() if v is not None and k not in _READ | _NOT_NEEDED and k[:2] != "__")
    if unknown:
        raise ValueError(f"the batch has the keys {unknown}, expected only {sorted(_READ | _NOT_NEEDED)}")
    given = {key: batch[key] for key in _READ if batch.get(key) is not None}
    tokens = given.pop("tokens", None)
    if tokens is not None and not torch.equal(given.setdefault("input_ids", tokens), tokens):
        raise ValueError("the batch has tokens that differ from input_ids, expected one of them, or the same twice")
    if missing := sorted({"input_ids", "labels", "loss_mask"} - given.keys()):
        raise ValueError(f"the batch lacks {missing}; found {sorted(batch)}")
    if "cu_seqlens_q" not in given and (stray := sorted(given.keys() & set(OFFSETS))):
        raise ValueError(f"the batch has {stray} without cu_seqlens_q, expected the offsets of the real tokens too")
    shape = given["input_ids"].shape
    for name in ("labels", "loss_mask"):
        if given[name].shape != shape:
            raise ValueError(f"{name} has shape {list(given[name].shape)}, expected {list(shape)} as input_ids")
    return given


def _pictures(visual: Any) -> dict[str, Tensor]:
    """The images and videos of a batch, as arguments of `as_model_inputs`."""
    if visual is None:
        return {}
    given = visual.normalized_for_model()
    if unknown := sorted(given.keys() - _PICTURES - {"mm_token_type_ids"}):
        raise ValueError(f"visual_inputs has {unknown}, which Qwen3-VL does not use: expected {sorted(_PICTURES)}")
    for name in sorted(given.keys() & _WARNINGS.keys()):
        _warn(name)
    return {name: value for name, value in given.items() if name in _PICTURES}


@cache
def _warn(kind: str) -> None:
    """Warn once per process about what can neither be determined from a batch nor corrected in it."""
    logger.warning(_WARNINGS[kind])


def _arranged(
    given: dict[str, Any], pictures: dict[str, Tensor], config: VisionLanguageProvider, dataset: Any
) -> tuple[TokenBatch, Arrangement]:
    ids, mask = given["input_ids"], given.get("attention_mask")
    if "cu_seqlens_q" in given:
        packed = PackedSeqParams("thd", **{name: given.get(name) for name in OFFSETS})
    else:
        packed = _offsets_of_rows(mask, ids, dataset)
    positions = given.get("position_ids")
    return as_token_batch(
        config,
        ids,
        labels=given["labels"],
        loss_mask=given["loss_mask"],
        # Text-only positions [B, S] are also given for rows with images and increase by one through them; M-RoPE
        # positions are derived instead.
        position_ids=positions if positions is not None and positions.dim() == 3 else None,
        attention_mask=mask,
        packed_seq_params=packed,
        **pictures,
    )


def _offsets_of_rows(mask: Tensor | None, ids: Tensor, dataset: Any) -> PackedSeqParams | None:
    """Offsets that turn padded rows into one packed row, if the collator leaves packing to the step."""
    wanted = ("enable_in_batch_packing", "defer_in_batch_packing_to_step")
    if mask is None or not all(getattr(dataset, name, False) for name in wanted):
        return None
    lengths, multiple = check_mask(mask, ids).sum(-1), dataset.in_batch_packing_pad_to_multiple_of
    padded = -(-lengths // multiple) * multiple
    logical, physical = (F.pad(values.cumsum(0), (1, 0)).int() for values in (lengths, padded))
    return PackedSeqParams("thd", logical, logical, physical, physical)


def _check_positions(given: Tensor | None, batch: TokenBatch, arranged: Arrangement) -> None:
    """Refuse text positions that do not increase by one within each segment: they would imply more packed sequences."""
    if given is None or given.dim() == 3:
        return
    if given.shape != arranged.shape:
        raise ValueError(f"position_ids has shape {list(given.shape)}, expected {list(arranged.shape)} as input_ids")
    layout = batch.layout
    expected = torch.arange(layout.total) - layout.per_token(layout.cu_seqlens_padded[:-1].long())
    wrong = (arranged.take(given.cpu()).flatten() != expected) & ~layout.padding_mask()
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"position_ids has {int(arranged.take(given.cpu()).flatten()[first])} for token {int(expected[first])} of "
            "a segment, expected positions that count up from 0: documents packed in a row need cu_seqlens_q"
        )


def _check_labels(batch: TokenBatch) -> None:
    """Refuse a loss on padding and labels that are not the next tokens: both would train on wrong targets."""
    layout, ids = batch.layout, batch.input_ids.flatten()
    trained, labels = batch.loss_mask.flatten() != 0, batch.labels.flatten()
    padding, segment = layout.padding_mask(), layout.per_token(torch.arange(len(layout.lengths)))
    if on_padding := int((trained & padding).sum()):
        raise ValueError(f"loss_mask counts {on_padding} tokens of padding, expected 0 where attention_mask is 0")
    has_next = ~padding[1:] & (segment[1:] == segment[:-1])
    if (trained & ~F.pad(has_next, (0, 1))).any():
        _warn("cut")
    wrong = (trained[:-1] & has_next & (labels[:-1] != ids[1:])).nonzero()
    if len(wrong):
        token = int(wrong[0])
        raise ValueError(
            f"labels has {int(labels[token])} at token {token} of the batch, whose next token is "
            f"{int(ids[token + 1])}: expected labels that are shifted already, and loss_mask with them"
        )
