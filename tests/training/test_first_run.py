"""Errors and messages in the first minutes of a run: unknown settings, missing callbacks, disk space, epochs."""

import itertools
import logging
import math
import re
import resource
import shutil
from dataclasses import fields
from operator import attrgetter

import qwen3vl_bridge
from qwen3vl_bridge import Qwen3VLEnergonProvider, Qwen3VLLoRA
from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.formats.huggingface import exists_on_hub, find_in_cache
from qwen3vl_bridge.core.atomic import snapshot
from qwen3vl_bridge.planning.from_config import checkpoint_bytes
from qwen3vl_bridge.training import run_log, run_validation
from qwen3vl_bridge.training.process_groups import shutdown

import pytest
import qwen3vl_recipes
from huggingface_hub import constants
from megatron.bridge.training import config, vlm_step
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import runtime_config_update
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.initialize import destroy_global_state
from qwen3vl_recipes.dry_run import finalize_copy
from qwen3vl_recipes.overrides import apply

from tests.training.running import messages, read_log, replicated, run_bridges_loop, sharded, train


class Limit(Callback):
    def __init__(self, *, after: int, size: int) -> None:
        self._after, self._size = after, size

    def on_train_step_end(self, context: CallbackContext) -> None:
        if context.state.train_state.step + 1 == self._after:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize(("name", "meant"), [
    ("dataset.seq_lenght", "dataset.seq_length"), ("optimizer.learning_rate", "optimizer.lr"),
    ("train.max_steps", "train.train_iters"), ("peft.target_module", "peft.target_modules"),
    ("chekpoint", "checkpoint.*"), ("train.gibberish", "train.*"), ("dataset.vision.max_pixel", "dataset.vision.*"),
])  # fmt: skip
def test_run_error_suggests_similar_name_for_unknown_setting(name, meant, tmp_path):
    cfg = qwen3vl_recipes.qwen3_vl_2b_peft_config()
    (tmp_path / "train.jsonl").touch()
    cfg.dataset.path = cfg.checkpoint.pretrained_checkpoint = str(tmp_path)
    qwen3vl_bridge.training_callbacks(cfg)
    section, _, field = name.rpartition(".")
    setattr(attrgetter(section)(cfg) if section else cfg, field, 4096)
    message = f"^{name} is set to 4096, but there is no setting {name}; did you mean .*{meant}"
    with pytest.raises(ValueError, match=message):
        runtime_config_update(cfg)


def test_run_raises_if_config_container_has_unknown_setting():
    ours = qwen3vl_recipes.qwen3_vl_2b_sft_config()
    sections = [field.name for field in fields(config.ConfigContainer) if field.init]
    cfg = config.ConfigContainer(**{name: getattr(ours, name) for name in sections})
    cfg.lora = {"rank": 8}
    with pytest.raises(ValueError, match=r"^lora is set to {'rank': 8}, but .*; did you mean peft, which recipes"):
        qwen3vl_bridge.training_callbacks(cfg)


@pytest.mark.parametrize(("path", "message"), [
    (None, "dataset.path is None: .*; set_paths of qwen3vl_recipes.paths sets all"),
    ("nothere", r"dataset.path \(--data-path\) is nothere: there is no such file or folder"),
])  # fmt: skip
def test_training_callbacks_raises_if_data_path_is_missing(inputs, path, message):
    with pytest.raises(ValueError, match=message):
        qwen3vl_bridge.training_callbacks(replicated(inputs, None, dataset__path=path))


@pytest.mark.parametrize("reached", [False, True])
def test_hub_processor_with_local_weights_raises_only_if_hub_is_unreachable(inputs, monkeypatch, reached):
    monkeypatch.setattr(run_validation, "exists_on_hub", lambda name: reached and name == "Qwen/Qwen3-VL-2B-Instruct")
    cfg = qwen3vl_recipes.qwen3_vl_2b_sft_config()
    cfg.dataset.path, cfg.checkpoint.pretrained_checkpoint = str(inputs.data), str(inputs.hf)
    message = f"name Qwen/Qwen3-VL-2B-Instruct on the hub, but .* is {inputs.hf}, which contains its own proces"
    with messages("qwen3vl_bridge") as said:
        if reached:
            qwen3vl_bridge.training_callbacks(cfg)
            assert re.search(message, *said)
            said.clear()
        else:
            with pytest.raises(ValueError, match=message):
                qwen3vl_bridge.training_callbacks(cfg)
        cfg.dataset.hf_processor_path = cfg.tokenizer.tokenizer_model = str(inputs.hf)
        qwen3vl_bridge.training_callbacks(cfg)
    assert not said


