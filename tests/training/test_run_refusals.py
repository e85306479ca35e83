"""Settings that a run could not follow, or that would end it at its first save, are refused before it starts."""

from __future__ import annotations

from qwen3vl_bridge.models.qwen3_vl.bridge import provider_from_hf_config
from qwen3vl_bridge.training import run_refusals
from qwen3vl_bridge.training.step import check_rows

import pytest
import qwen3vl_recipes
import torch
from megatron.bridge.training.config import runtime_config_update
from transformers import AutoConfig

from tests.parity.batches import make_batch, make_samples


@pytest.mark.parametrize(
    "name", ["optimizer.lr", "optimizer.min_lr", "scheduler.start_weight_decay", "scheduler.end_weight_decay"]
)
def test_an_end_that_is_none_is_named(name):
    cfg = qwen3vl_recipes.qwen3_vl_2b_sft_config()
    run_refusals._check_schedule(cfg)
    section, field = name.split(".")
    setattr(getattr(cfg, section), field, None)
    with pytest.raises(ValueError, match=f"^{name}: found None, expected numbers"):
        run_refusals._check_schedule(cfg)


def test_a_first_save_that_would_end_the_run_is_refused_before_it(inputs, monkeypatch, tmp_path):
    """Recipes, as people start them under torchrun: one process of two asks for both GPUs of a small machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def start(*, room: int, **settings):
        monkeypatch.setattr(run_refusals, "host_bytes", lambda: room)
        cfg = inputs.config(tmp_path, checkpoint__ckpt_format="torch_dist", ddp__use_megatron_fsdp=False, **settings)
        runtime_config_update(cfg)

    by_numbers = dict(checkpoint__dist_ckpt_optim_fully_reshardable=False)
    message = r"takes .* on each of 1 ranks, .*optim_fully_reshardable False, .* GiB a rank"
    with pytest.raises(ValueError, match=message):
        start(room=2**20)
    for settings in (dict(room=2**40), dict(room=2**20, **by_numbers), dict(room=2**20, checkpoint__save=None)):
        start(**settings)


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
