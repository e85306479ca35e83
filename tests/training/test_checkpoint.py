"""Training checkpoints: complete or refused, exported with every weight, started from any import."""

from __future__ import annotations

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint
from qwen3vl_bridge.training.small_loop import checkpoint

import pytest
import torch
from safetensors.torch import load_file


def test_training_starts_from_the_imported_weights(inputs):
    from qwen3vl_bridge.training.small_loop.loop import set_up

    from transformers import Qwen3VLForConditionalGeneration

    run = set_up(inputs.config(None))
    reference = Qwen3VLForConditionalGeneration.from_pretrained(inputs.hf).state_dict()
    ours = dict(run.model[0].module.named_parameters())
    assert torch.equal(
        ours["language_model.embedding.word_embeddings.weight"], reference["model.language_model.embed_tokens.weight"]
    )
    gate_up = [f"model.language_model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert torch.equal(
        ours["language_model.decoder.layers.1.mlp.linear_fc1.weight"], torch.cat([reference[n] for n in gate_up])
    )


def test_no_step_changes_no_weight_from_import_to_export(inputs, tmp_path):
    from qwen3vl_bridge.training.small_loop.loop import set_up

    run = set_up(inputs.config(tmp_path / "run"))
    checkpoint.save(tmp_path / "run", run)
    export_checkpoint(tmp_path / "run", tmp_path / "hf", progress=False)
    before, after = load_file(inputs.hf / "model.safetensors"), {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(model__share_embeddings_and_output_weights=True), "unexpected: .*output_layer.weight"),
        (dict(model__ffn_hidden_size=64), r"misshapen: .*linear_fc1.weight_v is \[.*\], expected \[64, .*\]"),
        (dict(model__num_layers=5), r"missing: .*layers\.4\.mlp"),
        (dict(checkpoint__pretrained_checkpoint="/nowhere"), "/nowhere: found nothing, expected the folder"),
    ],
)
def test_weights_that_do_not_fit_are_listed(inputs, settings, message):
    from qwen3vl_bridge.training.small_loop.loop import set_up

    with pytest.raises(CheckpointError, match=message):
        set_up(inputs.config(None, **settings))


def test_a_tracker_that_lies_is_an_error(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match="iter_0000007 is no checkpoint"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(train__rampup_batch_size=[2, 2, 8]), "does not follow train.rampup_batch_size"),
        (dict(validation__eval_micro_batch_size=2), "does not follow validation.eval_micro_batch_size"),
        (dict(optimizer__optimizer="sgd"), "does not follow optimizer.optimizer"),
        (dict(dataset__seq_length=64), "dataset.seq_length is 64, expected model.seq_length, 128"),
    ],
)
def test_settings_the_loop_would_ignore_are_refused(inputs, settings, message):
    from qwen3vl_bridge.training.small_loop.loop import set_up

    with pytest.raises(ValueError, match=message):
        set_up(inputs.config(None, **settings))
