"""Figures of a run in Megatron-Bridge's loop: in metrics.jsonl, in TensorBoard, on the console."""

import importlib.util
import itertools
import re
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.steps import followed, set_up, train_step

from ..conftest import read_log
from ..running import replicate, train

STEPS, INTERVAL = 4, 2
PAUSE = 100.0  # seconds between steps that are no part of them
# What Megatron-Bridge's loop writes to trackers itself, by our log's names. Its learning rate is the next step's.
NAMES = {"loss": "lm loss", "grad_norm": "grad-norm", "valid_loss": "lm loss validation"}


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    save = tmp_path_factory.mktemp("run")
    cfg = inputs.config(save, train__train_iters=STEPS, logger__tensorboard_dir=str(save / "tensorboard"))
    replicate(cfg).optimizer_config_override_provider = slower_tower()
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("qwen3vl_bridge.training.run_log.StepProgress._write", lambda self, line: said.append(line))
        clock = Clock()
        patch.setattr("qwen3vl_bridge.training.metrics.time", SimpleNamespace(perf_counter=clock.read))
        train(cfg, callbacks=[slow_checkpoint(3, clock)])
    return cfg, save, said


class Clock:
    """From one reading to the next a second goes by: a step takes one, if it is read as often as is needed."""

    now = 0.0

    def read(self) -> float:
        self.now += 1
        return self.now


def slow_checkpoint(step: int, clock: Clock):
    from megatron.bridge.training.callbacks import Callback

    class SlowCheckpoint(Callback):
        def on_checkpoint_save(self, context):
            if context.state.train_state.step == step:
                clock.now += PAUSE

    return SlowCheckpoint()


def slower_tower():
    from megatron.bridge.training.config import OptimizerConfigOverrideProvider
    from megatron.core.optimizer import ParamKey

    class SlowerTower(OptimizerConfigOverrideProvider):
        def build_config_overrides(self, context):
            lr, low = context.optimizer_config.lr / 10, context.optimizer_config.min_lr
            rates = {ParamKey(name="*vision_model*"): dict(max_lr=lr, min_lr=low)}
            return (super().build_config_overrides(context) or {}) | rates

    return SlowerTower()


def board(folder) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_figures_of_a_step_are_those_of_its_batches(run):
    cfg, save, _ = run
    stream = cfg.dataset.stream("train", dp_rank=0, dp_size=1, micro_batch_size=cfg.train.micro_batch_size)
    steps = list(itertools.batched(itertools.islice(stream, STEPS * cfg.train.global_batch_size), 2))
    for entry in read_log(save):
        if "loss" not in entry:
            continue
        batches = steps[entry["step"] - 1]
        real = [batch.input_ids.flatten()[~batch.layout.padding_mask()] for batch in batches]
        assert entry["trained_tokens"] == sum(batch.loss_mask.sum() for batch in batches)
        if entry["step"] % INTERVAL:
            assert "tokens" not in entry
            continue
        assert entry["tokens"] == sum(map(len, real))
        assert entry["images"] == sum((ids == cfg.model.vision_start_token_id).sum() for ids in real) > 0
        assert entry["video_frames"] == 0
        assert entry["filled"] == entry["tokens"] / sum(batch.input_ids.numel() for batch in batches) < 1


def test_rates_are_means_over_the_interval(run):
    from qwen3vl_bridge.training.metrics import Amounts, step_costs

    cfg, save, _ = run
    stream = cfg.dataset.stream("train", dp_rank=0, dp_size=1, micro_batch_size=cfg.train.micro_batch_size)
    steps = [e for e in read_log(save) if "loss" in e]
    for last in range(INTERVAL, STEPS + 1, INTERVAL):
        amounts = Amounts()
        for batch in itertools.islice(stream, INTERVAL * cfg.train.global_batch_size):
            amounts += Amounts.of(batch, cfg.model)
        entry = steps[last - 1]
        taken = amounts.tokens / entry["tokens_per_second"]
        assert taken == pytest.approx(INTERVAL)  # without the pause
        assert entry["images_per_second"] == pytest.approx(amounts.images / taken)
        done = step_costs(cfg).of_many(
            tokens=amounts.tokens, token_pairs=amounts.token_pairs, patches=amounts.patches,
            patch_pairs=amounts.patch_pairs,
        )  # fmt: skip
        assert entry["tflops_per_gpu"] == pytest.approx(done / taken / 1e12)
        assert "mfu" not in entry  # nobody knows a CPU's peak
        assert 0.1 < entry["memory_gb"] < 100


def test_each_part_has_its_learning_rate(run):
    _, save, _ = run
    found = [entry for entry in read_log(save) if "tokens" in entry]
    assert len(found) == STEPS / INTERVAL
    for entry in found:
        assert entry["lr_language_model"] == entry["lr"] > 0
        assert entry["lr_vision_model"] == entry["lr_vision_projection"] == pytest.approx(entry["lr"] / 10)


def test_tensorboard_has_the_log(run):
    """What Megatron-Bridge writes by itself says the same as the log; the rest has names of ours."""
    _, save, _ = run
    found = board(save / "tensorboard")
    expected: dict[str, dict[int, float]] = {}
    for entry in read_log(save):
        measured = entry.keys() - {"step", "lr", "seconds", "trained_tokens", *NAMES} if "tokens" in entry else set()
        for name, tracked in NAMES.items() | {(name, f"qwen3vl/{name}") for name in measured}:
            if name in entry:
                expected.setdefault(tracked, {})[entry["step"]] = entry[name]
    assert {"qwen3vl/tokens_per_second", "qwen3vl/grad_norm_vision_model", *NAMES.values()} < expected.keys()
    assert {name for name in found if name.startswith("qwen3vl/")} == expected.keys() - set(NAMES.values())
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-6), name  # which it keeps in float32


