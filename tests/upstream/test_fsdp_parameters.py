"""Names of Megatron-FSDP that upstream/fsdp_parameters.py calls."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("fsdp_parameters")
FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp"


@pytest.mark.parametrize("name", ["_replace_param_with_raw_if_needed", "_replace_param_with_distributed_if_needed"])
def test_megatron_fsdp_has_private_methods_that_replace_parameters(name):
    CONTRACT.takes(FSDP, f"MegatronFSDP.{name}", "self")
    CONTRACT.mentions(FSDP, f"MegatronFSDP.{name}", "is_param_fsdp_distributed")


@pytest.mark.parametrize("distributed", [True, False])
def test_module_parameters_restores_distributed_parameters_after_error(distributed):
    from qwen3vl_bridge.upstream.fsdp_parameters import module_parameters

    class Model:
        is_param_fsdp_distributed = distributed
        calls = ()

        def _replace_param_with_raw_if_needed(self):
            self.calls += ("raw",)

        def _replace_param_with_distributed_if_needed(self):
            self.calls += ("distributed",)

    model = Model()
    with pytest.raises(KeyError), module_parameters(model):
        assert model.calls == (("raw",) if distributed else ())
        raise KeyError
    assert model.calls == (("raw", "distributed") if distributed else ())
