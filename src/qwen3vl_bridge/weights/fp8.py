"""Quantize and dequantize FP8 weights: e4m3 matrices with one scale per block, as in released -FP8 models.

The scales of a tensor `X` are in `X_scale_inv`; packed experts have the scales of one matrix after the other. The parts
`X.shard_N.weight` of an n-gram table share one scale, `X.weight_scale`. The value of an element is its product with the
scale in float32, rounded once to the dtype that is read. transformers computes the same values (5.12, `Fp8Dequantize`),
but requires that all blocks are full.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype

SCALES = "_scale_inv"  # suffix of the name of a weight's scales
# Names of a part of an n-gram table, and the name suffix of the scale that all parts share.
_PART, _SHARED_SCALE = re.compile(r"(.+)\.shard_\d+\.weight"), ".weight_scale"
E4M3 = "float8_e4m3fn"
LARGEST = 448  # the largest e4m3 number
# Dtypes of scales, by torch's names. Qwen's files have bfloat16; the last two are powers of two, called ue8m0.
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")
# Number of elements that are multiplied at a time.
_PIECE = 1 << 18

Block = tuple[int, int]  # rows and columns with one scale


def find_scales(name: str, names: Collection[str]) -> str:
    """Return the name of the tensor with the scales of an FP8 tensor.

    The parts of an n-gram table share one scale. Every other tensor has scales of its own.

    Args:
        name: name of the tensor.
        names: names of all tensors of the model, or of all scales.
    """
    part = _PART.fullmatch(name)
    shared = f"{part[1]}{_SHARED_SCALE}" if part else ""
    return shared if shared in names else name + SCALES


def scales_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """Return the shape [..., row blocks, column blocks] of the scales of matrices [..., rows, columns].

    The last blocks need not be full.
    """
    *many, rows, columns = shape
    return (*many, -(-rows // block[0]), -(-columns // block[1]))


def match_block(shape: Sequence[int], scales: Sequence[int], block: Block | None) -> Block | None:
    """Return the block size of matrices [..., rows, columns], or None if the scales do not have the expected shape.

    `shape` and `scales` are shapes. If `block` is None, each matrix is one block.
    """
    one_block = block is None and math.prod(scales) == math.prod(shape[:-2])
    block = block or (shape[-2], shape[-1])
    return block if one_block or tuple(scales) == scales_shape(shape, block) else None


@functools.cache
def _values() -> Tensor:
    """Return a lookup table of the 256 e4m3 values in float32, indexed by the byte of a value."""
    import torch

    # On a CPU, looking values up is six times as fast as torch's own cast.
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def scales_to_float32(scales: Tensor) -> Tensor:
    """Convert scales with one of `SCALE_DTYPES` to float32. A uint8 scale n means 2^(n - 127)."""
    import torch

    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def check_scales(scales: Tensor, shape: Sequence[int], block: Block) -> None:
    """Raise ValueError if a scale is not positive, or so large that values overflow. The message names the block.

    Args:
        scales: in float32.
        shape: shape of the matrices, [..., rows, columns].
    """
    import torch

    valid = (scales > 0) & (scales <= torch.finfo(torch.float32).max / LARGEST)
    if not valid.all():
        blocks = scales_shape(shape, block)
        first = (~valid).view(blocks).nonzero()[0].tolist()
        raise ValueError(
            f"the scale of block {first} of {list(blocks)} is {scales.view(blocks)[tuple(first)].item()}, expected a "
            "finite number above 0: the file is damaged, or its quantization failed"
        )


def dequantize_elements(weights: Tensor, start: int, shape: Sequence[int], scales: Tensor, block: Block) -> Tensor:
    """Return the float32 values of consecutive elements of FP8 matrices.

    Args:
        weights: [elements], e4m3 bytes of the elements.
        start: index of the first element in the matrices, in row-major order.
        shape: shape of the matrices, [..., rows, columns].
        scales: all scales of the matrices, in float32, with any shape.
    """
    import torch

    (rows, columns), (height, width) = shape[-2:], block
    scales = scales.reshape(-1, *scales_shape((rows, columns), block))
    values = torch.index_select(_values(), 0, weights.int())
    done, end = 0, len(weights)
    while done < end:
        row, column = divmod(start + done, columns)
        matrix, row = divmod(row, rows)
        of_row = scales[matrix, row // height].repeat_interleave(width)[:columns]
        if column or end - done < columns:  # part of a row
            count = min(columns - column, end - done)
            values[done : done + count] *= of_row[column : column + count]
        else:  # full rows with the same scales
            num_rows = min((end - done) // columns, height - row % height, rows - row)
            count = num_rows * columns
            values[done : done + count].view(num_rows, columns).mul_(of_row)
        done += count
    return values


def quantize(
    values: Tensor, width: int, kept: Tensor | None, scales_in: dtype, *, only_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize a row of blocks to e4m3.

    A scale maps the largest element of its block to `LARGEST`. If all values of a block are products of an e4m3 number
    and its `kept` scale, that scale is used again, so that a model that was read from FP8 gets the same bytes.

    Args:
        values: [rows of a block, columns] in float32.
        width: number of columns of a block.
        kept: [blocks] in `scales_in`, the scales of the FP8 weights that `values` may come from, or None.
        scales_in: one of `SCALE_DTYPES`.
        only_scales: compute only the scales, and leave the weights undefined.

    Returns:
        The weights as bytes, and the scales [blocks].
    """
    import torch

    weights, scales = torch.empty(values.shape, dtype=torch.uint8), torch.empty(-(-values.shape[1] // width))
    before = None if kept is None else scales_to_float32(kept)
    powers = torch.float8_e8m0fnu if scales_in in (torch.float8_e8m0fnu, torch.uint8) else None
    least = torch.finfo(scales_in if powers is None else torch.float32).tiny  # smaller scales would be rounded to zero
    step = max(1, _PIECE // (len(values) * width))  # number of blocks that fit the processor's cache
    for first in range(0, len(scales), step):
        blocks, here = slice(first, first + step), slice(first * width, (first + step) * width)
        part, old, encoded = values[:, here].contiguous(), None if before is None else before[blocks], None
        largest = _of_blocks(part.abs().amax(0), width)
        new = (torch.where(largest > 0, largest, LARGEST) / LARGEST).clamp(min=least)
        new = new.to(scales_in).float() if powers is None else new.log2().ceil().exp2()
        if old is not None:
            of_columns = old.repeat_interleave(width)[: part.shape[1]]
            encoded = _e4m3(part, of_columns)
            again = torch.index_select(_values(), 0, encoded.flatten().int()).view_as(part).mul_(of_columns)
            # The products were rounded to float32 or bfloat16. Differences are faster than comparisons.
            change = torch.minimum((again - part).abs_(), (again.bfloat16().float() - part).abs_())
            new = torch.where(_of_blocks(change.amax(0), width) == 0, old, new)
        scales[blocks] = new
        if only_scales:
            continue
        if old is None or not torch.equal(new, old):
            encoded = _e4m3(part, new.repeat_interleave(width)[: part.shape[1]])
        weights[:, here] = encoded
    check_scales(scales, values.shape, (len(values), width))  # kept scales may be bad, float16 scales may overflow
    scales = scales.to(powers or scales_in)
    return weights, scales.view(torch.uint8) if scales_in == torch.uint8 else scales


def quantize_with_scale(values: Tensor, scale: float) -> Tensor:
    """Return float32 values as e4m3 bytes with a given scale.

    Raises:
        ValueError: a value is larger than e4m3 can represent with this scale, even if it is rounded.
    """
    # Values below this one are rounded to the largest number.
    if not (largest := values.abs().max().item()) <= scale * (LARGEST + 16):
        raise ValueError(f"a value of magnitude {largest:g} exceeds {LARGEST} times the scale, which is {scale:g}")
    return _e4m3(values, values.new_tensor(scale))


def _e4m3(values: Tensor, scales: Tensor) -> Tensor:
    import torch

    return (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _of_blocks(largest: Tensor, width: int) -> Tensor:
    """Return the maximum of each block of `width` columns: [columns] -> [blocks]."""
    import torch

    return torch.nn.functional.pad(largest, (0, -len(largest) % width)).view(-1, width).amax(1)


def dequantize(weight: Tensor, scales: Tensor, block: Block | None, to: dtype) -> Tensor:
    """Dequantize e4m3 matrices [..., rows, columns] to the dtype `to`, with little more memory than the result needs.

    Raises:
        ValueError: the scales do not have the shape of the blocks, or a scale is not positive and finite.
    """
    import torch

    fits = match_block(weight.shape, scales.shape, block)
    if fits is None:
        found = f"{list(scales.shape)} for {list(weight.shape)}"
        raise ValueError(f"scales have the shape {found}, expected one scale for each block of {block}")
    result, data, scales = (
        torch.empty(weight.shape, dtype=to),
        weight.view(torch.uint8).flatten(),
        scales_to_float32(scales),
    )
    check_scales(scales, weight.shape, fits)
    for start in range(0, data.numel(), _PIECE):
        part = dequantize_elements(data[start : start + _PIECE], start, weight.shape, scales, fits)
        result.view(-1)[start : start + _PIECE] = part
    return result
