"""Linear attention under context parallelism without exchanging tokens: ranks exchange states of chunks instead.

Each rank keeps its tokens: two chunks of every segment, each 1 / (2 cp) of it (`core.layout.token_index`; these are not
the chunks of 64 tokens inside kernels). The gated delta rule is linear in the state before a chunk, so a chunk is a map
S -> transition @ S + update. Ranks exchange these maps and compute the state before each of their chunks. Each chunk's
outputs are then computed from the state before it. The convolution needs the last tokens before each chunk, which are
exchanged in the same way. Sources: Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence
Length (2024), for the map of a chunk; Sun et al., Linear Attention Sequence Parallelism (2024).

The number of bytes sent is proportional to the number of segments, not of tokens. Dividing the heads over ranks, as
megatron-core does, sends all tokens twice.

Legend of shapes: b padded rows (1 for a packed row), s tokens of this rank per row, n segments (b for padded rows), h
heads, d and e head dimensions of keys and values, w width of the convolution, cp context-parallel ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from qwen3vl_bridge.core.collectives import broadcast_in_group, chunks_to_lanes, lanes_to_chunks

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

# The context-parallel group of the layer that is being computed in chunks. megatron-core does not pass it to kernels.
_chunk_group: ContextVar[ProcessGroup | None] = ContextVar("chunk_group", default=None)


@contextlib.contextmanager
def chunks_of(group: ProcessGroup) -> Iterator[None]:
    """Context manager that lets wrapped kernels start each chunk where the previous chunk of its segment ends.

    The previous chunk may be on another rank of `group`, the context-parallel group. Kernels are wrapped by
    `continue_convolution` and `continue_rule`.
    """
    token = _chunk_group.set(group)
    try:
        yield
    finally:
        _chunk_group.reset(token)


def continue_convolution(convolution: Callable) -> Callable:
    """Wrap a causal convolution: inside `chunks_of`, its input begins with the tokens before each chunk.

    These tokens may be on other ranks. `convolution` has the arguments of `delta_rule.causal_conv1d`. Inside
    `chunks_of`, `cu_seqlens` of packed rows are offsets of chunks.
    """

    @functools.wraps(convolution)
    def call(x: Tensor, weight: Tensor, *, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        if (group := _chunk_group.get()) is None:
            return convolution(x=x, weight=weight, cu_seqlens=cu_seqlens, **kwargs)
        rows, width = x if cu_seqlens is not None else _split_rows(x), weight.size(-1)
        kwargs["initial_state"] = tokens_before_chunks(rows, cu_seqlens, width, group)
        output, state = convolution(x=rows, weight=weight, cu_seqlens=cu_seqlens, **kwargs)
        return output.reshape(x.shape), state

    return call


def continue_rule(rule: Callable) -> Callable:
    """Wrap a gated delta rule: inside `chunks_of`, each chunk starts from the state after the segment's previous chunk.

    `rule` has the arguments of `delta_rule.chunk_gated_delta_rule`. Inside `chunks_of`, `cu_seqlens` of packed rows are
    offsets of chunks, and a final state is the state after the last chunk of each segment, on all ranks.
    """

    @functools.wraps(rule)
    def call(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **kwargs: Any
    ) -> Any:
        if (group := _chunk_group.get()) is None:
            return rule(query, key, value, g=g, beta=beta, cu_seqlens=cu_seqlens, **kwargs)
        shape, inputs = value.shape, (query, key, value, g, beta)
        if cu_seqlens is None:
            inputs = tuple(map(_split_rows, inputs))
        query, key, value, g, beta = inputs
        chunks = len(key) if cu_seqlens is None else len(cu_seqlens) - 1
        kwargs |= dict(g=g, beta=beta, cu_seqlens=cu_seqlens)
        update, transition = _maps_of_chunks(rule, chunks, query, key, value, kwargs)
        states = states_before_chunks(update, transition, group)
        output, final = rule(query, key, value, **kwargs | dict(initial_state=states))
        # The first rank has the last chunk of each segment.
        final = None if final is None else broadcast_in_group(final[1::2], group)
        return output.reshape(shape), final

    return call


def _split_rows(x: Tensor) -> Tensor:
    """Return the two chunks of each padded row as rows of their own: [b, s, ...] to [2 * b, s / 2, ...]."""
    return x.unflatten(1, (2, -1)).flatten(0, 1)


def _maps_of_chunks(
    rule: Callable, chunks: int, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the map S -> transition @ S + update of each chunk: update [2 n, h, d, e], transition [2 n, h, d, d].

    Columns of a state do not depend on each other. So the rule is computed with d additional columns, which have values
    of zero and start from the unit matrix. After the chunk, they are the transition. Outputs are not used.
    """
    heads, size, columns = key.size(2), key.size(3), value.size(3)
    unit = torch.eye(size, columns + size, dtype=torch.float32, device=key.device).roll(columns, 1)
    start = unit.expand(chunks, heads, size, columns + size).contiguous()
    wide = F.pad(value, (0, size))
    arguments = arguments | dict(initial_state=start, output_final_state=True)
    _, state = rule(query.detach(), key, wide, **arguments)
    return state.split((columns, size), -1)


