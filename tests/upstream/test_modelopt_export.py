"""ModelOpt's exporter collects the weights of layers by a method, and copies vision towers by their prefixes."""

import inspect

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("modelopt_export")
MODULE, KIND = "modelopt.torch.export.unified_export_megatron", "GPTModelExporter"


def test_modelopt_exporter_has_attributes_that_we_override():
    kind = CONTRACT.find(MODULE, KIND)
    CONTRACT.mentions(MODULE, "export_mcore_gpt_to_hf", KIND)
    CONTRACT.declares(
        MODULE, f"{KIND}.__init__", "self", "model", "pretrained_model_name_or_path", "export_extra_modules", "dtype",
        "trust_remote_code", "moe_router_dtype", "clamp_kv_cache_scales",
    )  # fmt: skip
    theirs = next(one for one in kind.__mro__ if one.__module__ == MODULE)
    source = inspect.getsource(theirs)
    for name in (
        "self._layer_state_dicts[", "def _get_state_dict(self)", "self.vision_passthrough_prefixes", "self.dtype",
        "self.exclude_modules", "self.model = language_model", "pretrained_model_name_or_path",
    ):  # fmt: skip
        if name not in source:
            CONTRACT.fail(MODULE, f"{KIND} has no {name}")
