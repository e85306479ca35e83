"""Kernels of flash-linear-attention in float16, run by Triton's interpreter, against our torch functions in float32.

An error is the norm of the difference relative to the norm of the expected result. It is compared with the error of
rounding that result to float16.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.models.common import delta_rule
from qwen3vl_bridge.models.common.attention import packed_seq_params

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from tests.helpers.flash_linear_attention import PYTHONPATH, needs_package
from tests.helpers.forked import ROOT
from tests.helpers.triton_interpreter import run_interpreted

LARGEST = 7e-4
# In units of the rounding. The norm and the convolution compute in float32: measured with 0.6.0 at most 1.05. The
# rule's kernels hand one another a chunk's system, keys, values and states in float16: measured 1.8 to 2.3, where five
# roundings of one size would be 2.2.
UNITS = {"l2norm": 1.25, "convolution": 1.25, "rule": 3}
LENGTHS, HEADS, KEY, VALUE, CHANNELS, WIDTH = [70, 5, 64], 2, 64, 64, 24, 4
CASES = ["l2norm, rows", "convolution, packed", "convolution, rows", "rule, packed", "rule, rows"]
# As chunk-wise context parallelism calls them: with states before and after, and values with the columns of keys.
CASES += [f"{function} with state, {rows}" for function in ("convolution", "rule") for rows in ("packed", "rows")]


@pytest.fixture(scope="module")
def errors() -> dict[str, list[tuple[float, float]]]:
    return run_interpreted(__name__, FLA_DISABLE_TENSOR_CACHE="1", PYTHONPATH=PYTHONPATH)


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize("case", CASES)
def test_flash_linear_attention_kernels_match_our_torch_functions(errors, case):
    print(*(f"{error:.1e}, {error / rounding:.2f} times its rounding;" for error, rounding in errors[case]))
    for error, rounding in errors[case]:
        assert error < min(LARGEST, UNITS[case.split()[0].strip(",")] * rounding)


def test_pinned_flash_linear_attention_version_meets_our_minimum():
    lines = [(ROOT / f"requirements/{name}.txt").read_text().splitlines() for name in ("fla", "cpu")]
    beside, inside = (dict(line.split("==") for line in file if re.match(r"\w.*==", line)) for file in lines)
    assert beside.keys() == {"flash-linear-attention", "fla-core"} and len(set(beside.values())) == 1
    assert Version(beside["fla-core"]) >= Version(delta_rule.MINIMUM_VERSION)
    assert not beside.keys() & inside.keys()


class Index(int):
    """A loop index, which is a tensor in a compiled kernel and an int in the interpreter."""

    def to(self, dtype: object) -> int:
        return int(self)


def kernels() -> dict[str, Callable]:
    """Return the functions of the package by the names of ours, on a CPU, without autotuning and without a device."""
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]
    torch.cpu.device = lambda _: contextlib.nullcontext()
    from fla.modules.convolution import causal_conv1d
    from fla.modules.l2norm import l2norm
    from fla.ops.common import chunk_delta_h
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_delta_h.range = lambda *bounds: map(Index, range(*map(int, bounds)))
    told = delta_rule.with_chunks
    return dict(l2norm=l2norm, causal_conv1d=told(causal_conv1d), chunk_gated_delta_rule=told(chunk_gated_delta_rule))


def inputs_of(function: str, rows: int, tokens: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=random)

    if function == "l2norm":
        return [normal(HEADS, KEY)]
    segments, has_state = (len(LENGTHS) if rows == 1 else rows), function.endswith("state")
    if function.startswith("convolution"):
        state = [torch.randn(segments, CHANNELS, WIDTH, generator=random)] * has_state
        return [normal(CHANNELS), torch.randn(CHANNELS, WIDTH, generator=random), *state]
    q, k = (delta_rule.l2norm(normal(HEADS, KEY)) for _ in range(2))
    columns = VALUE + KEY * has_state
    state = [torch.randn(segments, HEADS, KEY, columns, generator=random)] * has_state
    return [q, k, normal(HEADS, columns), -0.3 * normal(HEADS).abs(), normal(HEADS).sigmoid(), *state]


def computed(functions: dict[str, Callable], function: str, tensors: list[Tensor], offsets: Tensor | None) -> list:
    """Return the outputs and gradients of a function, called as megatron-core or chunk-wise parallelism calls it."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    random, final = torch.Generator().manual_seed(1), None
    if function == "l2norm":
        out = functions["l2norm"](*tensors)
    elif function.startswith("convolution"):
        x, weight, state = (*tensors, None)[:3]
        rest = dict(bias=None, activation="silu", initial_state=state, output_final_state=False, cu_seqlens=offsets)
        out, _ = functions["causal_conv1d"](x=x, weight=weight, **rest)
    else:
        q, k, v, g, beta, state = (*tensors, None)[:6]
        rest = dict(initial_state=state, output_final_state=state is not None, use_qk_l2norm_in_kernel=False)
        out, final = functions["chunk_gated_delta_rule"](q, k, v, g=g, beta=beta, cu_seqlens=offsets, **rest)
    outputs = [out] if final is None else [out, final]
    weights = [torch.randn(x.shape, generator=random).half().to(x.dtype) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, tensors, weights)]


def errors_of(case: str, theirs: dict[str, Callable]) -> list[tuple[float, float]]:
    """Return the errors of the output and of each gradient: those of the kernels, and those of rounding to float16."""
    function, rows = case.split(", ")
    offsets = torch.tensor([0, *itertools.accumulate(LENGTHS)]).int()
    packed = rows == "packed"
    tensors = [x.half() for x in inputs_of(function, *((1, sum(LENGTHS)) if packed else (2, LENGTHS[0])))]
    if function == "rule with state":  # states are float32
        tensors[-1] = tensors[-1].float()
    row = offsets if packed else None
    with delta_rule.packed_row(packed_seq_params(offsets, tuple(LENGTHS)) if packed else None):
        found = computed(theirs, function, tensors, row)
    expected = computed(vars(delta_rule), function, [x.float() for x in tensors], row)
    return [(error(a, b), error(b.half(), b)) for a, b in zip(found, expected, strict=True)]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


if __name__ == "__main__":
    theirs = kernels()
    print(json.dumps({case: errors_of(case, theirs) for case in CASES}))
