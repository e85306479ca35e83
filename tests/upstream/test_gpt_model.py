"""Names of megatron-core that upstream/gpt_model.py overrides."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("gpt_model")
GPT = "megatron.core.models.gpt.gpt_model"


def test_gpt_model_postprocess_has_expected_parameters():
    CONTRACT.takes(
        GPT, "GPTModel._postprocess", "self", "hidden_states", "input_ids", "position_ids", "labels", "rotary_pos_emb",
        "rotary_pos_cos", "rotary_pos_sin", "mtp_in_postprocess", "loss_mask", "decoder_input", "attention_mask",
        "padding_mask", "inference_params", "packed_seq_params", "sequence_len_offset", "runtime_gather_output",
        "extra_block_kwargs", "inference_context", "output_processor", "output_processor_context",
    )  # fmt: skip


def test_gpt_model_forward_and_schedule_node_call_postprocess():
    CONTRACT.mentions(GPT, "GPTModel.forward", "_postprocess")
    CONTRACT.mentions("megatron.core.models.common.utils", "PostProcessNode.forward_impl", "_postprocess")


def test_output_gpt_model_postprocess_calls_compute_output():
    from qwen3vl_bridge.upstream.gpt_model import OutputGPTModel

    class Model(OutputGPTModel):
        def compute_output(self, hidden_states, **arguments):
            return hidden_states, arguments

    assert Model.__new__(Model)._postprocess(hidden_states=1, labels=2) == (1, {"labels": 2})
