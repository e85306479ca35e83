"""Names of megatron-core that upstream/gated_delta_net.py overrides and calls."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.models.qwen3_5.tiny import megatron_config
from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("gated_delta_net")
GDN = "megatron.core.ssm.gated_delta_net"


def test_gated_delta_net_setup_variant_attrs_sets_delta_rule():
    CONTRACT.takes(f"{GDN}.gdn", "GatedDeltaNet._setup_variant_attrs", "self")
    CONTRACT.mentions(
        f"{GDN}.gdn", "GatedDeltaNet._setup_variant_attrs",
        "self.gated_delta_rule", "self.in_proj_split_sections", "self.in_proj_split_names",
    )  # fmt: skip
    CONTRACT.mentions(f"{GDN}.common", "_GDNBase.__init__", "_setup_variant_attrs")


def test_gated_delta_net_forward_calls_delta_rule_with_cu_seqlens():
    CONTRACT.takes(
        f"{GDN}.gdn", "GatedDeltaNet.forward", "self", "hidden_states", "attention_mask", "inference_context",
        "packed_seq_params", "sequence_len_offset", "inference_params", "**kwargs",
    )  # fmt: skip
    CONTRACT.mentions(f"{GDN}.gdn", "GatedDeltaNet.forward", "self.gated_delta_rule", "cu_seqlens")


def test_gated_delta_net_forward_calls_resolve_cu_seqlens():
    CONTRACT.takes(
        f"{GDN}.gdn", "GatedDeltaNet._resolve_cu_seqlens",
        "self", "cu_seqlens_padded", "cu_seqlens_actual", "total_seq_len", "name", "cp_size",
    )  # fmt: skip
    CONTRACT.mentions(f"{GDN}.gdn", "GatedDeltaNet.forward", "_resolve_cu_seqlens")


def test_split_tensor_factory_has_expected_parameters():
    CONTRACT.takes(
        "megatron.core.ssm.utils", "_split_tensor_factory", "orig_sh_ten", "split_sections", "split_names", "split_dim"
    )
    CONTRACT.mentions(f"{GDN}.common", "_GDNBase.sharded_state_dict", "_split_tensor_factory")


def test_gated_delta_net_generation_functions_have_expected_parameters():
    CONTRACT.takes(
        f"{GDN}.common", "_GDNBase._prepare_input_for_gated_delta_rule",
        "self", "qkv", "gate", "batch", "seq_len", "*gate_feats",
    )  # fmt: skip
    CONTRACT.takes(
        f"{GDN}.common", "_GDNBase._compute_g_and_beta", "self", "A_log_local_cp", "dt_bias_local_cp", "alpha", "beta"
    )
    CONTRACT.takes(f"{GDN}.common", "get_parameter_local_cp", "param", "dim", "cp_group", "split_sections")
    CONTRACT.mentions(
        f"{GDN}.gdn", "GatedDeltaNet.forward",
        "_prepare_input_for_gated_delta_rule", "_compute_g_and_beta", "causal_conv1d", "self.feat_dim_split",
    )  # fmt: skip


def test_gated_delta_net_asks_context_parallel_group_only_for_size_and_rank():
    """With a `SingleRank` as the group, a layer exchanges nothing."""
    calls = ("self.pg_collection.cp.size()", "cp_group.size()", "cp_group.rank()")
    CONTRACT.mentions(f"{GDN}.common", "_GDNBase.__init__", calls[0])
    CONTRACT.mentions(f"{GDN}.common", "get_parameter_local_cp", *calls[1:])
    CONTRACT.mentions(f"{GDN}.common", "tensor_a2a_cp2hp", calls[1], "cp_size == 1")
    CONTRACT.mentions(f"{GDN}.common", "tensor_a2a_hp2cp", calls[1], "cp_size == 1")


def test_with_divisible_heads_passes_check_and_restores_heads():
    from qwen3vl_bridge.upstream.gated_delta_net import with_divisible_heads

    config = megatron_config()
    config.context_parallel_size = 3
    try:
        config.__post_init__()
    except AssertionError as error:
        assert "must be a multiple of" in str(error)
    else:
        CONTRACT.fail("megatron.core", "TransformerConfig accepts heads of linear attention that ranks do not divide")
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    with with_divisible_heads(config):
        config.__post_init__()
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == heads
