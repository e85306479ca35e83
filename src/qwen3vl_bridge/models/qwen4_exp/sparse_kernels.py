"""Triton kernels of sparse attention: each query attends to the tokens of a list of blocks.

Output and gradients of queries: a Triton program (one instance of a kernel) computes one query, for the query heads
that share a key head. It reads the attended keys and values token by token. Gradients of keys and values: pairs of a
query and a block are sorted by block, and a program computes up to `PIECE` pairs of one block. The results of a block
are added in order, so the same inputs always have the same gradients. Memory is proportional to the number of tokens.
The host never waits for the device.

Softmax is computed tile by tile, and again in the backward pass from the saved logarithms of its sums, as in
FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithms 1 and 2).

Legend of shapes: t queries, T tokens, h query heads, g key heads, d head dimension, k blocks of a query, B blocks,
p programs of gradients of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 2048  # pairs of a query and a block; a block of 4 tokens has as many if each query attends to 512 blocks
# Rows or tokens that a program processes in one step, times the bytes of an element. For gradients of keys, a row is
# one head of one query.
STEP_BYTES = 128
SMALLEST_PRODUCT = 16  # smallest number of rows and columns in a matrix product on tensor cores
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b):
    """Return a @ b in float32. Inputs in float32 are not rounded to TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def read_tile(
    q, key, value, blocks, offsets, slots, count, last, scale, key_stride, value_stride, dims, RATIO: tl.constexpr
):
    """Return a tile of the keys and values of one query, and its scores in units of log(2).

    Args:
        q: query of each head.
        key, value: pointers to the first token of a head.
        blocks: pointer to the query's list of blocks; -1 is no block.
        offsets: pointer to the first token of each block.
        slots: places in the list of attended tokens: index in `blocks` times `RATIO`, plus index in the block.
        count: number of entries of `blocks` up to the last block.
        last: the query's own token, the last one that it may attend to.
        scale: factor of the scores.
        key_stride, value_stride: distance between tokens.
        dims: indices of the head dimension.
    """
    position = slots // RATIO
    block = tl.load(blocks + position, mask=position < count, other=-1)
    token = tl.load(offsets + block, mask=block >= 0, other=0) + slots % RATIO
    attends = (block >= 0) & (token <= last)
    k = tl.load(key + token[:, None] * key_stride + dims, mask=attends[:, None], other=0.0)
    v = tl.load(value + token[:, None] * value_stride + dims, mask=attends[:, None], other=0.0)
    return k, v, tl.where(attends, dot(q, tl.trans(k)) * (scale * LOG2_E), -float("inf"))


