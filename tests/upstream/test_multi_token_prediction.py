"""Names of megatron-core that upstream/multi_token_prediction.py overrides and calls."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("multi_token_prediction")
MTP = "megatron.core.transformer.multi_token_prediction"


def test_mtp_layer_forward_calls_get_embeddings():
    CONTRACT.takes(
        MTP, "MultiTokenPredictionLayer._get_embeddings", "self", "input_ids", "position_ids", "embedding",
        "hidden_states", "packed_seq_params", "padding_mask",
    )  # fmt: skip
    CONTRACT.mentions(MTP, "MultiTokenPredictionLayer.forward", "_get_embeddings")


def test_mtp_acceptance_counts_function_has_expected_parameters():
    CONTRACT.takes(
        MTP, "_compute_mtp_acceptance_counts",
        "mtp_logits", "mtp_labels", "loss_mask", "output_layer", "runtime_gather_output", "tp_group",
    )  # fmt: skip


def test_mtp_get_embeddings_override_returns_values_in_order_of_megatron_core():
    from qwen3vl_bridge.upstream.multi_token_prediction import EmbeddedPredictionLayer

    layer = EmbeddedPredictionLayer.__new__(EmbeddedPredictionLayer)
    assert layer._get_embeddings("ids", "positions", "embedded", "hidden", None, "mask") == (
        "ids", "positions", "mask", "embedded", "hidden"
    )  # fmt: skip
    CONTRACT.mentions(MTP, "MultiTokenPredictionLayer.forward", "input_ids", "position_ids", "padding_mask")