def states_before_chunks(update: Tensor, transition: Tensor, group: ProcessGroup) -> Tensor:
    """Return the state before each chunk of this rank [2 n, h, d, e], given the map of each chunk of this rank.

    The map is S -> transition @ S + update, where S is the state before the chunk.

    Args:
        update: [2 n, h, d, e], the state after a chunk that starts from zeros.
        transition: [2 n, h, d, d].
        group: the context-parallel group.
    """
    heads, size, columns = update.shape[1:]
    maps = torch.cat((update, transition), -1).unflatten(0, (-1, 2)).transpose(0, 1).flatten(1, 2)
    update, transition = chunks_to_lanes(maps, group).split((columns, size), -1)  # [2 cp, lanes, d, ...]
    states = [torch.zeros_like(update[0])]
    for added, moved in zip(update[:-1].unbind(), transition[:-1].unbind(), strict=True):
        states.append(torch.baddbmm(added, moved, states[-1]))
    states = lanes_to_chunks(torch.stack(states), maps.size(1), group)
    return states.unflatten(1, (-1, heads)).transpose(0, 1).flatten(0, 1)


def tokens_before_chunks(x: Tensor, cu_seqlens: Tensor | None, width: int, group: ProcessGroup) -> Tensor:
    """Return the last `width` - 1 tokens before each chunk, after one entry of zeros: [2 n, channels, `width`].

    Tokens before the segment are zeros. If the previous chunk is too short, tokens of earlier chunks are included.

    Args:
        x: [1, s, channels] of a packed row, or [2 b, s / 2, channels], a row for each chunk.
        cu_seqlens: [2 n + 1], offsets of the chunks of a packed row; None for padded rows.
        width: width of the convolution.
        group: the context-parallel group.
    """
    back = torch.arange(1, width, device=x.device)  # how far a token lies before the end of a chunk
    if cu_seqlens is None:
        tails = F.pad(x, (0, 0, width - 1, 0))[:, -(width - 1) :].flip(1)
        lengths = torch.full((len(x) // 2,), x.size(1), device=x.device)
    else:
        tails = x[0, (cu_seqlens[1:, None] - back).clamp(min=0)]  # [2 n, w - 1, channels]
        lengths = cu_seqlens.diff()[::2]
    channels = x.size(-1)
    lanes = tails.unflatten(0, (-1, 2)).permute(1, 0, 3, 2).flatten(1, 2)  # [2, n * channels, w - 1]
    gathered = chunks_to_lanes(lanes, group)  # [2 cp, lanes of this rank, w - 1]
    # Token `back` before a chunk is in the chunk 1 + (back - 1) // length before it. Entries of the tail of a shorter
    # chunk that precede the chunk are never read.
    all_lanes = lengths.repeat_interleave(channels, output_size=lanes.size(1))
    share = torch.tensor_split(all_lanes, group.size())[group.rank()]
    chunk = torch.arange(len(gathered), device=x.device)[:, None, None] - 1 - (back - 1) // share[:, None]
    entry = ((back - 1) % share[:, None]).expand(len(gathered), -1, -1)
    lane = torch.arange(gathered.size(1), device=x.device)[:, None]
    before = gathered[chunk.clamp(min=0), lane, entry] * (chunk >= 0)
    before = lanes_to_chunks(before, lanes.size(1), group)  # [2, n * channels, w - 1], the nearest token first
    before = before.unflatten(1, (-1, channels)).transpose(0, 1).flatten(0, 1)
    return F.pad(before.flip(-1), (1, 0))
