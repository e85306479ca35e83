"""The guard: detects steps that would ruin the weights, decides what to do, and finds the responsible samples.

What lives here: judging a step by its loss and its gradients. What may not: computing these (`loss_recorder.py`,
`gradient_norms.py`), skipping the step (`before_step.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.training.config import Action, GuardConfig
from qwen3vl_bridge.training.optimizer.loss_recorder import SampleLoss

_NAMED = 10


class SpoiltStepError(ValueError):
    """Raised for a step that would have ruined the weights; the weights are unchanged."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a step.

    Attributes:
        action: what the configuration says to do.
        what: description for the message.
        setting: the configuration's setting that decides it.
        to_blame: whether a sample with that mean loss is responsible; None if losses do not show it.
    """

    action: Action
    what: str
    setting: str
    to_blame: Callable[[float], bool] | None

    def message(self, step: int, samples: Iterable[SampleLoss]) -> str:
        """The message of the error, or of the log.

        Args:
            step: its number.
            samples: of all ranks.
        """
        means = _mean_losses(samples)
        blamed = [entry for entry in means if self.to_blame and self.to_blame(entry[1])]
        if blamed:
            head = "samples responsible, with their mean loss"
        else:
            blamed, head = means, "the losses do not identify a sample; samples of the step, highest mean loss first"
        names = ", ".join(f"{name} ({loss:.4g})" for name, loss in blamed[:_NAMED])
        more = f" and {len(blamed) - _NAMED} more" if len(blamed) > _NAMED else ""
        done = "the step is skipped" if self.action == "skip" else "stopped before the weights changed"
        return f"step {step}: {self.what}; {done} ({self.setting}={self.action}); {head}: {names or 'none'}{more}"


def _mean_losses(samples: Iterable[SampleLoss]) -> list[tuple[str, float]]:
    """Each sample's name and mean loss, those that are not finite first, then in descending order."""
    whole: dict[tuple[int, int, int], list[float]] = {}
    names = {}
    for sample in samples:  # context-parallel ranks have tokens of the same samples
        sums = whole.setdefault(sample.place, [0.0, 0.0])
        sums[0], sums[1] = sums[0] + sample.loss, sums[1] + sample.tokens
        names[sample.place] = sample.name
    means = [(names[place], loss / max(tokens, 1.0)) for place, (loss, tokens) in sorted(whole.items())]
    return sorted(means, key=lambda entry: (math.isfinite(entry[1]), -entry[1] if math.isfinite(entry[1]) else 0.0))


class Guard:
    """Judges consecutive steps, with the same result on all ranks.

    Args:
        settings: of the configuration.
        latest: losses of the previous steps, the newest last.
    """

    def __init__(self, settings: GuardConfig, latest: Sequence[float] = ()) -> None:
        self.settings = settings
        self.latest = deque(latest, maxlen=settings.spike_window)

    @property
    def limit(self) -> float:
        """The highest loss that is not a spike; infinite while too few losses are known."""
        if 2 * len(self.latest) < self.settings.spike_window:
            return math.inf
        return self.settings.spike_factor * statistics.median(self.latest)

    def judge(self, loss: float | None, gradient_norm: float) -> Finding | None:
        """What is wrong with a step, or None; its loss is added to the recent ones.

        So is that of a spike, skipped or not: if losses have risen permanently, they are accepted after half a window.

        Args:
            loss: mean over the step's tokens; None without tokens.
            gradient_norm: of all parts that are trained.
        """
        limit, known = self.limit, len(self.latest)
        if loss is not None and math.isfinite(loss):
            self.latest.append(loss)
        nan, spike = self.settings.on_nan, self.settings.on_spike
        if loss is not None and not math.isfinite(loss):
            return Finding(
                nan, f"the loss is {loss}, expected a finite one", "guard.on_nan", lambda mean: not math.isfinite(mean)
            )
        if not math.isfinite(gradient_norm):
            what = f"the loss is {loss}, but its gradient norm is {gradient_norm}, expected a finite one"
            return Finding(nan, what, "guard.on_nan", None)
        if spike is not None and loss is not None and loss > limit:
            what = (
                f"the loss is {loss:.6g}, expected at most {limit:.6g}: {self.settings.spike_factor:g} times the "
                f"median of the latest {known}"
            )
            return Finding(spike, what, "guard.on_spike", lambda mean: mean > limit)
        return None


def latest_losses(entries: Iterable[Mapping[str, Any]], step: int, window: int) -> list[float]:
    """The losses that a run's guard knew after a step, from the run's log.

    Args:
        entries: of the log.
        step: the last one to include.
        window: the configuration's.
    """
    known = [
        entry["loss"]
        for entry in entries
        if entry.get("step", math.inf) <= step and entry.get("loss") is not None and entry.get("trained_tokens", 1)
    ]
    return known[-window:]
