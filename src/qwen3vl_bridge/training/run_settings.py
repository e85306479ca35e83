"""Sections that this package adds to a run's configuration: the guard, accuracy, and the learning rates of the model's
parts; `training/run_refusals.py` checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qwen3vl_bridge.weights.rows import Part, part_of

from megatron.bridge.training.config import OptimizerConfigOverrideProvider, OptimizerConfigOverrideProviderContext
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

Action = Literal["stop", "skip"]


@dataclass(kw_only=True)
class GuardConfig:
    """What to do about steps that would ruin the weights. The responsible samples are always named.

    Attributes:
        on_nan: a loss or gradient that is not finite: "stop" the run before the step, or "skip" the step.
        on_spike: a loss far above the recent ones: "stop", "skip", or None to ignore it.
        spike_factor: a spike is a loss above this many times their median.
        spike_window: number of recent steps; spikes are detected once half as many losses are known.
    """

    on_nan: Action = "stop"
    on_spike: Action | None = None
    spike_factor: float = 4.0
    spike_window: int = 64


@dataclass(kw_only=True)
class AccuracyConfig:
    """Accuracy on held-out conversations at each evaluation: greedy answers are compared with each conversation's last
    answer.

    Reasoning, everything before the last "</think>", is ignored in the conversation and in the model's answer.

    Attributes:
        path: conversations, as in `dataset.valid_path`; None for no accuracy.
        samples: number of conversations, from the beginning.
        max_new_tokens: maximum length of an answer, with the reasoning that a chat template asks for.
        metric: "exact" counts answers that are equal apart from surrounding white space; "contains" those that contain
            the expected one.
    """

    path: str | None = None
    samples: int = 64
    max_new_tokens: int = 32
    metric: Literal["exact", "contains"] = "exact"


@dataclass(kw_only=True)
class Qwen3VLLearningRates(OptimizerConfigOverrideProvider):
    """`cfg.optimizer_config_override_provider`: a learning rate for each part of the model.

    The rates follow the run's schedule: `scheduler` warms up to them, and decays them in the ratio of
    `optimizer.min_lr` to `optimizer.lr`. Weight decay does not change.

    Attributes:
        language_model_lr, vision_model_lr, vision_projection_lr: the highest learning rate; None for `optimizer.lr`.
    """

    language_model_lr: float | None = None
    vision_model_lr: float | None = None
    vision_projection_lr: float | None = None

    def rates(self) -> dict[Part, float]:
        """The parts with their own learning rate."""
        rates = {part: getattr(self, f"{part.value}_lr") for part in Part}
        return {part: rate for part, rate in rates.items() if rate is not None}

    def build_config_overrides(
        self, context: OptimizerConfigOverrideProviderContext
    ) -> dict[ParamKey, ParamGroupOverride] | None:
        """Megatron-Bridge's overrides, and the parts' learning rates."""
        overrides = dict(super().build_config_overrides(context) or {})
        config = context.optimizer_config
        for part, rate in self.rates().items():
            if rate != config.lr:  # parameters at optimizer.lr stay in the groups whose rate is logged
                of_part = ParamWithNamePredicate(part.value, lambda _, name, part=part: part_of(name) is part)
                key = ParamKey(with_name_predicate=of_part)
                lowest = rate * (config.min_lr or 0.0) / config.lr
                overrides[key] = ParamGroupOverride(max_lr=rate, min_lr=lowest)
        return overrides or None