def test_the_console_says_what_there_is_to_say(run):
    _, _, said = run
    lines = [line for line in said if line.startswith("step ")]
    assert [line.split()[1] for line in lines if "valid" not in line][-1] == f"{STEPS}/{STEPS}"
    pattern = r"step 2/4  loss \d+\.\d{4}  lr \S+  \|g\| \S+  [\d,]+ tokens/s  \S+ TFLOP/s  \d\.\d GB  ETA \d:\d\d:\d\d"
    assert any(re.fullmatch(pattern, line) for line in lines), said
    assert lines[-1].startswith("step 4  valid_loss") or lines[-1].endswith("ETA 0:00:00")


def test_a_skipped_step_is_shown(run, capsys):
    from qwen3vl_bridge.training.run_log import StepProgress

    progress = StepProgress(10, 2, interval=100)
    progress.advance(dict(step=3, loss=float("nan"), lr=1e-3, grad_norm=float("inf"), skipped=1))
    progress.advance(dict(step=10, loss=1.0, lr=1e-3, grad_norm=1.0))
    first, last = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("step 3/10  loss nan") and "(this step skipped, 1 in all)" in first
    assert last.startswith("step 10/10  loss 1.0000") and "(1 skipped)" in last


def test_megatron_bridge_counts_the_same_operations(inputs):
    """Of a step, from what the forward step has noted for it; the tower is frozen, and costs no backward pass."""
    from qwen3vl_bridge.training.metrics import meter_of, step_costs

    from megatron.bridge.training.utils.flop_utils import (
        num_floating_point_operations,
        resolve_global_flops_runtime_stats,
    )

    cfg = replicate(inputs.config(None))
    cfg.model.freeze_vision_model = True
    run = set_up(cfg)
    train_step(run)
    amounts = meter_of(run.state).take()
    stats = resolve_global_flops_runtime_stats(run.state, data_parallel_size=1, include_cross_attention_stats=True)
    names = ("seqlen_sum", "seqlen_squared_sum", "num_vision_patches", "cross_seqlen_sum", "cross_seqlen_product_sum")
    given = dict(zip(names, stats, strict=True))
    assert given["num_vision_patches"] == amounts.patches > 0
    of = {name: getattr(amounts, name) for name in ("tokens", "token_pairs", "patches", "patch_pairs")}
    expected = step_costs(cfg).of_many(**of)
    assert num_floating_point_operations(cfg, batch_size=2, **given) == expected > 0


def test_weights_and_biases_has_to_be_installed(inputs, monkeypatch):
    from qwen3vl_bridge.training.callbacks import training_callbacks

    cfg = inputs.config(None, logger__wandb_project="digits", logger__wandb_exp_name="first")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else find(name, *more))
    with pytest.raises(ValueError, match=r"wandb_project is 'digits', and wandb is not installed: .*pip install wandb"):
        training_callbacks(cfg)


def test_weights_and_biases_gets_the_log(inputs, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    from megatron.bridge.training.callbacks import Callback

    found = {}

    class Ask(Callback):
        def on_train_end(self, context):
            found.update({name: wandb.run.summary[name] for name in ("lm loss", "grad-norm", "qwen3vl/tokens")})
            found["step"] = wandb.run.step  # whose figures are taken in when the next step comes, or the end

    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = dict(wandb_project="digits", wandb_exp_name="first", wandb_save_dir=str(tmp_path))
    named = {f"logger__{name}": value for name, value in dict(settings, log_interval=1).items()}
    cfg = replicate(inputs.config(None, train__train_iters=2, validation__eval_interval=0, **named))
    log = train(cfg, callbacks=[Ask()])
    assert found == {
        "lm loss": pytest.approx(log[0]["loss"]),
        "grad-norm": pytest.approx(log[0]["grad_norm"]),
        "qwen3vl/tokens": log[0]["tokens"],
        "step": 2,
    }
    assert wandb.run is None  # it is finished
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_samples_that_are_left_out_are_figures_of_the_log_by_set(inputs, tmp_path, caplog):
    """The numbers that came with the step's rows; those of a set that lost none are not shown."""
    from qwen3vl_bridge.training.callbacks import training_callbacks
    from qwen3vl_bridge.training.run_log import ENTRY

    cfg = replicate(inputs.config(None, logger__log_interval=1))
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n' * 40)
    data = cfg.dataset
    data.mixture = [{"path": data.path, "name": "digits"}, {"path": str(tmp_path / "bad.jsonl")}]
    data.path, data.on_bad, data.window_size = None, "drop", 32
    run = set_up(cfg)
    with followed(run, training_callbacks(cfg)) as shared:
        train_step(run)
        stream = cfg.dataset.stream("train", micro_batch_size=cfg.train.micro_batch_size)
        expected = [next(stream).dropped for _ in range(cfg.train.global_batch_size)][-1]
        entry = shared[ENTRY]
    assert entry["dropped"] == entry["dropped_bad"] == sum(expected) > 0 and expected[0] == 0
    assert not {"dropped_digits", "unreadable"} & entry.keys()
    assert caplog.text.count("samples left out of training up to step 1: dropped ") == 1
