"""Triton kernels of sparse attention, run by Triton's interpreter, against attention with masks."""

import json
import sys

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.core.layout import SequenceLayout, query_chunks, token_index
from qwen3vl_bridge.models.qwen4_exp.indexer import TokenBlocks
from qwen3vl_bridge.models.qwen4_exp.sparse_attention import AttendSelectedTokens, attended_blocks
from qwen3vl_bridge.planning import activations

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_interpreter import run_interpreted

# Name: segment lengths, whether they are a packed row, cp size and rank, query heads, key heads, d, block size, budget.
CASES = {
    "several tiles": ([2, 5, 75], True, (1, 0), 4, 1, 16, 4, 64),
    "packed": ([1, 2, 3, 30, 8, 13], True, (1, 0), 6, 2, 16, 4, 8),
    "rows": ([12, 12], False, (1, 0), 4, 2, 16, 4, 8),
    "cp": ([8, 32], True, (2, 1), 4, 1, 32, 4, 8),
    "blocks of 8": ([40, 9], True, (1, 0), 3, 1, 16, 8, 24),
    "many heads": ([26], True, (1, 0), 24, 1, 16, 2, 8),
}
NAMES = "output", "query", "key", "value"


def random_selection(tokens: Tensor, layout: SequenceLayout, blocks: TokenBlocks, budget: int) -> Tensor:
    """Return random complete blocks [t, k] int32 of the segment of each query, and -1 at the end."""
    generator = torch.Generator().manual_seed(0)
    starts = layout.cu_seqlens_padded.long()[layout.segment_ids()][tokens]
    first, width = blocks.offsets[:-1], budget // blocks.ratio
    is_complete = (first >= starts[:, None]) & (first + blocks.ratio <= tokens[:, None] + 1)
    scores = torch.rand(is_complete.shape, generator=generator).masked_fill(~is_complete, -1.0)
    best = scores.topk(min(width, len(first)), 1)
    selected = best.indices.masked_fill(best.values < 0, -1)
    return torch.nn.functional.pad(selected, (0, width - selected.size(1)), value=-1).int()


def errors_of(case: str, dtype: torch.dtype) -> list[float]:
    """Return the largest errors of the output and the gradients, relative to the largest entry."""
    from qwen3vl_bridge.models.qwen4_exp import sparse_kernels

    sparse_kernels.PIECE = 7  # so that blocks have several pieces
    lengths, is_packed, cp, heads, key_heads, dim, ratio, budget = CASES[case]
    layout = SequenceLayout.packed_row(lengths) if is_packed else SequenceLayout.padded_rows(lengths, max(lengths))
    blocks, tokens = TokenBlocks(layout, ratio), token_index(layout, *cp).T.flatten()
    selection = random_selection(tokens, layout, blocks, budget)
    generator = torch.Generator().manual_seed(1)
    query, gradient = (torch.randn(len(tokens), heads, dim, generator=generator).to(dtype) for _ in range(2))
    # Keys and values are halves of one tensor, as after a gather.
    key_value = torch.randn(layout.total, key_heads, 2 * dim, generator=generator).to(dtype)

    def run(call, convert) -> list[Tensor]:
        inputs = [convert(x).detach().requires_grad_() for x in (query, *key_value.chunk(2, -1))]
        output = call(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, convert(gradient))]

    chunks, attended = query_chunks(layout, 512, *cp), attended_blocks(selection, tokens, blocks)
    expected = run(lambda *x: AttendSelectedTokens.apply(*x, selection, tokens, blocks, chunks, 0.3), Tensor.double)
    found = run(
        lambda *x: sparse_kernels.AttendBlocks.apply(*x, attended, tokens, blocks.offsets, ratio, 0.3), lambda x: x
    )
    assert all(x.dtype == dtype for x in found)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]


# Measured: 4.6e-7 in float32, 9.1e-4 in float16.
LIMITS = {"float32": 2e-6, "float16": 2e-3}
SLOW = [f"{case}, {dtype}" for case in CASES for dtype in LIMITS if (case, dtype) != ("several tiles", "float32")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [["several tiles, float32"], pytest.param(SLOW, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_interpreted_sparse_kernels_match_masked_attention(cases):
    for case, errors in run_interpreted(__name__, json.dumps(cases)).items():
        print(case, errors)
        assert max(errors.values()) < LIMITS[case.rpartition(" ")[2]], case


def test_planner_and_sparse_kernels_use_same_piece_size():
    """The planner cannot import the kernels, because it needs neither torch nor Triton."""
    from qwen3vl_bridge.models.qwen4_exp import sparse_kernels

    assert activations._PAIRS_OF_PIECE == sparse_kernels.PIECE


if __name__ == "__main__":
    measured = {}
    for name in json.loads(sys.argv[1]):
        case, _, dtype = name.rpartition(", ")
        measured[name] = dict(zip(NAMES, errors_of(case, getattr(torch, dtype)), strict=True))
    print(json.dumps(measured))
