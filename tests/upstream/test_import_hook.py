"""Modules of Megatron-Bridge import the names for which there are substitutes."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("import_hook")


@pytest.mark.parametrize(("module", "imports"), [
    ("megatron.bridge.peft.lora_layers", "import transformer_engine.pytorch"),
    ("megatron.bridge.training.pretrain", "nvidia_resiliency_ext.inprocess"),
])  # fmt: skip
def test_megatron_bridge_still_imports_modules_that_we_substitute(module, imports):
    """Otherwise the module no longer needs one, and the entry can be deleted."""
    if imports not in CONTRACT.source(module):
        CONTRACT.fail(module, f"{module} does not import {imports}")


def test_get_model_bridge_returns_our_bridge_for_qwen3_vl():
    from qwen3vl_bridge.models.qwen3_vl.bridge import Qwen3VLBridge

    import transformers

    find = CONTRACT.find("megatron.bridge.models.conversion.model_bridge", "get_model_bridge")
    if type(find(transformers.Qwen3VLForConditionalGeneration)) is not Qwen3VLBridge:
        CONTRACT.fail("megatron.bridge.models", "the registered bridge is not ours")


@pytest.mark.parametrize(("module", "call"), [
    ("opt.plugins.megatron", "torch.cuda.synchronize()"),
    ("export.unified_export_megatron", "torch.cuda.current_device()"),
    ("utils.plugins.mbridge", "torch.cuda.current_device()"),
])  # fmt: skip
def test_modelopt_modules_that_we_patch_still_call_cuda(module, call):
    """Otherwise the module no longer needs the CPU's `torch`, and the entry can be deleted."""
    if call not in CONTRACT.source(f"modelopt.torch.{module}"):
        CONTRACT.fail("modelopt.torch", f"modelopt.torch.{module} does not call {call}")
