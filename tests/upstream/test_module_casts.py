"""Names of torch that upstream/module_casts.py overrides."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
from torch import nn

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("module_casts")
MODULE = "torch.nn.modules.module"


def test_torch_module_casts_call_private_apply():
    CONTRACT.takes(MODULE, "Module._apply", "self", "fn", "recurse")
    for name in ("half", "bfloat16", "to", "float"):
        CONTRACT.mentions(MODULE, f"Module.{name}", "_apply")


def test_torch_module_apply_calls_apply_of_children():
    CONTRACT.mentions(MODULE, "Module._apply", "module._apply")


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_keep_float32_module_cast_keeps_named_parameters_in_float32(cast):
    from qwen3vl_bridge.upstream.module_casts import KeepFloat32

    class Kept(KeepFloat32, nn.Linear):
        float32_parameters = ("bias",)

    module = Kept(2, 2)
    value = module.bias.detach().clone()
    getattr(nn.Sequential(module), cast)()
    assert module.bias.dtype is torch.float32 and torch.equal(module.bias, value)
    assert module.weight.dtype.itemsize == 2
    assert module.double().bias.dtype is torch.float64
