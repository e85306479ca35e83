"""Multimodal rotary positions: a temporal, a height and a width position for each token.

What lives here: the rule that gives them, and the check that pictures and placeholder tokens agree, which the rule
rests on. What may not: rotary angles (the model's), layout questions (`layout.py`), Megatron.

The rule: text counts up by one on all three axes. A run of vision tokens (an image, or one frame of a video) keeps
the count it began with and adds each token's frame, row and column; the count goes on after it from the longer of
its sides. The count restarts in each segment. Padding is at position 0.
Legend: B rows, S tokens a row, T = B * S, K runs of vision tokens, M vision tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grids import check_grids, describe, frames
from .layout import SequenceLayout


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
    """Positions of every token, as transformers' `get_rope_index` gives them to each segment alone.

    Args:
        input_ids: [B, S] integers.
        layout: where the segments lie.
        image_grid_thw: [images, 3] integers, grids in patches in the order of their tokens, or None.
        video_grid_thw: [videos, 3] integers, likewise. Each frame has a run of tokens of its own.
        image_token_id: id of the token that stands for a piece of an image.
        video_token_id: id of the token that stands for a piece of a video.
        spatial_merge_size: patches that become one token, along each side.

    Returns:
        [3, B, S] int64.

    Raises:
        ValueError: if the tokens are not as many as the layout has, or vision tokens and grids disagree: in number,
            or because a picture's tokens are not one run inside one segment, or lie in padding.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != layout.num_rows or input_ids.numel() != layout.total:
        raise ValueError(
            f"input_ids: found {list(input_ids.shape)}, expected "
            f"[{layout.num_rows}, {layout.total // layout.num_rows}] as the layout has it"
        )
    ids, padding = input_ids.reshape(-1), layout.padding_mask()
    within = torch.zeros(3, layout.total, dtype=torch.int64)
    advance = torch.ones(layout.total, dtype=torch.int64)
    runs = {
        "image": (
            image_token_id,
            check_grids("image", image_grid_thw, spatial_merge_size),
        ),
        "video": (
            video_token_id,
            frames(check_grids("video", video_grid_thw, spatial_merge_size)),
        ),
    }
    merge = torch.tensor([1, spatial_merge_size, spatial_merge_size])
    for kind, (token_id, grids) in runs.items():
        tokens = (ids == token_id).nonzero().squeeze(-1)
        if not len(tokens) and not len(grids):
            continue
        sides = grids // merge
        _check_runs(kind, tokens, sides, layout, padding)
        last = tokens[sides.prod(-1).cumsum(0) - 1]
        within[:, tokens] = _places(sides)
        # A run moves the count on at its last token, so that all of its tokens read the count it began with.
        advance[tokens] = 0
        advance[last] = sides[:, 1:].amax(-1)
    count = advance.cumsum(0) - advance
    count -= layout.per_token(count[layout.cu_seqlens_padded[:-1].long()])
    return (count + within).masked_fill(padding, 0).view(3, *input_ids.shape)


def _places(sides: Tensor) -> Tensor:
    """[3, M] frame, row and column of each token, of runs with `sides` [K, 3] in tokens."""
    lengths = sides.prod(-1)
    ends = lengths.cumsum(0)
    total = int(ends[-1])
    starts, height, width = (
        values.repeat_interleave(lengths, output_size=total) for values in (ends - lengths, sides[:, 1], sides[:, 2])
    )
    place = torch.arange(total) - starts
    row = place // width
    return torch.stack((row // height, row % height, place % width))


def _check_runs(kind: str, tokens: Tensor, sides: Tensor, layout: SequenceLayout, padding: Tensor) -> None:
    """Refuses vision tokens that are not one run for each picture; `tokens` [M] are their places, ascending."""
    lengths = sides.prod(-1)
    ends = lengths.cumsum(0)
    cu_seqlens = layout.cu_seqlens_padded.long()
    segment = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    if padding[tokens].any():
        wrong = int(padding[tokens].nonzero()[0])
        raise ValueError(f"segment {int(segment[wrong])}: {kind} token at {int(tokens[wrong])} lies in padding")
    complete = ends <= len(tokens)
    first, last = (ends - lengths)[complete], ends[complete] - 1
    whole = (tokens[last] - tokens[first] == last - first) & (segment[last] == segment[first])
    if whole.all() and len(tokens) == int(lengths.sum()):
        return
    good = int(whole.long().cumprod(0).sum())
    used = int(lengths[:good].sum())
    # Runs up to here are right. What comes next is a picture without enough tokens, or tokens without a picture.
    where = f"segment {int(segment[used])}" if used < len(tokens) else "the batch"
    if good == len(sides):
        raise ValueError(
            f"{where}: {len(tokens) - used} {kind} tokens from token {int(tokens[used])} on belong to no picture: "
            f"found {len(tokens)} in the batch, expected {int(lengths.sum())} for {len(sides)} {_unit(kind)}"
        )
    ahead, place = tokens[used:], torch.arange(len(tokens) - used)
    joined = (ahead - place == ahead[:1]) & (segment[used:] == segment[used : used + 1])
    found = int(joined.long().cumprod(0).sum())
    raise ValueError(
        f"{where}: {_unit(kind)[:-1]} {good} of {describe(sides[good])} tokens found {found} {kind} tokens "
        f"in one run, expected {int(lengths[good])}; in all found {len(tokens)}, expected {int(lengths.sum())}"
    )


def _unit(kind: str) -> str:
    return "images" if kind == "image" else "video frames"
