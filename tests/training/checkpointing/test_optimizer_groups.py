"""Settings of an optimizer's groups, from a checkpoint with and without an optimizer of experts, in either form.

Both ways are taken by runs in `test_initial_weights.py` and `dist_train/test_modules_on_ranks.py`, with an
optimizer that is not distributed: without Transformer Engine a distributed one saves and cannot load.
"""

from types import SimpleNamespace

from qwen3vl_bridge.training.resuming import in_own_form, loads_either_form

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


def test_parameters_of_a_group_stay_with_it():
    own = {"state": {0: "moments"}, "param_groups": [{"params": [0, 2]}, {"params": [1]}]}
    parts = [
        {"param_groups": [one | {"lr": 0.5} for one in part.param_groups], "state": {"common_step": 7}} for part in TWO
    ]
    found = in_own_form(own | dict(enumerate(parts)), ONE)
    assert found["state"] == {0: "moments", "common_step": 7}
    assert [(one["wd_mult"], one["params"], one["lr"]) for one in found["param_groups"]] == [
        (0.0, [0, 2], 0.5),
        (1.0, [1], 0.5),
    ]


def test_the_same_form_is_left_alone():
    state = dict(enumerate(saved(TWO)))
    assert in_own_form(state, TWO) is state


def test_an_optimizer_is_as_before_afterwards():
    class Optimizer:
        chained_optimizers = ONE

        def load_state_dict(self, state: dict) -> None:
            self.loaded = state

    found = Optimizer()
    with loads_either_form(found):
        found.load_state_dict(state := {"param_state": {}})
    assert found.loaded is state and "load_state_dict" not in vars(found)
