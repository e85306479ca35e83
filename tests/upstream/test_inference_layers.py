"""Names that `upstream/inference_layers.py` borrows."""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from qwen3vl_bridge.lazy import is_installed
from qwen3vl_bridge.upstream import inference_layers, replacements

import pytest
from packaging.version import Version

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("inference_layers")
DEFINED_IN = "megatron.core.tensor_parallel.inference_layers"
CHECK = "is_inference_column_parallel_linear"
CALLED_IN = "megatron.core.transformer.multi_token_prediction"


def test_mtp_calls_inference_layer_check_since_megatron_core_0_20():
    """The check does not exist before megatron-core 0.20."""
    if Version(version("megatron-core")) < Version("0.20.dev0"):
        CONTRACT.find(CALLED_IN, "MultiTokenPredictionLayer", type)
        assert not hasattr(import_module(CALLED_IN), CHECK)
        return
    CONTRACT.takes(DEFINED_IN, CHECK, "module")
    CONTRACT.mentions(CALLED_IN, "MultiTokenPredictionLayer.__init__", CHECK)


def test_find_no_inference_layers_replaces_check_without_transformer_engine(monkeypatch):
    module = ModuleType(CALLED_IN)
    monkeypatch.setattr(inference_layers, "multi_token_prediction", module)
    monkeypatch.setattr(replacements, "_done", {})
    inference_layers.find_no_inference_layers()
    assert not hasattr(module, CHECK)
    theirs = vars(module)[CHECK] = lambda layer: True
    inference_layers.find_no_inference_layers()
    assert (getattr(module, CHECK) is theirs) == is_installed("transformer_engine")
