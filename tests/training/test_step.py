"""What the forward step refuses before anything is sent between pipeline stages."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.qwen3_vl.bridge import provider_from_hf_config
from qwen3vl_bridge.training.step import check_rows

import pytest
from transformers import AutoConfig

from tests.parity.batches import make_batch, make_samples


@pytest.mark.parametrize("packed", [True, False])
def test_rows_that_pipeline_stages_do_not_expect_are_refused(untied_folder, packed):
    config = AutoConfig.from_pretrained(untied_folder)
    batch = make_batch(make_samples("video", config, seed=0), config, packed=packed)
    rows, tokens = batch.input_ids.shape
    provider = provider_from_hf_config(config.to_dict(), seq_length=tokens)
    check_rows(batch, provider, rows=rows + 1)  # one stage: nobody waits for anything
    provider.pipeline_model_parallel_size = 2
    check_rows(batch, provider, rows=rows)
    with pytest.raises(ValueError, match=rf"has {rows} rows, expected train.micro_batch_size, {rows + 1}"):
        check_rows(batch, provider, rows=rows + 1)
    provider.seq_length += 4
    with pytest.raises(
        ValueError, match=rf"have {tokens} tokens, expected model.seq_length, {tokens + 4}, .* set model.var"
    ):
        check_rows(batch, provider, rows=rows)
    provider.variable_seq_lengths = True
    check_rows(batch, provider, rows=rows + 1)
