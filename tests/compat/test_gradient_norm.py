"""The norm of gradients without fused kernels: megatron-core's value, without its waits."""

from __future__ import annotations

from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  replaces the function
from qwen3vl_bridge.compat import gradient_norm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(-6, 6),
    st.integers(0, 9),
)
def test_the_value_is_that_of_megatron_core(shapes, dtype, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [(torch.randn(shape, generator=generator) * 10**exponent).to(dtype) for shape in shapes]
    found, per_tensor = gradient_norm.l2_norm(2048, torch.zeros(1), [tensors], False)
    expected, _ = local_multi_tensor_l2_norm(2048, torch.zeros(1), [tensors], False)
    assert per_tensor is None and found.shape == expected.shape == (1,) and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(value):
    found, _ = gradient_norm.l2_norm(2048, torch.zeros(1), [[torch.ones(3), torch.tensor([1.0, value])]], False)
    assert not found.isfinite()


def test_it_replaces_megatron_cores_but_no_fused_one():
    assert clip_grads.l2_norm_impl is gradient_norm.l2_norm
    fused = SimpleNamespace(l2_norm_impl=torch.norm)
    gradient_norm.replace_in_clipping(fused)
    assert fused.l2_norm_impl is torch.norm
