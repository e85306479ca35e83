"""Names of torch that upstream/module_hooks.py reads."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
from torch import nn

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("module_hooks")
MODULE = "torch.nn.modules.module"
NAMES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@pytest.mark.parametrize("name", NAMES)
def test_torch_module_has_private_hook_attributes(name):
    if not hasattr(nn.Module(), name):
        CONTRACT.fail(MODULE, f"a module has no {name}")
    CONTRACT.mentions(MODULE, "Module._call_impl", name)


def test_forward_pre_hooks_and_has_later_hooks_find_registered_hooks():
    from qwen3vl_bridge.upstream.module_hooks import forward_pre_hooks, has_later_hooks

    def hook(*_):
        return None

    module = nn.Linear(1, 1)
    assert forward_pre_hooks(module) == [] and not has_later_hooks(module)
    module.register_forward_pre_hook(hook)
    assert forward_pre_hooks(module) == [hook] and not has_later_hooks(module)
    for register in ("register_forward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        module = nn.Linear(1, 1)
        getattr(module, register)(hook)
        assert has_later_hooks(module), register
