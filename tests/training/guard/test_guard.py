"""The guard skips steps or stops the run, and names bad samples; learning rates by component."""

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.training import run_validation
from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.config import GuardConfig, Qwen3VLLearningRates
from qwen3vl_bridge.training.guard import BadStepError, Guard, SampleLoss, latest_losses
from qwen3vl_bridge.training.run_log import metrics_line, read_metrics
from qwen3vl_bridge.weights.rows import Component

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from megatron.bridge.training.callbacks import Callback, CallbackContext

from tests.helpers.steps import set_up, train_step
from tests.training.running import losses, messages, optimizer_states, replicate, stored, train


@dataclass(frozen=True)
class BadSample:
    row: tuple[str, ...]
    sample: int
    kind: str

    def apply(self, batch: TokenBatch) -> TokenBatch:
        if batch.sample_ids != self.row:
            return batch
        if self.kind == "nan":
            pixels = batch.vision.pixel_values.clone()
            pixels[16 * self.sample] = torch.nan
            return replace(batch, vision=replace(batch.vision, pixel_values=pixels))
        starts = batch.layout.cu_seqlens_padded.tolist()
        place = slice(starts[self.sample], starts[self.sample + 1])
        labels, mask = batch.labels.clone(), batch.loss_mask.clone()
        labels[0, place], mask[0, place] = 7, 1.0
        return replace(batch, labels=labels, loss_mask=mask)


@dataclass(frozen=True)
class BadSampleCollator(Collator):
    bad_samples: tuple[BadSample, ...] = ()

    def collate_packed(self, samples: Sequence[EncodedSample]) -> TokenBatch:
        batch = super().collate_packed(samples)
        for bad in self.bad_samples:
            batch = bad.apply(batch)
        return batch


@dataclass(kw_only=True)
class BadSampleProvider(Qwen3VLConversationProvider):
    bad_samples: tuple[BadSample, ...] = ()

    def collator(self) -> BadSampleCollator:
        good = super().collator()
        return BadSampleCollator(**{f.name: getattr(good, f.name) for f in fields(good)}, bad_samples=self.bad_samples)

    @classmethod
    def of(cls, good: Qwen3VLConversationProvider, bad_samples: tuple[BadSample, ...]) -> "BadSampleProvider":
        return cls(**{f.name: getattr(good, f.name) for f in fields(good) if f.init}, bad_samples=bad_samples)


def states(context: CallbackContext) -> list[torch.Tensor]:
    weights = [p.detach().clone() for chunk in context.model for p in chunk.parameters()]
    kept = [torch.as_tensor(v).clone() for s in optimizer_states(context.optimizer) for v in s.values()]
    return [*weights, *kept, torch.tensor(context.scheduler.num_steps)]


class Before(Callback):
    def __init__(self) -> None:
        self.states, self.context, self.skipped_changed = [], None, []

    def on_train_step_start(self, context: CallbackContext) -> None:
        self.states, self.context = states(context), context

    def on_train_step_end(self, context: CallbackContext) -> None:
        if context.skipped_iter:
            self.skipped_changed.append(self.changed())

    def changed(self) -> bool:
        after = states(self.context)
        return len(after) != len(self.states) or not all(map(torch.equal, after, self.states))


class BadGradient(Callback):
    def __init__(self, step: int, name: Callable[[str], bool]) -> None:
        self.step, self.name, self.handles = step, name, []

    def on_train_step_start(self, context: CallbackContext) -> None:
        if context.state.train_state.step + 1 == self.step:
            named = [p for n, p in context.model[0].named_parameters() if self.name(n)]
            self.handles = [p.register_hook(lambda gradient: gradient * torch.nan) for p in named]

    def on_train_step_end(self, context: CallbackContext) -> None:
        for handle in self.handles:
            handle.remove()


ROWS = 2  # a step
NAN, GRADIENT, WRONG = 3, 5, 10  # steps
STEPS = 12


def row(inputs, step: int, number: int = 1) -> tuple[str, ...]:
    stream = inputs.config(None).dataset.stream("train")
    rows = [next(stream).sample_ids for _ in range(ROWS * step)]
    return rows[ROWS * (step - 1) + number]


