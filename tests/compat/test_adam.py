"""The Adam of machines without Transformer Engine and Apex: torch's steps, by the contract of the fused kinds."""

from __future__ import annotations

import copy

from qwen3vl_bridge.compat.adam import Adam

import pytest
import torch

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
