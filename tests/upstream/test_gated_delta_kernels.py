"""Names of megatron-core that upstream/gated_delta_kernels.py replaces."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("gated_delta_kernels")
GDN = "megatron.core.ssm.gated_delta_net"


def test_gated_delta_net_checks_that_flash_linear_attention_is_installed():
    CONTRACT.find(f"{GDN}.common", "HAVE_FLA", bool)
    CONTRACT.mentions(f"{GDN}.common", "_GDNBase.__init__", "HAVE_FLA")


def test_gated_delta_net_calls_l2norm_of_module_common():
    CONTRACT.find(f"{GDN}.common", "l2norm")
    CONTRACT.mentions(f"{GDN}.common", "_GDNBase._prepare_input_for_gated_delta_rule", "l2norm")


def test_gated_delta_net_calls_causal_conv1d_of_its_module():
    CONTRACT.find(f"{GDN}.gdn", "causal_conv1d")
    CONTRACT.mentions(
        f"{GDN}.gdn", "GatedDeltaNet.forward", "causal_conv1d", "cu_seqlens", "initial_state", "output_final_state"
    )


def test_without_package_check_restores_flag_after_error(monkeypatch):
    from qwen3vl_bridge.upstream import gated_delta_kernels

    monkeypatch.setattr(gated_delta_kernels.common, "HAVE_FLA", False)
    with pytest.raises(RuntimeError), gated_delta_kernels.without_package_check():
        assert gated_delta_kernels.common.HAVE_FLA
        raise RuntimeError
    assert gated_delta_kernels.common.HAVE_FLA is False