@triton.jit
def output_kernel(
    query, key, value, blocks, counts, offsets, tokens, output, logsumexp, scale, heads, width,
    key_stride, key_head, value_stride, value_head,
    GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute attention of one query to one key head, for the `GROUP` query heads that share it.

    `counts` has the number of entries in each query's list of blocks up to the last block. `width` is the length of a
    list. `key_head` and `value_head` are distances between heads.
    """
    index, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, dims = tl.arange(0, PADDED), tl.arange(0, DIM)
    rows, is_head = index * heads + group * GROUP + head, head < GROUP
    q = tl.load(query + rows[:, None] * DIM + dims, mask=is_head[:, None], other=0.0)
    count, last = tl.load(counts + index), tl.load(tokens + index)
    # Finite, so that a score of -inf has weight 0 before the first token that is attended to.
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    sums = tl.zeros((PADDED, DIM), tl.float32)
    for start in range(0, count * RATIO, TILE):
        _, v, scores = read_tile(
            q, key + group * key_head, value + group * value_head, blocks + index * width, offsets,
            start + tl.arange(0, TILE), count, last, scale, key_stride, value_stride, dims, RATIO,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights, correction = tl.exp2(scores - new_largest[:, None]), tl.exp2(largest - new_largest)
        total = total * correction + tl.sum(weights, 1)
        sums = sums * correction[:, None] + dot(weights.to(v.dtype), v)
        largest = new_largest
    tl.store(output + rows[:, None] * DIM + dims, (sums / total[:, None]).to(q.dtype), mask=is_head[:, None])
    tl.store(logsumexp + rows, largest + tl.log2(total), mask=is_head)


@triton.jit
def query_gradient_kernel(
    query, key, value, blocks, counts, offsets, tokens, output, logsumexp, gradient, products, query_gradient,
    scale, heads, width, key_stride, key_head, value_stride, value_head,
    GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one query. Also store, in `products`, the dot product of its output and gradient."""
    index, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, dims = tl.arange(0, PADDED), tl.arange(0, DIM)
    rows, is_head = index * heads + group * GROUP + head, head < GROUP
    at, mask = rows[:, None] * DIM + dims, is_head[:, None]
    q = tl.load(query + at, mask=mask, other=0.0)
    of_output = tl.load(gradient + at, mask=mask, other=0.0)
    product = tl.sum(tl.load(output + at, mask=mask, other=0.0).to(tl.float32) * of_output.to(tl.float32), 1)
    tl.store(products + rows, product, mask=is_head)
    normalizer = tl.load(logsumexp + rows, mask=is_head, other=0.0)
    count, last = tl.load(counts + index), tl.load(tokens + index)
    sums = tl.zeros((PADDED, DIM), tl.float32)
    for start in range(0, count * RATIO, TILE):
        k, v, scores = read_tile(
            q, key + group * key_head, value + group * value_head, blocks + index * width, offsets,
            start + tl.arange(0, TILE), count, last, scale, key_stride, value_stride, dims, RATIO,
        )  # fmt: skip
        weights = tl.exp2(scores - normalizer[:, None])
        of_scores = weights * (dot(of_output, tl.trans(v)) - product[:, None])
        sums += dot(of_scores.to(k.dtype), k)
    tl.store(query_gradient + at, (sums * scale).to(q.dtype), mask=mask)


# Another number of blocks in each batch must not compile the kernel again.
@triton.jit(do_not_specialize=["num_blocks"])
def key_gradient_kernel(
    query, key, value, offsets, tokens, logsumexp, gradient, products, pairs, pieces, block_of_piece, sums,
    num_blocks, scale, heads, key_stride, key_head, value_stride, value_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, RATIO: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the keys and values of one block and key head, from some of the queries that attend to it.

    Args that the other kernels do not have:
        pairs: query of each pair, sorted by block.
        pieces: first pair of each program. A program ends before the first pair of the next program.
        block_of_piece: block of each program, or `num_blocks` for programs without one.
        sums: results [p, 2, g, RATIO, d] float32.
    """
    piece, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.load(block_of_piece + piece)
    if block < num_blocks:
        slot, dims = tl.arange(0, PADDED), tl.arange(0, DIM)
        token = tl.load(offsets + block) + slot
        is_token = (slot < RATIO) & (token < tl.load(offsets + block + 1))
        k = tl.load(key + token[:, None] * key_stride + group * key_head + dims, mask=is_token[:, None], other=0.0)
        v = tl.load(
            value + token[:, None] * value_stride + group * value_head + dims, mask=is_token[:, None], other=0.0
        )
        of_key, of_value = tl.zeros((PADDED, DIM), tl.float32), tl.zeros((PADDED, DIM), tl.float32)
        first, stop = tl.load(pieces + piece), tl.load(pieces + piece + 1)
        # A row is a head of a query.
        for start in range(first * GROUP, stop * GROUP, ROWS):
            row = start + tl.arange(0, ROWS)
            is_row = row < stop * GROUP
            index = tl.load(pairs + row // GROUP, mask=is_row, other=0).to(tl.int64)
            rows = index * heads + group * GROUP + row % GROUP
            q = tl.load(query + rows[:, None] * DIM + dims, mask=is_row[:, None], other=0.0)
            of_output = tl.load(gradient + rows[:, None] * DIM + dims, mask=is_row[:, None], other=0.0)
            last = tl.load(tokens + index, mask=is_row, other=-1)
            attends = is_token[None, :] & (token[None, :] <= last[:, None])
            normalizer = tl.load(logsumexp + rows, mask=is_row, other=0.0)
            scores = tl.where(attends, dot(q, tl.trans(k)) * (scale * LOG2_E), -float("inf"))
            weights = tl.exp2(scores - normalizer[:, None])
            of_value += dot(tl.trans(weights.to(of_output.dtype)), of_output)
            product = tl.load(products + rows, mask=is_row, other=0.0)
            of_scores = weights * (dot(of_output, tl.trans(v)) - product[:, None])
            of_key += dot(tl.trans(of_scores.to(q.dtype)), q)
        at = sums + ((piece * 2 * tl.num_programs(1) + group) * RATIO + slot[:, None]) * DIM + dims
        tl.store(at, of_key * scale, mask=(slot < RATIO)[:, None])
        tl.store(at + tl.num_programs(1) * RATIO * DIM, of_value, mask=(slot < RATIO)[:, None])


@triton.jit
def sum_pieces_kernel(sums, first_piece, offsets, key_gradient, value_gradient, DIM: tl.constexpr, RATIO: tl.constexpr):
    """Add the results of `key_gradient_kernel` for one block and key head."""
    block, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = tl.num_programs(1)
    slot, dims = tl.arange(0, RATIO), tl.arange(0, DIM)
    of_key, of_value = tl.zeros((RATIO, DIM), tl.float32), tl.zeros((RATIO, DIM), tl.float32)
    for piece in range(tl.load(first_piece + block), tl.load(first_piece + block + 1)):
        at = sums + ((piece * 2 * groups + group) * RATIO + slot[:, None]) * DIM + dims
        of_key += tl.load(at)
        of_value += tl.load(at + groups * RATIO * DIM)
    token = tl.load(offsets + block) + slot
    is_token = (token < tl.load(offsets + block + 1))[:, None]
    at = (token[:, None] * groups + group) * DIM + dims
    tl.store(key_gradient + at, of_key.to(key_gradient.dtype.element_ty), mask=is_token)
    tl.store(value_gradient + at, of_value.to(value_gradient.dtype.element_ty), mask=is_token)


class Pieces(NamedTuple):
    """Pairs of a query and a block, sorted by block and divided into pieces of one block and at most `PIECE` pairs.

    Attributes:
        pairs: [t * k] int32, the query of each pair. Entries without a block are first, and in no piece.
        starts: [p + 1] int64, the first pair of each piece. p depends only on shapes, so the host need not wait.
        blocks: [p] int64, the block of each piece; B for pieces at the end that are not needed.
        first_piece: [B + 1] int64, the first piece of each block, and the number of needed pieces.
    """

    pairs: Tensor
    starts: Tensor
    blocks: Tensor
    first_piece: Tensor


def divide_pairs(attended: Tensor, num_blocks: int) -> Pieces:
    """Sort pairs of a query and an `attended` block [t, k] int32 by block, and divide the pairs into pieces.

    The host does not wait for the device.
    """
    # Stable, so that the order of sums does not depend on the device.
    sorted_blocks, order = attended.flatten().sort(stable=True)
    boundaries = torch.arange(num_blocks + 1, dtype=attended.dtype, device=attended.device)
    first_pair = torch.searchsorted(sorted_blocks, boundaries)
    first_piece = torch.zeros_like(first_pair)
    first_piece[1:] = first_pair.diff().add_(PIECE - 1).div_(PIECE, rounding_mode="floor").cumsum_(0)
    pieces = torch.arange(attended.numel() // PIECE + num_blocks + 1, device=attended.device)
    blocks = torch.searchsorted(first_piece, pieces, right=True).sub_(1)
    starts = first_pair[blocks] + (pieces - first_piece[blocks]) * PIECE
    starts = torch.where(blocks < num_blocks, starts, attended.numel())
    return Pieces((order // attended.size(1)).int(), starts, blocks[:-1], first_piece)


class AttendBlocks(torch.autograd.Function):
    """Attention of queries to the tokens of listed blocks, up to the query's own token."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, tokens: Tensor, offsets: Tensor,
        ratio: int, scale: float,
    ) -> Tensor:  # fmt: skip
        """Return attention [t, h, d].

        Args:
            ctx: keeps the inputs, the output and the logarithms of the sums of softmax.
            query: [t, h, d].
            key, value: [T, g, d]; their last dimension is contiguous, h is a multiple of g, d a power of two.
            attended: [t, k] int32, the blocks of each query. -1 is no block; such entries at the end are skipped.
            tokens: [t] int64, the token of each query. It attends to no later token, and to at least one.
            offsets: [B + 1] int64, the first token of each block, and T.
            ratio: largest number of tokens of a block, a power of two.
            scale: factor of the products of queries and keys.
        """
        query = query.contiguous()
        positions = torch.arange(1, attended.size(1) + 1, dtype=torch.int32, device=attended.device)
        counts = positions.where(attended >= 0, 0).amax(1)  # up to the last block of each list
        output = torch.empty_like(query)
        logsumexp = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        shared = query, key, value, attended, counts, offsets, tokens, output, logsumexp
        output_kernel[len(query), key.size(1)](
            *shared, scale, query.size(1), attended.size(1), *key.stride()[:2], *value.stride()[:2],
            **compiled_sizes(query, key, ratio),
        )  # fmt: skip
        ctx.save_for_backward(*shared)
        ctx.settings = ratio, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, attended, _, offsets, tokens, _, logsumexp = ctx.saved_tensors
        ratio, scale = ctx.settings
        gradient, groups, num_blocks = gradient.contiguous(), key.size(1), len(offsets) - 1
        strides = *key.stride()[:2], *value.stride()[:2]
        products, query_gradient = torch.empty_like(logsumexp), torch.empty_like(query)
        compiled = compiled_sizes(query, key, ratio)
        query_gradient_kernel[len(query), groups](
            *ctx.saved_tensors, gradient, products, query_gradient, scale, query.size(1), attended.size(1), *strides,
            **compiled,
        )  # fmt: skip
        pieces = divide_pairs(attended, num_blocks)
        sums = query.new_empty(len(pieces.blocks), 2, groups, ratio, query.size(2), dtype=torch.float32)
        key_gradient_kernel[len(pieces.blocks), groups](
            query, key, value, offsets, tokens, logsumexp, gradient, products, pieces.pairs, pieces.starts,
            pieces.blocks, sums, num_blocks, scale, query.size(1), *strides, GROUP=compiled["GROUP"],
            DIM=compiled["DIM"], RATIO=ratio, PADDED=max(SMALLEST_PRODUCT, ratio), num_warps=8,
            ROWS=STEP_BYTES // query.element_size(),
        )  # fmt: skip
        key_gradient, value_gradient = (key.new_empty(key.shape) for _ in range(2))
        sum_pieces_kernel[num_blocks, groups](
            sums, pieces.first_piece, offsets, key_gradient, value_gradient, DIM=compiled["DIM"], RATIO=ratio
        )
        return query_gradient, key_gradient, value_gradient, *(None,) * 5


def compiled_sizes(query: Tensor, key: Tensor, ratio: int) -> dict[str, int]:
    """Return the sizes that kernels are compiled for."""
    group = query.size(1) // key.size(1)
    # Two tiles of keys and two of values of 256 dimensions fit into the shared memory of an H100.
    tile = max(SMALLEST_PRODUCT, ratio, STEP_BYTES // query.element_size())
    padded = max(SMALLEST_PRODUCT, triton.next_power_of_2(group))
    return dict(GROUP=group, PADDED=padded, DIM=query.size(2), RATIO=ratio, TILE=tile)
