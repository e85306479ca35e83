"""A run's configuration: Megatron-Bridge's container with more sections (the guard, accuracy, learning rates of the
model's parts), which `training/run_refusals.py` checks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import ClassVar, Literal

from qwen3vl_bridge.data.dataset_provider import ConversationRows, Qwen3VLConversationProvider
from qwen3vl_bridge.data.row_loading import end_workers_at_exit
from qwen3vl_bridge.models.refusals import check_world
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.training import run_refusals
from qwen3vl_bridge.training.checkpoint_manager import MANAGER, check_script
from qwen3vl_bridge.training.weight_loading import read_initial_weights
from qwen3vl_bridge.weights.rows import Part, part_of

from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.training.config import (
    ConfigContainer,
    OptimizerConfigOverrideProvider,
    OptimizerConfigOverrideProviderContext,
    RerunStateMachineConfig,
)
from megatron.bridge.utils.common_utils import get_rank_safe
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

logger = logging.getLogger(__name__)

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


@dataclass(kw_only=True)
class Qwen3VLConfigContainer(ConfigContainer):
    """Megatron-Bridge's `ConfigContainer` with two more sections, implemented by the callbacks of `training_callbacks`.

    Megatron-Bridge's own check for non-finite losses is off: the guard does this and names samples. Initial weights
    (`checkpoint.pretrained_checkpoint`) of any format are read by our loader.

    Attributes:
        optimizer_config_override_provider: learning rates of the model's parts; Megatron-Bridge's field.
        rerun_state_machine: Megatron-Bridge's field.
        guard: what to do about steps that would ruin the weights; None for no checks.
        accuracy: accuracy on held-out conversations.
    """

    # Not a setting: whether `training_callbacks` made some for this configuration.
    _has_callbacks: ClassVar[bool] = False

    optimizer_config_override_provider: OptimizerConfigOverrideProvider = field(default_factory=Qwen3VLLearningRates)
    rerun_state_machine: RerunStateMachineConfig = field(
        default_factory=lambda: RerunStateMachineConfig(check_for_nan_in_loss=False)
    )
    guard: GuardConfig | None = field(default_factory=GuardConfig)
    accuracy: AccuracyConfig = field(default_factory=AccuracyConfig)

    def get_data_parallel_size(self, world_size: int) -> int:
        """Like Megatron-Bridge's, which is called before sizes are checked, and divides by them.

        Raises:
            ValueError: a number of processes that is no multiple of the product of the parallel sizes, or, with
                separate vision ranks, is not the sum of both modules' ranks.
        """
        check_world(self.model, world_size)
        return super().get_data_parallel_size(world_size)

    def set_data_parallel_size(self) -> None:
        """Like Megatron-Bridge's, which is called just before `comm_overlap` is applied.

        Raises:
            ValueError: as `get_data_parallel_size`; or `comm_overlap` would turn off what the model's settings turn on.
        """
        check(run_refusals.BEFORE_OVERLAP, self)
        super().set_data_parallel_size()

    def validate(self) -> None:
        """Like Megatron-Bridge's, with our checks; raises ValueError for settings that contradict each other."""
        check_script()
        check(run_refusals.BEFORE_VALIDATE, self)
        self._count_steps()
        run_refusals.check_warmup(self)
        super().validate()
        if self.checkpoint.custom_manager_class is None:
            self.checkpoint.custom_manager_class = MANAGER
        check(run_refusals.AFTER_VALIDATE, self)
        read_initial_weights(self, MANAGER)
        self._complete_dataset()

    def _count_steps(self) -> None:
        """Replace `train.num_epochs` by as many `train.train_iters`, for our data sets, whose rows never end.

        An epoch ends in the middle of a step, and the last step continues in the next epoch.
        """
        train, rows = self.train, self.dataset
        if (epochs := train.num_epochs) is None or not isinstance(rows, ConversationRows):
            return  # Megatron-Bridge knows the lengths of its own
        given = {name: getattr(train, name) for name in ("train_iters", "train_samples", "rampup_batch_size")}
        if epochs <= 0 or any(value is not None for value in given.values()):
            found = " and ".join(f"train.{name} {value}" for name, value in given.items() if value is not None)
            raise ValueError(
                f"train.num_epochs is {epochs}{' with ' * bool(found)}{found}, expected a number above 0, and None for "
                "train_iters, train_samples and rampup_batch_size"
            )
        if not isinstance(rows, Qwen3VLConversationProvider):
            raise ValueError(
                f"train.num_epochs is {epochs} with a {type(rows).__name__}, expected None: the rows of an epoch are "
                "not known before they are read. Set train.train_iters"
            )
        count = int(rows.count_epoch(self.model.context_parallel_size).rows)
        train.num_epochs, train.train_iters = None, ceil(Fraction(str(epochs)) * count / train.global_batch_size)
        if get_rank_safe() == 0:
            logger.info("train.num_epochs %s of %d rows: train.train_iters is %d", epochs, count, train.train_iters)

    def _complete_dataset(self) -> None:
        """Set the data set's fields that follow from other sections: rows per evaluation and per microbatch, and the
        signal that asks a run to save and exit, which workers ignore. Warn if workers would end a run before that.
        """
        dataset, train = self.dataset, self.train
        number = int(train.exit_signal) if train.exit_signal_handler_for_dataloader else None
        if isinstance(dataset, ConversationRows):
            rows = self.validation.eval_iters * (self.validation.eval_global_batch_size or 0)
            dataset.rows_of_evaluation = rows or None
            dataset.ignored_signal = number
        if isinstance(dataset, Qwen3VLConversationProvider):
            dataset.rows_of_microbatch = train.micro_batch_size
        if number is not None:
            end_workers_at_exit()  # also those of Megatron-Bridge's own loaders
        if not train.exit_signal_handler or not getattr(dataset, "num_workers", 0):
            return
        advice = "set train.exit_signal_handler_for_dataloader=true" if number is None else "use Qwen3VLEnergonProvider"
        if number is None or isinstance(dataset, EnergonDatasetConfig):  # whose loaders do not handle it in any case
            logger.warning(
                "train.exit_signal_handler is on, but not for the %d processes that read ahead: launchers send them "
                "the signal too, it ends them, and the run fails before it can save; %s, or dataset.num_workers=0",
                *(dataset.num_workers, advice),
            )
