"""Position ids given by callers.

What lives here: the meaning of `position_ids` of each shape in transformers, Megatron-Bridge and RL frameworks. What
may not: positions derived from tokens and grids (`batch/positions.py`), angles (`models/common/rope.py`).
Legend: B rows, S tokens per row.
"""

from __future__ import annotations

import logging
from functools import cache

from qwen3vl_bridge.models.common.inputs.padding_and_packing import Arrangement
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def given_positions(
    config: VisionLanguageProvider, position_ids: Tensor, ids: Tensor, arranged: Arrangement, has_masks: bool
) -> Tensor | None:
    """The given positions on three axes, [3, B, S], or None if they have to be derived.

    transformers uses [B, S] for all three axes and [4, B, S] with text positions first, and detects the documents of a
    packed row from text positions that do not increase by one, unless a mask is given. Positions [B, S] for a batch
    with images or videos are text positions, which callers often pass by default: Megatron-Bridge ignores them, and so
    does this function if they only express the order of tokens.

    Args:
        config: the provider.
        position_ids: [3, B, S], [4, B, S] or [B, S].
        ids: [b, s] arranged.
        arranged: maps the caller's tokens to positions in the layout.
        has_masks: whether the caller also gives masks or segments.

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
    _warn()
    return None


def _counts_up(text: Tensor, arranged: Arrangement) -> bool:
    """Whether positions [B, S] increase by one over the real tokens of each segment, from any first value."""
    layout, flat = arranged.layout, arranged.take(text).flatten()
    segment, real = layout.per_token(torch.arange(len(layout.lengths))), ~layout.padding_mask()
    together = real[1:] & (segment[1:] == segment[:-1])
    return not bool((together & (flat.diff() != 1)).any())


@cache
def _warn() -> None:
    """Warn once per process."""
    logger.warning(
        "position_ids [rows, tokens] are those of text, in a batch with images or videos: they are ignored, and "
        "positions on three axes are worked out from the tokens and grids"
    )
