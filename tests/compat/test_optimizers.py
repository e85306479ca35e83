"""Adam and the norm of gradients on machines without fused kernels: torch's steps and megatron-core's value."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from qwen3vl_bridge.compat import optimizers
from qwen3vl_bridge.compat.optimizers import Adam

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm

SETTINGS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_torchs(decoupled):
    """To the last bit, also of a parameter that gets no gradient in a step."""
    weights = [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    mine = Adam([dict(params=ours[:2]), dict(params=ours[2:], weight_decay=0.0)], adam_w_mode=decoupled, **SETTINGS)
    reference = kind([dict(params=theirs[:2]), dict(params=theirs[2:], weight_decay=0.0)], **SETTINGS)
    for step in range(20):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + i))
            other.grad = one.grad.clone()
        mine.step()
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_the_contract_of_the_fused_kinds():
    """A count by group, moments of every parameter, and states that go on in another one."""
    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
    adam = Adam([dict(params=parameters[:2]), dict(params=[]), dict(params=parameters[2:])], **SETTINGS)
    parameters[0].grad = torch.ones(4)
    before = parameters[1].detach().clone()
    adam.step()
    assert [group.get("step") for group in adam.param_groups] == [1, None, 1]
    assert all(adam.state[p].keys() == {"exp_avg", "exp_avg_sq"} for p in parameters)
    assert torch.equal(parameters[1], before) and not adam.state[parameters[1]]["exp_avg"].any()
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    again = Adam([dict(params=copies[:2]), dict(params=[]), dict(params=copies[2:])], **SETTINGS)
    again.load_state_dict(copy.deepcopy(adam.state_dict()))
    copies[0].grad = parameters[0].grad = torch.full((4,), 0.5)
    adam.step()
    again.step()
    assert torch.equal(copies[0], parameters[0]) and again.param_groups[0]["step"] == 2


def test_what_it_has_not_is_refused():
    with pytest.raises(ValueError, match="capturable is True"):
        Adam([torch.nn.Parameter(torch.zeros(1))], capturable=True)
    with pytest.raises(TypeError, match="exp_avg_dtype"):
        Adam([torch.nn.Parameter(torch.zeros(1))], exp_avg_dtype=torch.bfloat16)


def test_megatron_core_builds_it_where_there_is_no_fused_one():
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if optimizer.Adam.__module__.startswith(("transformer_engine", "apex")):
        pytest.skip("a fused Adam is installed")
    assert optimizer.Adam is distrib_optimizer.Adam is Adam
    assert not optimizer.USING_PYTORCH_OPTIMIZER and distrib_optimizer.HAVE_APEX_OR_TE


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
    found, per_tensor = optimizers.l2_norm(2048, torch.zeros(1), [tensors], False)
    expected, _ = local_multi_tensor_l2_norm(2048, torch.zeros(1), [tensors], False)
    assert per_tensor is None and found.shape == expected.shape == (1,) and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(value):
    found, _ = optimizers.l2_norm(2048, torch.zeros(1), [[torch.ones(3), torch.tensor([1.0, value])]], False)
    assert not found.isfinite()


def test_it_replaces_megatron_cores_but_no_fused_one():
    assert clip_grads.l2_norm_impl is optimizers.l2_norm
    fused = SimpleNamespace(l2_norm_impl=torch.norm)
    optimizers.patch_clipping(fused)
    assert fused.l2_norm_impl is torch.norm