def test_hub_processor_with_weights_of_hub_cache_does_not_warn(inputs, monkeypatch, tmp_path):
    """The command starts a run this way: weights in the hub's cache, and a processor with the hub's name."""
    cfg = qwen3vl_recipes.qwen3_vl_2b_sft_config()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Qwen--Qwen3-VL-2B-Instruct"
    shutil.copytree(inputs.hf, folder / "snapshots" / "0")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    assert find_in_cache("Qwen/Qwen3-VL-2B-Instruct") == folder / "snapshots" / "0" and find_in_cache("a/b") is None
    cfg.dataset.path, cfg.checkpoint.pretrained_checkpoint = str(inputs.data), str(folder / "snapshots" / "0")
    with messages("qwen3vl_bridge") as said:
        qwen3vl_bridge.training_callbacks(cfg)
        assert not said
        cfg.checkpoint.pretrained_checkpoint = str(inputs.hf)
        qwen3vl_bridge.training_callbacks(cfg)
    assert "which contains its own processor" in said[0]


def test_exists_on_hub_without_connection_is_false(monkeypatch):
    """No server listens at this port."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not exists_on_hub("nobody/nothing")


def test_megatron_bridge_forward_step_raises_if_dataset_is_ours(inputs):
    destroy_global_state()  # from other tests
    shutdown()
    cfg = replicated(inputs, None)
    with pytest.raises(TypeError, match=r"TokenBatch, which is not a dict: use qwen3vl_bridge\.forward_step"):
        finetune(cfg, vlm_step.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))


def test_check_names_accepts_attributes_set_by_megatron(tmp_path):
    """In every section of a run, also if the configuration is finalized twice."""
    shutdown()  # groups of other tests
    cfg = qwen3vl_recipes.qwen3_vl_2b_peft_config()
    cfg.dataset.path = cfg.checkpoint.pretrained_checkpoint = str(tmp_path)
    cfg.ft, cfg.straggler, cfg.nvrx_straggler = config.FaultToleranceConfig(), config.StragglerDetectionConfig(), None
    cfg.comm_overlap, cfg.tensor_inspect = CommOverlapConfig(tp_comm_overlap=False), config.TensorInspectConfig()
    cfg.inprocess_restart = config.InProcessRestartConfig()
    run_validation.check_names(finalize_copy(finalize_copy(cfg, 8), 8))


def test_override_with_transformers_argument_name_suggests_our_setting():
    with pytest.raises(ValueError, match=r"no setting learning_rate; did you mean optimizer\.lr\?"):
        apply(qwen3vl_recipes.qwen3_vl_2b_sft_config(), ["learning_rate=1e-5"])


def test_run_raises_if_training_callbacks_are_missing(inputs):
    message = "guard would be ignored: no callbacks were created for this configuration. Call finetune(cfg, "
    with pytest.raises(ValueError, match=re.escape(message)):
        finetune(replicated(inputs, None), qwen3vl_bridge.forward_step)


@pytest.mark.slow
def test_finished_run_started_again_trains_and_saves_nothing(inputs, tmp_path, capfd):
    """A scheduler may requeue a finished job: nothing is trained, validated or saved."""
    settings = dict(train__train_iters=3, checkpoint__save_interval=2)
    run_bridges_loop(replicated(inputs, tmp_path, **settings))
    before = snapshot(tmp_path)
    with messages("qwen3vl_bridge") as said:
        run_bridges_loop(replicated(inputs, tmp_path, **settings))
    (complete,) = [message for message in said if "is complete" in message]
    assert f"{tmp_path} is at step 3, and train.train_iters is 3. Nothing is trained" in complete
    assert {name: state for name, state in snapshot(tmp_path).items() if "tensorboard" not in name} == {
        name: state for name, state in before.items() if "tensorboard" not in name
    }
    longer = replicated(inputs, tmp_path, **settings | dict(train__train_iters=4))
    assert "raise train.train_iters and set scheduler.override_opt_param_scheduler=true" in complete
    longer.scheduler.override_opt_param_scheduler = True
    assert "continuing" not in capfd.readouterr().err
    run_bridges_loop(longer)
    assert f"continuing {tmp_path} from step 3 of 4\n" in capfd.readouterr().err
    assert [entry["step"] for entry in read_log(tmp_path) if "loss" in entry] == [1, 2, 3, 4]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("settings", [dict(checkpoint__save=None), dict(checkpoint__save_interval=0)])
def test_run_that_saves_no_checkpoint_warns(inputs, tmp_path, settings):
    short = dict(train__train_iters=1, scheduler__lr_warmup_iters=0, validation__eval_iters=0)
    with messages("qwen3vl_bridge") as said:
        train(replicated(inputs, tmp_path, **short | settings))
    first = next(number for number, message in enumerate(said) if "the run saves nothing" in message)
    assert not any("trained" in message for message in said[:first])  # before the model is built
    assert not list(tmp_path.glob("iter_*"))


def test_run_raises_before_building_model_if_save_folder_is_not_writable(inputs, tmp_path, monkeypatch):
    """A folder below a file fails for every user, including root."""
    (tmp_path / "file").touch()
    cfg = replicated(inputs, tmp_path / "file" / "run")
    monkeypatch.setattr(type(cfg.model), "provide", lambda *_, **__: pytest.fail("the model is built"))
    with pytest.raises(CheckpointError, match=r"checkpoint.save is .*/file/run, which cannot be written: Not a"):
        train(cfg)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("pack", [True, False])
def test_num_epochs_sets_number_of_steps(inputs, tmp_path, pack):
    settings = dict(
        train__train_iters=None, train__num_epochs=1.5, scheduler__lr_warmup_iters=0, validation__eval_iters=0,
        dataset__pack=pack, dataset__window_size=16, checkpoint__save_interval=None,
    )  # fmt: skip
    cfg = replicated(inputs, tmp_path, **settings)
    rows = cfg.dataset.rows("train").plan.end_of_epoch()
    steps = [entry["step"] for entry in train(cfg) if "loss" in entry]
    assert steps == list(range(1, math.ceil(1.5 * rows / 2) + 1)) and (pack or rows == 40)
    assert cfg.train.train_iters == len(steps) and cfg.train.num_epochs is None
    again = replicated(inputs, tmp_path, **settings)
    with messages("qwen3vl_bridge") as said:
        run_bridges_loop(again)
    assert any("is complete" in message for message in said)


@pytest.mark.parametrize(("settings", "message"), [
    (dict(), "is 2 with train.train_iters 6, expected a number above 0, and None for train_iters"),
    (dict(train__num_epochs=0, train__train_iters=None), "is 0, expected a number above 0"),
    (dict(train__train_iters=None, scheduler__lr_warmup_iters=50), "lr_warmup_iters is 50 with train.train_iters 1:"),
    (dict(train__train_iters=None, dataset__streaming=True, dataset__path="hf://a/b#train"), "streaming is on"),
])  # fmt: skip
def test_num_epochs_raises_if_settings_are_invalid_or_contradictory(inputs, settings, message):
    cfg = replicated(inputs, None, **dict(train__num_epochs=2, train__global_batch_size=16) | settings)
    qwen3vl_bridge.training_callbacks(cfg)
    with pytest.raises(ValueError, match=message):
        runtime_config_update(cfg)


def test_num_epochs_raises_if_dataset_is_energon(inputs):
    cfg = replicated(inputs, None, train__num_epochs=2, train__train_iters=None)
    cfg.dataset = Qwen3VLEnergonProvider(path="unread", hf_processor_path=str(inputs.hf), seq_length=128)
    with pytest.raises(ValueError, match="num_epochs is 2 with a Qwen3VLEnergonProvider, expected None: the number of"):
        runtime_config_update(cfg)


def test_override_num_epochs_replaces_train_iters_of_recipe():
    made = [apply(qwen3vl_recipes.qwen3_vl_2b_sft_config(), ["train.num_epochs=3", *more]).train
            for more in ([], ["train.train_iters=20"])]  # fmt: skip
    assert [(train.num_epochs, train.train_iters) for train in made] == [(3, None), (3, 20)]  # validation rejects both


def test_run_prints_length_of_epoch_before_first_step(inputs, capfd):
    """One row of 2,048 tokens holds all 40 samples."""
    short = dict(train__train_iters=1, scheduler__lr_warmup_iters=0, validation__eval_iters=0)
    long_rows = dict(model__seq_length=2048, dataset__seq_length=2048, train__global_batch_size=2)
    with messages("qwen3vl_bridge") as said:
        train(replicated(inputs, None, **short | long_rows))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("epoch: ")]
    length = r"epoch: samples 40  rows 1 of 2,048 tokens  tokens [\d,]+  steps 0.5 of 2 rows;  run: steps 1  epochs 2"
    assert re.fullmatch(length, line)
    warning = "an epoch is shorter than a step, so each step trains on every sample about 2 times: lower "
    assert any(message.startswith(warning) for message in said)


@pytest.mark.slow
def test_run_prints_progress_within_long_steps_and_evaluations(inputs, monkeypatch, capfd):
    monkeypatch.setattr(run_log, "_SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(run_log, "_MANY_TOKENS", 4 * 128 - 1)
    settings = dict(train__train_iters=2, validation__eval_interval=1, validation__eval_iters=3)
    with messages("qwen3vl_bridge") as said:
        train(replicated(inputs, None, **settings | dict(train__global_batch_size=4)))
    lines = capfd.readouterr().err.splitlines()
    first = list(itertools.takewhile(lambda line: not line.startswith("step 1/2"), lines))
    microbatches = [int(found[1]) for line in first if (found := re.fullmatch(r"step 1: microbatch (\d) of 4", line))]
    assert microbatches and microbatches == sorted(microbatches) and {*microbatches} <= {1, 2, 3, 4}
    assert any(line.startswith("step 2/2  loss") for line in lines)
    passes = [int(found[1]) for line in lines if (found := re.fullmatch(r"evaluation: forward pass (\d+)", line))]
    # Each data-parallel rank evaluates all microbatches of a global batch.
    assert passes and max(passes) <= 4 * 3 and all(b == a + 1 or b == 1 for a, b in itertools.pairwise(passes))
    (warned,) = [message for message in said if "takes long on a CPU" in message]
    assert warned.startswith(
        "a step of 4 rows of 128 tokens takes long on a CPU; to try out a run, set train.global_batch_"
    )


def test_estimated_epoch_length_is_within_25_percent_of_counted_length(inputs):
    rows = inputs.config(None, dataset__window_size=16).dataset.rows("train")
    estimated, counted = rows.epoch(), rows.epoch(counted=True)
    assert (estimated.samples, estimated.is_counted) == (40, False) and counted.is_counted
    assert counted.rows == rows.plan.end_of_epoch()
    assert abs(estimated.rows / counted.rows - 1) < 0.25 and abs(estimated.tokens / counted.tokens - 1) < 0.25


@pytest.mark.slow
def test_save_on_full_disk_keeps_previous_checkpoint(inputs, tmp_path):
    """A limit on file sizes has the same effect as a full disk."""
    limits, steps = resource.getrlimit(resource.RLIMIT_FSIZE), dict(checkpoint__save_interval=2)
    for after, kept in (
        (1, "it begins at the first step, because no checkpoint is complete"),
        (3, "it resumes from the checkpoint of step 2"),
    ):
        with messages("megatron", logging.ERROR) as said:
            try:
                with pytest.raises(CheckpointError) as failed:
                    train(replicated(inputs, tmp_path, **steps), callbacks=[Limit(after=after, size=2_000_000)])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        message = rf"iter_000000{after + 1} could not be saved: .*\. The disk had [\d.]+ [MG]B free\. "
        assert re.search(message, str(failed.value)) and kept in str(failed.value)
        assert not any("Failed to abort" in message for message in said)
        assert [path.name for path in tmp_path.glob("*iter_*")] == ["iter_0000002"] * (after > 1)
        if after == 1:
            train(replicated(inputs, tmp_path, **steps), stop_after=2)
    train(replicated(inputs, tmp_path, **steps))
    assert [entry["step"] for entry in read_log(tmp_path) if "loss" in entry] == [1, 2, 3, 4, 5, 6]


@pytest.mark.one_case_in(5)
@pytest.mark.parametrize("kind", ["replicated", "sharded", "adapters", "frozen", "weights"])
def test_estimated_checkpoint_bytes_match_written_files(inputs, tmp_path, kind):
    make = sharded if kind == "sharded" else replicated
    cfg = make(inputs, tmp_path, train__train_iters=1, scheduler__lr_warmup_iters=0, validation__eval_iters=0)
    cfg.peft = Qwen3VLLoRA(dim=64) if kind == "adapters" else None
    cfg.model.freeze_language_model, cfg.checkpoint.save_optim = kind == "frozen", kind != "weights"
    train(cfg)
    run_validation.check_names(cfg)  # a run sets attributes that are not settings
    written = sum(path.stat().st_size for path in tmp_path.glob("iter_0000001/*.distcp"))

    assert abs(checkpoint_bytes(cfg) / written - 1) < 0.1


def test_too_little_disk_space_for_checkpoints_warns(inputs, tmp_path):
    shutdown()  # groups of other tests
    cfg = qwen3vl_recipes.qwen3_vl_235b_a22b_sft_config()
    cfg.dataset.path, cfg.checkpoint.save = str(tmp_path), str(tmp_path / "later" / "run")
    with messages("qwen3vl_bridge") as said:
        finalize_copy(cfg, 512)
    (message,) = [message for message in said if "B free" in message]
    assert f"{tmp_path}/later/run, whose disk has" in message and re.search(
        r"free, expected about [\d.]+ GB: for 3 checkpoints of (329|330)\d\.\d\d GB", message
    )
    assert not (tmp_path / "later").exists()
