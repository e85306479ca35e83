"""What is said of checkpoints in a configuration is followed, or refused."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.training.small_loop import checkpoint
from qwen3vl_bridge.training.small_loop.checkpoint_settings import FOLLOWED, REFUSED, WITHOUT_EFFECT

import pytest
import torch

STEPS = dict(train__train_iters=6, validation__eval_interval=0)
# Megatron-Bridge takes the one for Megatron-FSDP alone, and the other without it.
FORMATS = {
    "fsdp_dtensor": {},
    "torch_dist": dict(
        checkpoint__ckpt_format="torch_dist",
        ddp__use_megatron_fsdp=False,
        ddp__data_parallel_sharding_strategy="no_shard",
        ddp__use_distributed_optimizer=False,
        optimizer__use_distributed_optimizer=False,
    ),
}


def config(inputs, save: Path | None, **settings):
    """The shortened digits recipe, for steps that are taken one by one, without callbacks."""
    cfg = inputs.config(save, **STEPS | settings)
    cfg.guard = None
    return cfg


def begun(inputs, save: Path, steps: int = 1, **settings):
    """A run after some steps, saved after each."""
    from qwen3vl_bridge.training.small_loop.loop import set_up, train_step

    run = set_up(config(inputs, save, **settings))
    for _ in range(steps):
        train_step(run)
        checkpoint.save(save, run)
    return run


def again(inputs, save: Path | None, **settings):
    """The run as it goes on."""
    from qwen3vl_bridge.training.small_loop.loop import set_up

    return set_up(config(inputs, save, **settings))


@pytest.fixture(scope="module")
def saved(inputs, tmp_path_factory):
    """A run after two steps."""
    return begun(inputs, tmp_path_factory.mktemp("saved"), 2)


def folder_of(run) -> Path:
    return Path(run.cfg.checkpoint.save)


def moments(run) -> list[torch.Tensor]:
    from qwen3vl_bridge.training.checkpointing.optimizer_state import adam_states

    return [state["exp_avg"] for state in adam_states(run.optimizer).values()]


def weights(run) -> list[torch.Tensor]:
    return [p.detach() for chunk in run.model for p in chunk.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_every_setting_has_its_place():
    from megatron.bridge.training.config import CheckpointConfig

    fields = {field.name: field.default for field in dataclasses.fields(CheckpointConfig)}
    groups = [FOLLOWED, WITHOUT_EFFECT, REFUSED.keys()]
    assert set().union(*groups) == fields.keys() and sum(map(len, groups)) == len(fields)
    assert all(fields[name] in values for name, values in REFUSED.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(checkpoint__save_retain_interval=4), "checkpoint.save_retain_interval is 4, expected None"),
        (dict(checkpoint__verify_integrity=True), "checkpoint.verify_integrity is True, expected False"),
        (dict(checkpoint__dist_ckpt_strictness="log_all"), "dist_ckpt_strictness is 'log_all', expected 'assume_ok"),
        (dict(checkpoint__ckpt_format="torch"), "ckpt_format is 'torch', expected fsdp_dtensor or torch_dist"),
        (dict(checkpoint__most_recent_k=0), "most_recent_k is 0, expected at least 1"),
    ],
)
def test_what_would_be_ignored_is_refused(inputs, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        again(inputs, tmp_path, **settings)


def test_the_newest_are_kept(inputs, tmp_path):
    (tmp_path / "iter_notes").mkdir(parents=True)
    begun(inputs, tmp_path, 3, checkpoint__most_recent_k=2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000003", "iter_notes"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_a_vocabulary_may_be_padded_otherwise(inputs, tmp_path, ckpt_format):
    """Rows of no token come and go; those of tokens, and their moments, stay."""
    settings = FORMATS[ckpt_format] | dict(model__make_vocab_size_divisible_by=300)
    run = begun(inputs, tmp_path, **settings, model__should_pad_vocab=True)
    less = again(inputs, tmp_path, **settings, model__should_pad_vocab=False)
    checkpoint.save(tmp_path, less)
    more = again(inputs, tmp_path, **settings, model__should_pad_vocab=True)
    rows = {len(t) for t in weights(run)} - {len(t) for t in weights(less)}
    assert rows == {600}
    for ours, theirs, back in zip(*(weights(r) + moments(r) for r in (run, less, more)), strict=True):
        assert torch.equal(ours[: len(theirs)] if ours.ndim else ours, theirs) and torch.equal(ours, back)


def test_bfloat16_keeps_its_float32_weights_in_torch_dist(inputs, tmp_path):
    half = dict(model__bf16=True, optimizer__bf16=True)
    half |= dict.fromkeys(
        (*("model__params_dtype", "model__pipeline_dtype", "model__autocast_dtype"), "optimizer__params_dtype"),
        torch.bfloat16,
    )
    run = begun(inputs, tmp_path, 2, **FORMATS["torch_dist"] | half)
    back = again(inputs, tmp_path, **FORMATS["torch_dist"] | half)
    mains = [[p.main_param for p in r.model[0].parameters()] for r in (run, back)]
    assert same(*mains) and same(weights(run), weights(back)) and same(moments(run), moments(back))
    assert any(not torch.equal(t, t.bfloat16().float()) for t in mains[0])


def test_a_step_may_be_chosen(inputs, saved):
    run = again(inputs, folder_of(saved), checkpoint__ckpt_step=1)
    assert run.progress.step == 1
    with pytest.raises(CheckpointError, match=r"iter_0000007 is no checkpoint.*iterations found"):
        again(inputs, folder_of(saved), checkpoint__ckpt_step=7)


def test_a_folder_without_a_checkpoint_is_a_new_run_or_an_error(inputs, tmp_path):
    assert again(inputs, tmp_path).progress.step == 0
    with pytest.raises(CheckpointError, match="which has no checkpoint; expected one"):
        again(inputs, tmp_path, checkpoint__exit_on_missing_checkpoint=True)


def test_finetuning_takes_the_weights_alone(inputs, saved):
    run = again(inputs, folder_of(saved), checkpoint__finetune=True)
    assert same(weights(run), weights(saved))
    assert run.progress.step == run.scheduler.num_steps == run.stream.state_dict()["row"] == 0
    assert not any(moment.any() for moment in moments(run))


def test_the_optimizer_may_be_left_out(inputs, saved, tmp_path):
    run = again(inputs, folder_of(saved), checkpoint__load_optim=False)
    assert run.progress.step == 2 and same(weights(run), weights(saved))
    assert not any(moment.any() for moment in moments(run)) and run.scheduler.num_steps == 0
    begun(inputs, tmp_path, checkpoint__save_optim=False)
    with pytest.raises(CheckpointError, match=r"saved without the optimizer.*load_optim=false"):
        again(inputs, tmp_path)
    assert again(inputs, tmp_path, checkpoint__load_optim=False).progress.step == 1


def test_random_states_return_or_start_anew(inputs, tmp_path, caplog):
    run = begun(inputs, tmp_path)
    torch.rand(2)  # steps draw none
    checkpoint.save(tmp_path, run)
    expected = torch.rand(3)
    again(inputs, tmp_path)
    assert torch.equal(torch.rand(3), expected)
    again(inputs, tmp_path, checkpoint__load_rng=False)
    assert not torch.equal(torch.rand(3), expected)

    run.cfg.checkpoint.save_rng = False
    checkpoint.save(tmp_path, run)
    draws = []
    with caplog.at_level(logging.INFO, "qwen3vl_bridge"):
        for seed in (1234, 1234, 1235):
            again(inputs, tmp_path, rng__seed=seed)
            draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert "has no random states" in caplog.text and "from rng.seed 1234 and step 1" in caplog.text
    warned = [record for record in caplog.records if "random states are left out" in record.getMessage()]
    assert {record.levelno for record in warned} == {logging.WARNING}


def test_imported_weights_are_no_run(inputs):
    with pytest.raises(CheckpointError, match=r"no run_state\.pt.*name it as checkpoint\.pretrained_checkpoint"):
        again(inputs, None, checkpoint__load=str(inputs.megatron))


def test_hugging_face_weights_are_no_run(inputs):
    with pytest.raises(CheckpointError, match=r"Hugging Face weights: expected the folder of a run"):
        again(inputs, None, checkpoint__load=str(inputs.hf))


def test_another_models_weights_are_refused(inputs, moe_folder, tied_folder):
    start = dict(checkpoint__pretrained_checkpoint=str(inputs.hf))
    with pytest.raises(CheckpointError, match=r"another model(.|\n)*num_layers is 4, expected 5"):
        again(inputs, None, **start, model__num_layers=5)
    with pytest.raises(CheckpointError, match=r"share_embeddings_and_output_weights is True, expected False"):
        again(inputs, None, checkpoint__pretrained_checkpoint=str(tied_folder))
    with pytest.raises(CheckpointError, match=r"moe_layers is \(0, 2, 3\), expected \(\)"):
        again(inputs, None, checkpoint__pretrained_checkpoint=str(moe_folder))


def test_hugging_face_files_travel_along(inputs, saved, tmp_path):
    """From Hugging Face weights, and from a run of another folder."""
    run = begun(inputs, tmp_path / "hf", checkpoint__pretrained_checkpoint=str(inputs.hf))
    files = sorted(path.name for path in (tmp_path / "hf" / "iter_0000001" / "hf").iterdir())
    assert {"config.json", "tokenizer.json"} <= set(files) and not any(name.endswith(".safetensors") for name in files)
    shutil.rmtree(tmp_path / "hf" / "iter_0000001")
    checkpoint.save(tmp_path / "hf", run)
    moved = again(inputs, tmp_path / "hf", checkpoint__pretrained_checkpoint=None)
    checkpoint.save(tmp_path / "moved", moved)
    assert files == sorted(path.name for path in (tmp_path / "moved" / "iter_0000001" / "hf").iterdir())


def test_another_schedule_is_refused_or_chosen(inputs, saved):
    changed = dict(train__train_iters=12, optimizer__lr=1e-4)
    with pytest.raises(CheckpointError) as error:
        again(inputs, folder_of(saved), **changed)
    for words in (
        "optimizer.lr: found 0.0001, the checkpoint has 0.003",
        "train.train_iters unless it is set): found 12 steps of 2 rows, the checkpoint has 6 steps of 2 rows",
        "scheduler.override_opt_param_scheduler=true",
        "scheduler.use_checkpoint_opt_param_scheduler=true",
    ):
        assert words in str(error.value)
    ours = again(inputs, folder_of(saved), **changed, scheduler__override_opt_param_scheduler=True)
    theirs = again(inputs, folder_of(saved), **changed, scheduler__use_checkpoint_opt_param_scheduler=True)
    fresh = again(inputs, None, **changed)
    fresh.scheduler.step(increment=saved.scheduler.num_steps)
    rates = [[group["lr"] for group in run.optimizer.param_groups] for run in (ours, fresh, theirs, saved)]
    assert rates[0] == rates[1] != rates[2] == rates[3]


def test_megatron_bridges_own_loader_reads_the_weights_and_the_optimizer(inputs, tmp_path):
    """What its loop does on CUDA without the distributed optimizer."""
    from megatron.bridge.training.checkpointing import load_checkpoint
    from megatron.core import num_microbatches_calculator as microbatches

    own = FORMATS["torch_dist"]
    run = begun(inputs, tmp_path, 2, **own)
    expected, tracked = torch.rand(3), [t.clone() for t in weights(run) + moments(run)]
    fresh = again(inputs, None, **own)
    fresh.cfg.checkpoint.load = str(tmp_path)
    microbatches.init_num_microbatches_calculator(0, None, 2, 1, 1)
    try:
        step, _ = load_checkpoint(fresh.state, fresh.model, fresh.optimizer, fresh.scheduler)
    finally:
        microbatches.unset_num_microbatches_calculator()
    assert step == 2 and fresh.scheduler.num_steps == run.scheduler.num_steps
    assert same(weights(fresh) + moments(fresh), tracked)
    assert torch.equal(torch.rand(3), expected)
