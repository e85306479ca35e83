"""`AutoBridge` writes adapters by two methods, which each object can have of its own."""

import copy
import pickle
import sys
from types import ModuleType

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("auto_bridge_saves")
MODULE, SAVE = "megatron.bridge.models.conversion.auto_bridge", "AutoBridge.save_hf_adapter"


def test_auto_bridge_adapter_methods_have_expected_parameters():
    CONTRACT.takes(MODULE, "AutoBridge.__init__", "self", "hf_pretrained")
    # Since megatron-bridge 0.7; `peft/running_model_export.py` takes it too.
    newer = ("expand_shared_outer",) if CONTRACT.has_parameter(MODULE, SAVE, "expand_shared_outer") else ()
    CONTRACT.takes(
        MODULE, SAVE, "self", "model", "path", "peft_config", "base_model_name_or_path", "show_progress",
        "exclude_adapter_base_prefixes", *newer,
    )  # fmt: skip
    CONTRACT.takes(
        MODULE, "AutoBridge.export_adapter_ckpt", "self", "peft_checkpoint", "output_path", "show_progress",
        "exclude_adapter_base_prefixes", *newer,
    )  # fmt: skip
    CONTRACT.mentions(MODULE, "AutoBridge.export_adapter_ckpt", "save_hf_adapter")


@pytest.mark.parametrize("is_ours", [True, False])
def test_save_adapters_with_calls_our_function_only_for_our_bridges(is_ours, monkeypatch):
    from qwen3vl_bridge.upstream import auto_bridge_saves, replacements

    called, module = [], ModuleType("stand_in")

    class AutoBridge:
        __module__ = "stand_in"

        def __init__(self, config):
            self._model_bridge = config

        def save_hf_adapter(self, model, path):
            called.append(("theirs", model, path))

        def export_adapter_ckpt(self, checkpoint, output):
            called.append(("export", checkpoint, output))

    module.AutoBridge = AutoBridge
    monkeypatch.setitem(sys.modules, "stand_in", module)
    monkeypatch.setattr(replacements, "_done", {})
    auto_bridge_saves.save_adapters_with(
        module,
        lambda bridge: bridge == "ours",
        save=lambda bridge, *given: called.append(("ours", *given)),
        check=lambda folder: called.append(("check", folder)),
    )
    bridge = AutoBridge("ours" if is_ours else "theirs")
    expected = [("ours" if is_ours else "theirs", "model", "path"), ("export", "checkpoint", "output")]
    for one in (bridge, copy.copy(bridge), pickle.loads(pickle.dumps(bridge))):
        called.clear()
        one.save_hf_adapter("model", "path")
        one.export_adapter_ckpt("checkpoint", "output")
        assert called == ([expected[0], ("check", "checkpoint"), expected[1]] if is_ours else expected)
        assert isinstance(one, AutoBridge)

    class Other(AutoBridge):
        def save_hf_adapter(self, model, path):
            raise NotImplementedError

    with pytest.raises(NotImplementedError):
        Other("ours").save_hf_adapter("model", "path")
