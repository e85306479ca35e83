"""The delta rule by chunks equals its definition, token by token, in each segment by itself."""

from __future__ import annotations

import itertools

from qwen3vl_bridge.models.qwen3_5.delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

HEADS, KEY, VALUE = 2, 8, 12
# Relative to the largest entry: the definition in float64 against chunks in float32.
TOLERANCE = 5e-6  # measured: below 1e-6, outputs and gradients


def definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S <- S exp(g); S <- S + k (beta (v - k S)); o = q S / sqrt(d), in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state, outputs = v.new_zeros(len(q), HEADS, KEY, VALUE), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / KEY**0.5)
    return torch.stack(outputs, 1)


def inputs(rows: int, tokens: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, HEADS, *shape, generator=random)

    q, k = (l2norm(normal(KEY)) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, normal(VALUE), -0.3 * normal().abs(), normal().sigmoid())]


def worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


def compare(found: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    )
    error = worst(found, expected)
    gradients = max(worst(ours, theirs) for ours, theirs in pairs)
    print(f"output {error:.1e}, gradients {gradients:.1e}")
    assert error < TOLERANCE and gradients < TOLERANCE


lengths_of_segments = st.lists(
    st.one_of(st.integers(1, 5), st.sampled_from([63, 64, 65, 128, 130])), min_size=1, max_size=6
)


@settings(max_examples=30)  # each is differentiated token by token
@given(lengths=lengths_of_segments, seed=st.integers(0, 2**16))
def test_packed_row(lengths, seed):
    tensors = inputs(1, sum(lengths), seed)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    found, state = chunk_gated_delta_rule(*tensors, cu_seqlens=cu_seqlens)
    segments = zip(*(x.split(lengths, 1) for x in tensors), strict=True)
    assert state is None
    compare(found, torch.cat([definition(*segment) for segment in segments], 1), tensors)


@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
def test_rows(tokens):
    tensors = inputs(3, tokens, seed=0)
    compare(chunk_gated_delta_rule(*tensors)[0], definition(*tensors), tensors)


def test_normalises_where_it_is_asked_to():
    q, k, *rest = (x.detach() for x in inputs(1, 9, seed=3))
    normed, _ = chunk_gated_delta_rule(3 * q, 5 * k, *rest, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(normed, chunk_gated_delta_rule(q, k, *rest)[0], rtol=1e-5, atol=1e-6)


def test_half_precision_is_computed_in_single():
    tensors = [x.detach().bfloat16() for x in inputs(1, 130, seed=4)]
    found, _ = chunk_gated_delta_rule(*tensors)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, chunk_gated_delta_rule(*(x.float() for x in tensors))[0].bfloat16())


def test_states_are_refused():
    tensors = inputs(1, 3, seed=0)
    with pytest.raises(ValueError, match="expected None and False"):
        chunk_gated_delta_rule(*tensors, output_final_state=True)
    with pytest.raises(ValueError, match="expected None and False"):
        causal_conv1d(tensors[0].flatten(2), torch.ones(16, 4), initial_state=torch.zeros(1))
    with pytest.raises(ValueError, match="'relu'"):
        causal_conv1d(tensors[0].flatten(2), torch.ones(16, 4), activation="relu")


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), width=st.integers(1, 5))
def test_convolution(lengths, width):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(lengths), 6, generator=random, requires_grad=True)
    weight, bias = (torch.randn(*shape, generator=random, requires_grad=True) for shape in ((6, width), (6,)))

    def alone(segment: Tensor) -> Tensor:
        padded = F.pad(segment.mT, (width - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=6)).mT

    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    found, _ = causal_conv1d(x, weight, bias, "silu", cu_seqlens=cu_seqlens)
    compare(found, torch.cat([alone(segment) for segment in x.split(lengths, 1)], 1), [x, weight, bias])
    rows, _ = causal_conv1d(x.expand(2, -1, -1), weight, bias, "silu")
    torch.testing.assert_close(rows, alone(x).expand(2, -1, -1), rtol=1e-5, atol=1e-6)


def test_nothing_asks_the_device():
    q, k, v, g, beta = (x.detach().to("meta") for x in inputs(1, 150, seed=0))
    cu_seqlens = torch.tensor([0, 20, 150], device="meta", dtype=torch.int32)
    assert chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0].shape == v.shape
    assert causal_conv1d(v.flatten(2), torch.ones(24, 4, device="meta"), cu_seqlens=cu_seqlens)[0].shape[1] == 150
