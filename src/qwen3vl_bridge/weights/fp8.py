"""Weights in FP8: matrices of e4m3 with a scale for each block of rows and columns, as the models named -FP8 have them.

The scales of `X` are the tensor `X_scale_inv`, of the matrix or, for packed experts, of one matrix after the other. An
element's value is the product of both in float32, rounded once to the dtype in which it is read; transformers' is the
same (5.12, `Fp8Dequantize`), except that it finds the size of a block by dividing, so that all have to be full.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype

SCALES = "_scale_inv"  # what follows a weight's name in that of its scales
E4M3 = "float8_e4m3fn"
LARGEST = 448  # number of e4m3
# Dtypes of scales, torch's names: bfloat16 in Qwen's files. The last two are powers of two, called ue8m0.
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")
# Elements that are multiplied at a time.
_PIECE = 1 << 18

Block = tuple[int, int]  # rows and columns with one scale


def shape_of_scales(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """[..., rows, columns] -> [..., blocks of rows, blocks of columns]; the last blocks need not be full."""
    *many, rows, columns = shape
    return (*many, -(-rows // block[0]), -(-columns // block[1]))


def block_of(shape: Sequence[int], scales: Sequence[int], block: Block | None) -> Block | None:
    """The block of matrices, [..., rows, columns], with scales of a shape; all of a matrix if `block` is None. None if
    the scales do not have their shape.
    """
    whole = block is None and math.prod(scales) == math.prod(shape[:-2])
    block = block or (shape[-2], shape[-1])
    return block if whole or tuple(scales) == shape_of_scales(shape, block) else None


@functools.cache
def _values() -> Tensor:
    """The 256 values of e4m3 in float32: to look them up is six times as fast as torch's own cast on a CPU."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def in_float32(scales: Tensor) -> Tensor:
    """Scales of any of `SCALE_DTYPES` in float32; bytes are exponents of two, less 127."""
    import torch

    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def products(weights: Tensor, start: int, shape: Sequence[int], scales: Tensor, block: Block) -> Tensor:
    """Values in float32 of elements from `start` on, row-major, of matrices [..., rows, columns] of this shape.

    Args:
        weights: [elements], the bytes of e4m3.
        scales: in float32, any shape.
    """
    import torch

    (rows, columns), (height, width) = shape[-2:], block
    scales = scales.reshape(-1, *shape_of_scales((rows, columns), block))
    values = torch.index_select(_values(), 0, weights.int())
    done, end = 0, len(weights)
    while done < end:
        row, column = divmod(start + done, columns)
        matrix, row = divmod(row, rows)
        of_row = scales[matrix, row // height].repeat_interleave(width)[:columns]
        if column or end - done < columns:  # a part of a row
            count = min(columns - column, end - done)
            values[done : done + count] *= of_row[column : column + count]
        else:  # rows of the same blocks
            whole = min((end - done) // columns, height - row % height, rows - row)
            count = whole * columns
            values[done : done + count].view(whole, columns).mul_(of_row)
        done += count
    return values


def quantized(
    values: Tensor, width: int, kept: Tensor | None, scales_in: dtype, *, only_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """A row of blocks in e4m3, as bytes, which are not computed with `only_scales`, and their scales.

    A scale maps the largest element of its block to `LARGEST`. A block whose values are products
    of e4m3 and a `kept` scale gets that one: so a model that was read from FP8 has its bytes again.

    Args:
        values: [rows of a block, columns] in float32.
        width: columns of a block.
        kept: [blocks] in `scales_in`, scales that the blocks may have had, or None.
        scales_in: one of `SCALE_DTYPES`.
    """
    import torch

    weights, scales = torch.empty(values.shape, dtype=torch.uint8), torch.empty(-(-values.shape[1] // width))
    before = None if kept is None else in_float32(kept)
    powers = torch.float8_e8m0fnu if scales_in in (torch.float8_e8m0fnu, torch.uint8) else None
    step = max(1, _PIECE // (len(values) * width))  # blocks that are in a processor's cache together
    for first in range(0, len(scales), step):
        blocks, here = slice(first, first + step), slice(first * width, (first + step) * width)
        part, old, encoded = values[:, here].contiguous(), None if before is None else before[blocks], None
        largest = _of_blocks(part.abs().amax(0), width)
        new = torch.where(largest > 0, largest, LARGEST) / LARGEST
        new = new.to(scales_in).float() if powers is None else new.log2().ceil().exp2()
        if old is not None:
            of_columns = old.repeat_interleave(width)[: part.shape[1]]
            encoded = _e4m3(part, of_columns)
            again = torch.index_select(_values(), 0, encoded.flatten().int()).view_as(part).mul_(of_columns)
            # The products were rounded to either; differences of floats are faster than comparisons.
            change = torch.minimum((again - part).abs_(), (again.bfloat16().float() - part).abs_())
            new = torch.where(_of_blocks(change.amax(0), width) == 0, old, new)
        scales[blocks] = new
        if only_scales:
            continue
        if old is None or not torch.equal(new, old):
            encoded = _e4m3(part, new.repeat_interleave(width)[: part.shape[1]])
        weights[:, here] = encoded
    scales = scales.to(powers or scales_in)
    return weights, scales.view(torch.uint8) if scales_in == torch.uint8 else scales


def _e4m3(values: Tensor, scales: Tensor) -> Tensor:
    import torch

    return (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _of_blocks(largest: Tensor, width: int) -> Tensor:
    """[columns] -> [blocks]."""
    import torch

    return torch.nn.functional.pad(largest, (0, -len(largest) % width)).view(-1, width).amax(1)


def dequantized(weight: Tensor, scales: Tensor, block: Block | None, to: dtype) -> Tensor:
    """The values of matrices of e4m3, [..., rows, columns], with little more memory than the result's.

    Raises:
        ValueError: scales of another shape than the blocks'.
    """
    import torch

    fits = block_of(weight.shape, scales.shape, block)
    if fits is None:
        found = f"{list(scales.shape)} for {list(weight.shape)}"
        raise ValueError(f"scales have the shape {found}, expected one for each block of {block}")
    result, data, scales = torch.empty(weight.shape, dtype=to), weight.view(torch.uint8).flatten(), in_float32(scales)
    for start in range(0, data.numel(), _PIECE):
        part = products(data[start : start + _PIECE], start, weight.shape, scales, fits)
        result.view(-1)[start : start + _PIECE] = part
    return result
