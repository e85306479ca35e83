"""Kernels of torch that compute attention without Transformer Engine on an H100."""

import json

import pytest

PROGRAM = """
import qwen3vl_bridge
from tests.models.test_core_attention import CAUSAL, FULL, HEADS, attention, packed, run, tensors

LENGTHS = [136, 8, 512, 512, 40]

for case in json.loads(sys.argv[1]):
    dtype, dim, groups, rows = case.split()
    module, kind = attention(int(groups), dim=int(dim)), dict(device="cuda", dtype=getattr(torch, dtype))
    parts = tensors(sum(LENGTHS), int(groups), int(dim), **kind)
    if rows == "padded":
        def call(*heads):
            return module(*(x.view(-1, 8, *x.shape[1:]) for x in heads), None, attn_mask_type=CAUSAL).contiguous()
    else:
        call = packed(module, LENGTHS, FULL if rows == "frames" else CAUSAL, "cuda")
    mark(case)
    run(call, parts)
    mark("end of " + case)
"""

CASES = [
    f"{dtype} {dim} {groups} {rows}"
    for dtype in ("bfloat16", "float32")
    for dim in (64, 72, 128, 256)
    for groups in (1, 4)
    for rows in ("packed", "padded", "frames")
]


@pytest.fixture(scope="module")
def run(on_fake_gpu):
    return on_fake_gpu(PROGRAM, json.dumps(CASES))


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("case", CASES)
def test_attention_uses_flash_kernel_in_bf16_and_efficient_kernel_in_float32(run, case):
    """FlashAttention in 16 bits and the memory-efficient kernel in float32; never cuDNN or stored scores."""
    names = [event.name for event in run.between(case, f"end of {case}") if event.kind in ("kernel", "gemm")]
    flash, efficient = (any(word in name for name in names) for word in ("pytorch_flash", "fmha_cutlass"))
    assert (flash, efficient) == ((True, False) if case.startswith("bfloat16") else (False, True))
    assert not [name for name in names if "softmax" in name or "cublas" in name]
