"""Names of ModelOpt that upstream/modelopt_layers.py reads."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
from torch import nn

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("modelopt_layers")
DISTILLATION = "modelopt.torch.distill.distillation_model"


def test_modelopt_state_manager_key_is_modelopt_state():
    key = CONTRACT.find("modelopt.torch.opt.conversion", "ModeloptStateManager._state_key", str)
    if key != "_modelopt_state":
        CONTRACT.fail("modelopt.torch.opt.conversion", f"ModeloptStateManager._state_key is {key!r}")


def test_modelopt_distillation_model_uses_private_intermediate_output():
    CONTRACT.mentions(DISTILLATION, "DistillationModel", "_intermediate_output")


def test_weight_scales_constant_is_name_of_modelopt_quantizer_buffer():
    quantizer = "modelopt.torch.quantization.nn.modules.tensor_quantizer"
    CONTRACT.mentions(quantizer, "TensorQuantizer", "_amax")
    CONTRACT.mentions("modelopt.torch.quantization.nn.modules.quant_module", "QuantLinearConvBase", "weight_quantizer")
    from qwen3vl_bridge.upstream.modelopt_layers import WEIGHT_SCALES

    assert WEIGHT_SCALES == ".weight_quantizer._amax"


def test_is_converted_and_keeps_output_detect_modelopt_attributes():
    from qwen3vl_bridge.upstream.modelopt_layers import is_converted, keeps_output

    layer = nn.Linear(1, 1)
    assert not is_converted(layer) and not keeps_output(layer)
    layer._modelopt_state, layer._intermediate_output = [], None
    assert is_converted(layer) and keeps_output(layer)
