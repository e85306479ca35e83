"""Names of megatron-core that upstream/schedule_nodes.py overrides and calls."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("schedule_nodes")
PLAN = "megatron.core.models.common.model_chunk_schedule_plan"
LAYER = "megatron.core.transformer.transformer_layer"


def test_build_callable_nodes_has_expected_parameters():
    nodes = "TransformerLayerSchedulePlan._build_callable_nodes"
    CONTRACT.takes(PLAN, nodes, "self", "event", "comp_stream", "comm_stream", "extra_args")
    CONTRACT.mentions(PLAN, "TransformerLayerSchedulePlan.__init__", "_build_callable_nodes")
    CONTRACT.mentions(PLAN, nodes, "self.pre_dispatch_computation", "self.mtp_post_process")


def test_extra_args_for_layer_has_expected_parameters():
    arguments = "TransformerModelChunkSchedulePlan._extra_args_for_layer"
    CONTRACT.takes(PLAN, arguments, "self", "module", "layer_idx", "num_layers")
    CONTRACT.mentions(PLAN, arguments, "is_first_layer", "is_last_layer")
    for name in ("LAYER_SCHEDULE_PLAN_CLASS", "PRE_PROCESS_NODE_CLASS", "POST_PROCESS_NODE_CLASS"):
        CONTRACT.find(PLAN, f"TransformerModelChunkSchedulePlan.{name}")


def test_forward_methods_of_transformer_layer_have_expected_arguments():
    CONTRACT.takes(
        LAYER, "TransformerLayer._forward_attention", "self", "hidden_states", "attention_mask", "context",
        "context_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin", "attention_bias",
        "inference_context", "packed_seq_params", "sequence_len_offset", "padding_mask", "inference_params",
    )  # fmt: skip
    CONTRACT.takes(LAYER, "TransformerLayer._forward_pre_mlp_layernorm", "self", "hidden_states")
    CONTRACT.mentions(LAYER, "TransformerLayer._forward_pre_mlp_layernorm", "self.mlp_norm_manager")


def test_attend_returns_attention_output_without_context():
    from qwen3vl_bridge.upstream.schedule_nodes import attend, normalize_before_experts

    class Layer:
        mlp_norm_manager = "context"

        def _forward_attention(self, hidden, rotary_pos_emb):
            return (hidden, rotary_pos_emb), "context"

        def _forward_pre_mlp_layernorm(self, hidden):
            return "normed", hidden

    layer = Layer()
    assert attend(layer, 1, rotary_pos_emb=2) == (1, 2)
    assert normalize_before_experts(layer, 1) == ("normed", 1) and layer.mlp_norm_manager is None
