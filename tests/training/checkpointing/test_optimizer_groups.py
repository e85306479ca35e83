"""Settings of an optimizer's groups, from a checkpoint with and without an optimizer of experts, in either form.

Both ways are taken by runs in `test_initial_weights.py` and `dist_train/test_modules_on_ranks.py`, with an
optimizer that is not distributed: without Transformer Engine a distributed one saves and cannot load.
"""

from types import SimpleNamespace

from qwen3vl_bridge.training.resuming import in_own_form

import pytest

KIND = "fully_reshardable"


def group(decay: float, *, experts: bool, **more) -> dict:
    return {"wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": experts, "is_decoupled_lr": False, **more}


def optimizer(*groups: dict) -> SimpleNamespace:
    return SimpleNamespace(param_groups=list(groups))


ONE = [optimizer(group(0.0, experts=False), group(1.0, experts=False))]
TWO = [ONE[0], optimizer(group(1.0, experts=True))]


def saved(chain: list, step: int = 7) -> list[dict]:
    """What is saved of a chain of distributed optimizers, beside tensors; groups in another order."""
    return [
        {
            "optimizer": {"param_groups": [one | {"step": step} for one in reversed(part.param_groups)]},
            "param_state_sharding_type": KIND,
        }
        for part in chain
    ]


@pytest.mark.parametrize(("before", "after"), [(TWO, ONE), (ONE, TWO)], ids=["EP to none", "none to EP"])
def test_a_distributed_optimizers_settings_at_another_expert_parallel_size(before, after):
    settings, tensors = saved(before), [{"param_state": {"tensor": i}} for i in range(len(after))]
    state = dict(enumerate(settings)) if len(before) > 1 else settings[0]
    state |= dict(enumerate(tensors)) if len(after) > 1 else tensors[0]
    found = in_own_form(state, after)
    for i, (own, tensor) in enumerate(zip(after, tensors, strict=True)):
        part = found[i] if len(after) > 1 else found
        assert part["optimizer"]["param_groups"] == [one | {"step": 7} for one in own.param_groups]
        assert part["param_state"] == tensor["param_state"] and part["param_state_sharding_type"] == KIND
    assert found.keys() == (set(range(len(after))) if len(after) > 1 else tensors[0].keys() | settings[0].keys())