@pytest.fixture(scope="module")
def bad_samples(inputs) -> tuple[BadSample, ...]:
    return (BadSample(row(inputs, NAN), 2, "nan"), BadSample(row(inputs, WRONG, 0), 3, "wrong"))


def config(inputs, save, bad_samples, **guard):
    cfg = inputs.config(save, train__train_iters=STEPS, validation__eval_interval=0, checkpoint__save_interval=4)
    cfg.dataset = BadSampleProvider.of(cfg.dataset, bad_samples)
    cfg.guard = GuardConfig(**guard)
    return replicate(cfg)


SKIP = dict(on_nan="skip", on_spike="skip", spike_factor=1.3, spike_window=4)


def extra() -> tuple[Before, list]:
    before = Before()
    return before, [before, BadGradient(GRADIENT, lambda name: name.endswith("vision_model.merger.linear_fc2.weight"))]


@pytest.fixture(scope="module")
def skipping(inputs, bad_samples, tmp_path_factory):
    """Return log, folder and messages of a run that skips steps, and whether skipped steps changed weights."""
    save, (before, callbacks) = tmp_path_factory.mktemp("skipping"), extra()
    with messages("qwen3vl_bridge.training.guard") as said:
        log = train(config(inputs, save, bad_samples, **SKIP), callbacks=callbacks)
    return log, save, said, before.skipped_changed


@pytest.mark.slow
def test_skipped_steps_leave_weights_and_optimizer_unchanged(skipping):
    log, save, said, changed = skipping
    assert [e["step"] for e in log if "skipped" in e] == [NAN, GRADIENT, WRONG]
    assert changed == [False] * 3 and len(said) == 3
    entries = read_metrics(save)
    assert len(entries) == STEPS and all(json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines())
    assert entries[NAN - 1]["loss"] is None and math.isnan(log[NAN - 1]["loss"])
    assert entries[GRADIENT - 1]["loss"] == log[GRADIENT - 1]["loss"] and entries[GRADIENT - 1]["grad_norm"] is None
    assert entries[WRONG - 1]["loss"] == log[WRONG - 1]["loss"] and log[WRONG - 1]["skipped"] == 1
    # Only one component had a NaN gradient.
    assert entries[GRADIENT - 1]["grad_norm_vision_projection"] is None
    assert entries[GRADIENT - 1]["grad_norm_language_model"] > 0


def test_guard_message_of_skipped_step_names_bad_samples(inputs, bad_samples, skipping):
    _, _, (nan, gradient, wrong), _ = skipping
    assert nan.startswith(f"step {NAN}: the loss is nan") and nan.endswith(f": {bad_samples[0].row[2]} (nan)")
    assert gradient.startswith(f"step {GRADIENT}: the loss is ") and "but the gradient norm is nan" in gradient
    everything = row(inputs, GRADIENT, 0) + row(inputs, GRADIENT, 1)
    assert sorted(re.findall(r"(\S+) \(\d", gradient)) == sorted(everything)
    assert wrong.startswith(f"step {WRONG}: the loss is ") and "1.3 times the median of the latest 4" in wrong
    assert re.findall(r"(\S+) \(\d", wrong) == [bad_samples[1].row[3]]


@pytest.mark.slow
def test_resumed_run_with_guard_equals_uninterrupted_run(inputs, bad_samples, skipping, tmp_path):
    """The run is stopped between two skipped steps; the window of losses includes steps before that."""
    log, save, *_ = skipping
    first = train(config(inputs, tmp_path, bad_samples, **SKIP), stop_after=8, callbacks=extra()[1])
    second = train(config(inputs, tmp_path, bad_samples, **SKIP))
    logs = (first + second, log)
    resumed, unbroken = ([line for e in losses(one) for line in e if line[1] == line[1]] for one in logs)
    assert resumed == unbroken
    halves, whole = stored(tmp_path), stored(save)
    assert all(torch.equal(halves[key], whole[key]) for key in whole)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("kind", "step"), [("nan", NAN), ("spike", WRONG), ("gradient", GRADIENT)])
