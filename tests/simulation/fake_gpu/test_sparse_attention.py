"""Sparse attention of Qwen3.8-Flash-Next on an H100: kernels at the released sizes of a rank with TP 2."""

import pytest

PROGRAM = """
import qwen3vl_bridge
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.common.attention import layout_packed_seq_params
from megatron.core.transformer.enums import AttnMaskType
from tests.models.qwen4_exp.test_sparse_attention import core

LENGTHS, BLOCKS = [5000, 1100, 2092], 512
module = core(num_attention_heads=12, num_query_groups=1, kv_channels=256, indexer_budget=2048)
layout = SequenceLayout.packed_row(LENGTHS).to("cuda")
params = layout_packed_seq_params(layout)
kind = dict(device="cuda", dtype=torch.bfloat16)
selection = torch.zeros(layout.total, 1, BLOCKS, dtype=torch.int32, device="cuda")

def step():
    query = torch.empty(layout.total, 12, 256, **kind).requires_grad_()
    key, value = (torch.empty(layout.total, 1, 256, **kind).requires_grad_() for _ in range(2))
    output = module(query, key, value, selection, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)
    output.backward(torch.empty_like(output))
    return [x.grad.shape for x in (query, key, value)]

step()  # compiles the kernels
syncs = []
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
mark("start")
with on_sync(syncs.append):
    result["shapes"] = step()
mark("end")
result["peak"] = torch.cuda.max_memory_allocated() - before
result["syncs"] = len(syncs)
"""


@pytest.mark.slow
def test_sparse_attention_of_released_size_launches_kernels_and_does_not_sync(on_fake_gpu):
    """Triton kernels compute documents longer than the budget, FlashAttention the others."""
    run = on_fake_gpu(PROGRAM)
    tokens, long = 8192, 7092
    assert run.result["shapes"] == [[tokens, 12, 256], [tokens, 1, 256], [tokens, 1, 256]]
    assert run.result["syncs"] == 0
    events = run.between("start", "end")
    launched = [event.name for event in events if event.kind == "triton"]
    assert launched == ["output_kernel", "query_gradient_kernel", "key_gradient_kernel", "sum_pieces_kernel"]
    kernels = [event.name for event in events if event.kind == "kernel"]
    assert len([name for name in kernels if "pytorch_flash" in name]) >= 2
    assert not [name for name in kernels if "fmha_cutlass" in name or "softmax" in name]
    # Query, output and two gradients, twice for the parts of the row; the sort of pairs; and the sums of pieces.
    pairs = long * 513
    bound = 8 * tokens * 12 * 256 * 2 + pairs * 32 + (pairs // 2048 + long // 4) * 2 * 4 * 256 * 4
    print(f"{run.result['peak']:,} of {bound:,} bytes")
    assert run.result["peak"] < bound
