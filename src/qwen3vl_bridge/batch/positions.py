"""Multimodal rotary positions: a temporal, a height and a width position for each token.

The rule: text tokens increase all three positions by one. Within a run of vision tokens (an image, or one frame of a
video) each position is the run's start plus the token's frame, row or column; the next token continues after the longer
side. Positions restart in each segment. Padding is at position 0.
Legend: B rows, S tokens a row, T = B * S, K runs of vision tokens with R rows, M vision tokens.
"""

from __future__ import annotations

from qwen3vl_bridge.batch.token_layout import SequenceLayout
from qwen3vl_bridge.batch.vision_inputs import check_grids, describe, frames

import torch
from torch import Tensor


def mrope_positions(
    input_ids: Tensor,
    layout: SequenceLayout,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    *,
    image_token_id: int,
    video_token_id: int,
    spatial_merge_size: int,
) -> Tensor:
    """Positions of every token, equal to those of transformers' `get_rope_index` for each segment separately.

    Args:
        input_ids: [B, S] integers.
        layout: the segments.
        image_grid_thw: [images, 3] integers, grids in patches in the order of their tokens, or None.
        video_grid_thw: [videos, 3] integers, the same for videos. Each frame has its own run of tokens.
        image_token_id: id of the placeholder token of images.
        video_token_id: id of the placeholder token of videos.
        spatial_merge_size: patches that become one token, along each side.

    Returns:
        [3, B, S] int64.

    Raises:
        ValueError: the number of tokens differs from the layout's, or vision tokens and grids disagree: in number, or
            because an image's tokens are not one run inside one segment, or are in padding.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != layout.num_rows or input_ids.numel() != layout.total:
        raise ValueError(
            f"input_ids: found {list(input_ids.shape)}, expected "
            f"[{layout.num_rows}, {layout.total // layout.num_rows}] as the layout has it"
        )
    ids, merge = input_ids.reshape(-1), torch.tensor([1, spatial_merge_size, spatial_merge_size])
    images = check_grids("image", image_grid_thw, spatial_merge_size) // merge
    videos = frames(check_grids("video", video_grid_thw, spatial_merge_size)) // merge
    if not len(images) and not len(videos) and not (ids == image_token_id).logical_or_(ids == video_token_id).any():
        return _text_positions(layout).repeat(3, 1).view(3, *input_ids.shape)
    image, image_starts = _runs("image", ids, image_token_id, images, layout)
    video, video_starts = _runs("video", ids, video_token_id, videos, layout)
    padding = layout.padding_mask()
    text = ~(padding | image | video)
    step = torch.stack((text, text, ~padding)).long()
    _step_through_runs(step, torch.cat((image_starts, video_starts)), torch.cat((images, videos)), layout)
    return step.cumsum_(-1).view(3, *input_ids.shape)  # in place: allocating new memory takes as long as the sum


def _text_positions(layout: SequenceLayout) -> Tensor:
    """[T] positions of rows without images; takes a quarter of the time of stepping through no runs."""
    begins = layout.per_token(layout.cu_seqlens_padded[:-1])
    return (torch.arange(layout.total) - begins).masked_fill_(layout.padding_mask(), 0)


def _step_through_runs(step: Tensor, starts: Tensor, sides: Tensor, layout: SequenceLayout) -> None:
    """Fill `step` [3, T] with the difference between each token's position and its predecessor's.

    Positions are the cumulative sums of these steps. Only tokens at the start or end of a row, run or segment have a
    step other than the default, so one pass over the batch suffices.

    Args:
        step: default steps: 1 for text on all axes, for vision tokens only on the last axis, and 0 for padding. Changed
            in place.
        starts: [K] the first token of each run.
        sides: [K, 3] sides of the runs in tokens.
        layout: the segments.
    """
    lengths, longer = sides.prod(-1), sides[:, 1:].amax(-1)
    row, run = _rows(sides)
    _, height, width = sides[run].unbind(-1)
    token = starts[run] + row * width
    # The first row of a run starts where text would continue; later rows return to the run's first column, and new
    # frames to its first row.
    later, frame = (row > 0).long(), (row % height == 0).long()
    step[:, token] = torch.stack((frame, 1 - frame * later * height, 1 - later * width))
    # The token after a run continues after the longer of its sides. The last run of a batch may have no token after it.
    ends = starts + lengths
    after = ends < layout.total
    step[:, ends[after]] = (longer - (sides - 1).T)[:, after]
    begins = layout.cu_seqlens_padded[:-1].long()
    step[:, begins] = 0
    # Where a segment's real tokens end, its last position is subtracted again.
    real = layout.cu_seqlens.diff()
    stops = begins + real
    segment = _segment(layout, starts)
    count = real.long().index_add(0, segment, longer - lengths)
    last = (count - 1).repeat(3, 1)
    closing = ends == stops[segment]
    last[:, segment[closing]] = (count[segment] - longer + (sides - 1).T)[:, closing]
    back = (real > 0) & (stops < layout.total)
    step[:, stops[back]] = -last[:, back]


def _rows(sides: Tensor) -> tuple[Tensor, Tensor]:
    """[R] index of each row within its run, over all frames, and [R] its run, for runs with `sides` [K, 3]."""
    rows = sides[:, 0] * sides[:, 1]
    run = torch.arange(len(sides)).repeat_interleave(rows)
    return torch.arange(len(run)) - (rows.cumsum(0) - rows)[run], run


def _runs(kind: str, ids: Tensor, token_id: int, sides: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """[T] bool, True for the kind's tokens, and [K] the first token of each run.

    A contiguous sequence of vision tokens may consist of several runs, because images need no token between them.
    Raises ValueError if the tokens do not form one run per image or frame.
    """
    fenced = torch.zeros(len(ids) + 2, dtype=torch.bool)
    inside = torch.eq(ids, token_id, out=fenced[1:-1])
    begins, ends = (fenced[1:] != fenced[:-1]).nonzero().view(-1, 2).unbind(-1)  # of contiguous sequences
    before = (ends - begins).cumsum(0) - (ends - begins)
    lengths = sides.prod(-1)
    rank = lengths.cumsum(0) - lengths
    if int(lengths.sum()) == int((ends - begins).sum()):
        stretch = torch.searchsorted(before, rank, right=True) - 1
        starts = begins[stretch] + rank - before[stretch]
        segment = _segment(layout, starts)
        stops = layout.cu_seqlens_padded[segment] + layout.cu_seqlens.diff()[segment]
        if (starts + lengths <= torch.minimum(ends[stretch], stops)).all():
            return inside, starts
    raise _mismatch(kind, inside.nonzero().squeeze(-1), sides, layout)


def _segment(layout: SequenceLayout, tokens: Tensor) -> Tensor:
    """Index of the segment that contains each token, for `tokens` [any] of the flat batch."""
    return torch.searchsorted(layout.cu_seqlens_padded.long(), tokens, right=True) - 1


def _mismatch(kind: str, tokens: Tensor, sides: Tensor, layout: SequenceLayout) -> ValueError:
    """Error for vision tokens (ascending indices `tokens` [M]) that do not form one run per image or frame."""
    lengths, padding = sides.prod(-1), layout.padding_mask()
    ends, segment = lengths.cumsum(0), _segment(layout, tokens)
    if padding[tokens].any():
        wrong = int(padding[tokens].nonzero()[0])
        return ValueError(f"segment {int(segment[wrong])}: {kind} token at {int(tokens[wrong])} is in padding")
    complete = ends <= len(tokens)
    first, last = (ends - lengths)[complete], ends[complete] - 1
    whole = (tokens[last] - tokens[first] == last - first) & (segment[last] == segment[first])
    good = int(whole.long().cumprod(0).sum())
    used = int(lengths[:good].sum())
    # Runs up to here are right. The next item is an image or frame with too few tokens, or tokens without an image.
    where = f"segment {int(segment[used])}" if used < len(tokens) else "the batch"
    if good == len(sides):
        return ValueError(
            f"{where}: {len(tokens) - used} {kind} tokens from token {int(tokens[used])} on belong to no image or "
            f"video: found {len(tokens)} in the batch, expected {int(lengths.sum())} for {len(sides)} {_unit(kind)}"
        )
    ahead, place = tokens[used:], torch.arange(len(tokens) - used)
    joined = (ahead - place == ahead[:1]) & (segment[used:] == segment[used : used + 1])
    found = int(joined.long().cumprod(0).sum())
    return ValueError(
        f"{where}: {_unit(kind)[:-1]} {good} of {describe(sides[good])} tokens found {found} {kind} tokens "
        f"in one run, expected {int(lengths[good])}; in all found {len(tokens)}, expected {int(lengths.sum())}"
    )


def _unit(kind: str) -> str:
    return "images" if kind == "image" else "video frames"