def test_guard_with_on_spike_stop_raises_before_weights_change(inputs, bad_samples, kind, step):
    before, callbacks = extra()
    callbacks = callbacks if kind == "gradient" else callbacks[:1]
    mine = tuple(bad for bad in bad_samples if bad.kind == {"nan": "nan", "spike": "wrong"}.get(kind))
    cfg = config(inputs, None, mine, on_spike="stop", spike_factor=1.3, spike_window=4)
    with pytest.raises(BadStepError, match=rf"^step {step}: .* stopped before the weights changed") as caught:
        train(cfg, callbacks=callbacks)
    assert before.context.state.train_state.step == step - 1 and not before.changed()
    named = re.findall(r"(\S+) \((?:nan|\d)", str(caught.value))
    assert named == [mine[0].row[mine[0].sample]] if mine else len(named) == 10


def test_guard_message_names_ten_samples_and_counts_rest():
    guard = Guard(GuardConfig())
    finding = guard.check_step(math.inf, 1.0)
    samples = [SampleLoss((0, 0, i), f"s{i}", math.nan if i % 2 else float(i), 2.0) for i in range(30)]
    message = finding.message(3, samples)
    assert re.findall(r"(s\d+) \(nan\)", message) == [f"s{i}" for i in range(1, 21, 2)]
    assert message.endswith(" and 5 more")


def test_guard_message_sums_sample_losses_of_context_parallel_ranks():
    finding = Guard(GuardConfig()).check_step(None, math.nan)
    samples = [SampleLoss((0, 0, 0), "a", 3.0, 1.0), SampleLoss((0, 0, 0), "a", 1.0, 3.0)]
    samples += [SampleLoss((1, 0, 0), "b", 8.0, 4.0), SampleLoss((1, 0, 1), "no tokens", 0.0, 0.0)]
    assert finding.message(1, samples).endswith("highest mean loss first: b (2), a (1), no tokens (0)")


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=40), st.integers(2, 9), st.floats(1.1, 3.0))
def test_check_step_reports_loss_above_factor_times_median_as_spike(values, window, factor):
    guard = Guard(GuardConfig(on_spike="skip", spike_factor=factor, spike_window=window))
    for i, value in enumerate(values):
        latest = sorted(values[max(0, i - window) : i])
        middle = len(latest) // 2
        median = (latest[middle] if len(latest) % 2 else sum(latest[middle - 1 : middle + 1]) / 2) if latest else 0.0
        spike = 2 * len(latest) >= window and value > factor * median
        assert (guard.check_step(value, 1.0) is not None) == spike


@given(st.lists(st.sampled_from([1.0, 2.5, math.nan, None]), max_size=20), st.integers(2, 5), st.integers(0, 20))
def test_latest_losses_read_from_log_equal_losses_kept_by_guard(values, window, step):
    guard, lines = Guard(GuardConfig(spike_window=window)), []
    for number, value in enumerate(values, 1):
        tokens = 0 if value is None else 20
        if number <= step:
            guard.check_step(value, 1.0)
        lines.append(metrics_line({"step": number, "loss": value if tokens else 0.0, "trained_tokens": tokens}))
        lines.append(metrics_line({"step": number, "valid_loss": 1.0}))
    assert latest_losses(map(json.loads, lines), step, window) == list(guard.latest)


@pytest.mark.parametrize(("settings", "message"), [
    (dict(rerun_state_machine__check_for_nan_in_loss=True), "check_for_nan_in_loss is True with guard.on_nan"),
    (dict(ddp__check_for_nan_in_grad=True), "ddp.check_for_nan_in_grad is True with .*: it ends the run before"),
    (dict(guard__on_nan="ignore"), "guard.on_nan is 'ignore', expected one of"),
])  # fmt: skip
def test_guard_raises_if_settings_conflict_or_are_unknown(inputs, settings, message):
    cfg = replicate(inputs.config(None, **{"guard__on_nan": "skip", **settings}))
    with pytest.raises(ValueError, match=message):
        cfg.validate()


def test_guard_raises_if_training_callbacks_are_missing(inputs):
    run = set_up(replicate(inputs.config(None)))  # without callbacks
    run.cfg.guard = GuardConfig()
    with pytest.raises(ValueError, match=r"guard would be ignored, .* callbacks=qwen3vl_bridge.training_callbacks"):
        train_step(run)


