"""Which kernel of torch computes attention without Transformer Engine on an H100; where Transformer Engine has none."""

import json
from importlib.util import find_spec

import pytest

PROGRAM = """
import qwen3vl_bridge
from tests.model.test_core_attention import CAUSAL, FULL, HEADS, attention, packed, run, tensors

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


@pytest.mark.parametrize("case", CASES)
def test_the_kernel(run, case):
    """FlashAttention in 16 bits, the memory-efficient kernel in float32; never cuDNN, nor stored scores."""
    names = [event.name for event in run.between(case, f"end of {case}") if event.kind in ("kernel", "gemm")]
    flash, efficient = (any(word in name for name in names) for word in ("pytorch_flash", "fmha_cutlass"))
    assert (flash, efficient) == ((True, False) if case.startswith("bfloat16") else (False, True))
    assert not [name for name in names if "softmax" in name or "cublas" in name]


WARNINGS = """
import qwen3vl_bridge
from qwen3vl_bridge.models.settings import warn_of_unfused_attention
from qwen3vl_recipes import qwen3_vl_4b_sft_config, qwen35_vl_4b_sft_config

for recipe in (qwen3_vl_4b_sft_config, qwen35_vl_4b_sft_config):
    for layers in ("transformer_engine", "local"):
        model = recipe().model
        model.transformer_impl = layers
        print(layers, "with heads of", model.kv_channels, file=sys.stderr)
        warn_of_unfused_attention(model)
"""


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn has kernels for all")
@pytest.mark.parametrize(("major", "expected"), [("8", [128, 256]), ("9", []), ("10", [256])])
def test_heads_without_a_kernel_of_transformer_engine_are_named(on_fake_gpu, major, expected):
    stderr = on_fake_gpu(WARNINGS, FAKE_GPU_MAJOR=major).stderr
    assert stderr.count("transformer_engine with heads of") == stderr.count("local with heads of") == 2
    warnings = [line for line in stderr.splitlines() if "no kernel of cuDNN" in line]
    assert len(warnings) == len(expected)
    for line, width in zip(warnings, expected, strict=True):
        assert f"heads of {width} on compute capability {major}.0" in line