def test_training_callbacks_passed_twice_raise(inputs):
    cfg = replicate(inputs.config(None))
    with pytest.raises(ValueError, match=r"training_callbacks\(cfg\) were passed twice"):
        train(cfg, callbacks=training_callbacks(cfg))


def config_with_rates(inputs, save, **towers):
    cfg = inputs.config(save, validation__eval_interval=0, checkpoint__save_interval=2)
    cfg.mixed_precision, cfg.optimizer_config_override_provider = "bf16_mixed", Qwen3VLLearningRates(**towers)
    return replicate(cfg)


class Rates(Before):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def on_train_step_start(self, context):
        groups = [(g["lr"], g["weight_decay"], p) for g in context.optimizer.param_groups for p in g["params"]]
        mains = {p: (lr, decay) for lr, decay, p in groups}
        named = context.model[0].named_parameters()
        self.seen.append({name: mains[getattr(p, "main_param", p)] for name, p in named})


def test_component_learning_rates_follow_scheduled_learning_rate(inputs):
    rates = Rates()
    cfg = config_with_rates(inputs, None, vision_model_lr=1e-3, vision_projection_lr=6e-3)
    cfg.optimizer.min_lr = 3e-4
    log = train(cfg, stop_after=4, callbacks=[rates])
    for step, seen in enumerate(rates.seen):
        lr = log[step]["lr"]
        own = {"vision_model": lr / 3, "merger": lr * 2, "language_model": lr}
        for name, (found, decay) in seen.items():
            kind = "merger" if "merger" in name else name.removeprefix("module.module.").split(".")[0]
            assert math.isclose(found, own[kind], rel_tol=1e-12), name
            is_matrix = name.endswith("weight") and "norm" not in name
            assert decay == (0.1 if is_matrix else 0.0), name


@pytest.mark.slow
def test_run_with_frozen_component_resumes_bit_exactly(inputs, tmp_path):
    def frozen(save):
        cfg = config_with_rates(inputs, save, vision_projection_lr=1e-3)
        cfg.model.freeze_vision_model = True
        return cfg

    whole = train(frozen(tmp_path / "whole"), stop_after=4)
    pieces = [train(frozen(tmp_path / "pieces"), stop_after=2) for _ in range(2)]
    assert losses(list(itertools.chain.from_iterable(pieces))) == losses(whole)
    found, expected = stored(tmp_path / "pieces"), stored(tmp_path / "whole")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    for entry in (entry for entry in whole if "lr" in entry):
        assert entry["grad_norm_vision_model"] == 0.0 < entry["grad_norm_vision_projection"]


@pytest.mark.parametrize(("settings", "message"), [
    (dict(vision_model_lr=-1.0),
     r"vision_model_lr is -1.0, expected more than 0; to freeze it, set model.freeze_vision_model"),
    (dict(vision_model_lr=1e-4, model__freeze_vision_model=True), r"expected None with model.freeze_vision_model"),
    (dict(vision_model_lr=1e-4, cfg__peft="any"), r"with peft only adapters are trained"),
    (dict(vision_model_lr=1e-4, optimizer__min_lr=1.0), r"that is at least min_lr"),
    (dict(vision_model_lr=1e-4, scheduler__lr_warmup_init=1e-3), r"at least scheduler.lr_warmup_init, 0.001"),
    (dict.fromkeys([f"{c.value}_lr" for c in Component], 1e-4), r"optimizer.lr, 0.003, would be ignored"),
])  # fmt: skip
def test_component_learning_rates_raise_if_invalid_or_contradictory(inputs, settings, message):
    towers = {name: value for name, value in settings.items() if "__" not in name}
    cfg = config_with_rates(inputs, None, **towers)
    for name, value in settings.items():
        section, sep, field = name.partition("__")
        if sep:
            setattr(cfg if section == "cfg" else getattr(cfg, section), field, value)
    with pytest.raises(ValueError, match=message):
        run_checks(run_validation.RUN_CAN_START, cfg)
