"""The configuration of a run: Megatron-Bridge's `ConfigContainer` with further sections, such as `objective`.

`training/run_validation.py` checks the configuration.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar, Literal

from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.config.model_validation import check_world
from qwen3vl_bridge.data.dataset_provider import ConversationSettings, Qwen3VLConversationProvider
from qwen3vl_bridge.data.loading import kill_workers_at_exit
from qwen3vl_bridge.training import run_validation
from qwen3vl_bridge.training.checkpoint_manager import MANAGER, check_script
from qwen3vl_bridge.training.objective_settings import ObjectiveConfig
from qwen3vl_bridge.training.retrieval import freeze_unused_output
from qwen3vl_bridge.training.weight_loading import register_initial_weights
from qwen3vl_bridge.weights.rows import Component, component_of

from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.training.config import (
    CheckpointConfig,
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
    """What to do in a step with a bad loss or gradient, before the weights change. The message names the samples.

    Attributes:
        on_nan: "stop" the run or "skip" the step if the loss or the gradient norm is not finite.
        on_spike: "stop" the run or "skip" the step if the loss is a spike, far above recent losses; None to ignore
            spikes.
        spike_factor: a loss is a spike if it exceeds the median of recent losses times this factor.
        spike_window: number of recent losses in the median. Spikes are detected as soon as half of this number of
            steps has been trained.
    """

    on_nan: Action = "stop"
    on_spike: Action | None = None
    spike_factor: float = 4.0
    spike_window: int = 64


@dataclass(kw_only=True)
class AccuracyConfig:
    """Mean score of answers to held-out conversations at each evaluation.

    The model's greedy answer is compared with the last answer of each conversation, or with its `references`.
    Everything before the last "</think>" is reasoning, which is ignored in both answers.

    Attributes:
        path: conversations, in the same format as `dataset.valid_path`; None to measure no accuracy.
        samples: number of conversations, from the beginning of the file.
        max_new_tokens: maximum number of tokens of an answer, including reasoning.
        metric: how an answer is scored. "exact" accepts answers that are equal apart from surrounding white space, and
            "contains" answers that contain the expected answer. The others are metrics of public benchmarks.
    """

    path: str | None = None
    samples: int = 64
    max_new_tokens: int = 32
    metric: Literal[
        "exact", "contains", "normalized_match", "anls", "relaxed_accuracy", "vqa_accuracy", "multiple_choice",
        "box_iou", "box_accuracy",
    ] = "exact"  # fmt: skip


@dataclass(kw_only=True)
class Qwen3VLLearningRates(OptimizerConfigOverrideProvider):
    """Learning rates of the model's components, set as `cfg.optimizer_config_override_provider`.

    The rates follow the schedule of the run. The warm-up ends at these rates, and they decay by the ratio of
    `optimizer.min_lr` to `optimizer.lr`. Weight decay is the same for all components.

    Attributes:
        language_model_lr, vision_model_lr, vision_projection_lr: learning rate after warm-up; None for `optimizer.lr`.
    """

    language_model_lr: float | None = None
    vision_model_lr: float | None = None
    vision_projection_lr: float | None = None

    def rates(self) -> dict[Component, float]:
        """Return the learning rates that are not None, by component."""
        rates = {component: getattr(self, f"{component.value}_lr") for component in Component}
        return {component: rate for component, rate in rates.items() if rate is not None}

    def build_config_overrides(
        self, context: OptimizerConfigOverrideProviderContext
    ) -> dict[ParamKey, ParamGroupOverride] | None:
        """Return Megatron-Bridge's overrides of parameter groups, and an override for each component with a rate."""
        overrides = dict(super().build_config_overrides(context) or {})
        config = context.optimizer_config
        for component, rate in self.rates().items():
            if rate == config.lr:  # no override: Megatron-Bridge logs the rate of the default groups
                continue
            predicate = ParamWithNamePredicate(
                component.value, lambda _, name, component=component: component_of(name) is component
            )
            min_lr = rate * (config.min_lr or 0.0) / config.lr
            overrides[ParamKey(with_name_predicate=predicate)] = ParamGroupOverride(max_lr=rate, min_lr=min_lr)
        return overrides or None


def rows_per_evaluation(cfg: ConfigContainer) -> int:
    """Return the number of rows in one evaluation of a data split. `cfg.validate()` need not have run."""
    checks = cfg.validation
    return checks.eval_iters * (checks.eval_global_batch_size or cfg.train.global_batch_size or 0)


@dataclass(kw_only=True)
class Qwen3VLCheckpointConfig(CheckpointConfig):
    """Megatron-Bridge's `CheckpointConfig` with `keep_best`.

    Attributes:
        keep_best: a metric of the run's evaluations, "valid_loss" or "accuracy". The checkpoint with its best value is
            kept in addition to the newest `most_recent_k`, and `best_checkpoint.json` names it. None for no metric.
    """

    keep_best: Literal["valid_loss", "accuracy"] | None = None


@dataclass(kw_only=True)
class Qwen3VLConfigContainer(ConfigContainer):
    """Megatron-Bridge's `ConfigContainer` with the sections `objective`, `guard` and `accuracy`.

    The callbacks of `training_callbacks` implement the last two. Megatron-Bridge's own check for losses that are not
    finite is off, because the guard checks losses and names the samples. Initial weights
    (`checkpoint.pretrained_checkpoint`) may have any format that this package reads.

    Attributes:
        optimizer_config_override_provider: Megatron-Bridge's field, here with the learning rates of the model's
            components.
        rerun_state_machine: Megatron-Bridge's field, with its check for losses that are not finite turned off.
        checkpoint: Megatron-Bridge's field, with `keep_best`.
        objective: the loss, and the kind of data that it needs.
        guard: what to do in steps with a bad loss or gradient; None for no checks.
        accuracy: accuracy on held-out conversations.
    """

    # Attributes, not settings: a ClassVar is no field of the dataclass. They are set with `vars(cfg)`, because type
    # checkers reject an assignment to the ClassVar of an object.
    # Callbacks were created for this configuration. Set by `build_callbacks` (training/callbacks.py).
    has_callbacks: ClassVar[bool] = False
    # The warm-up is the recipe's default, and may be shortened. Set by `apply` (overrides.py of qwen3vl_recipes).
    has_recipes_warmup: ClassVar[bool] = False

    optimizer_config_override_provider: OptimizerConfigOverrideProvider = field(default_factory=Qwen3VLLearningRates)
    rerun_state_machine: RerunStateMachineConfig = field(
        default_factory=lambda: RerunStateMachineConfig(check_for_nan_in_loss=False)
    )
    checkpoint: CheckpointConfig = field(default_factory=Qwen3VLCheckpointConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    guard: GuardConfig | None = field(default_factory=GuardConfig)
    accuracy: AccuracyConfig = field(default_factory=AccuracyConfig)

    def __deepcopy__(self, memo: dict[int, Any]) -> Qwen3VLConfigContainer:
        """Return a deep copy, with the same `has_recipes_warmup`. `has_callbacks` of the copy is False."""
        copied = super().__deepcopy__(memo)
        vars(copied)["has_recipes_warmup"] = self.has_recipes_warmup
        return copied

    def get_data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks. Megatron-Bridge calls this method before it checks parallel sizes.

        Raises:
            ValueError: the number of processes does not match the parallel sizes.
        """
        check_world(self.model, world_size)
        return super().get_data_parallel_size(world_size)

    def set_data_parallel_size(self) -> None:
        """Set `data_parallel_size`. Megatron-Bridge calls this method just before it applies `comm_overlap`.

        Raises:
            ValueError: the number of processes does not match the parallel sizes, or `comm_overlap` would turn off an
                option that the model's settings turn on.
        """
        run_checks(run_validation.BEFORE_OVERLAP, self)
        super().set_data_parallel_size()

    def validate(self) -> None:
        """Check and complete the configuration.

        Raises:
            ValueError: settings contradict each other or would be ignored.
        """
        check_script()
        run_checks(run_validation.BEFORE_VALIDATE, self)
        self.apply_objective()
        self._count_steps()
        run_validation.check_or_shorten_warmup(self)
        super().validate()
        if self.checkpoint.custom_manager_class is None:
            self.checkpoint.custom_manager_class = MANAGER
        run_checks(run_validation.AFTER_VALIDATE, self)
        register_initial_weights(self, MANAGER)
        if self.objective.kind == "embedding":
            self.model.register_pre_wrap_hook(freeze_unused_output)
        self._complete_dataset()

    def apply_objective(self) -> None:
        """Set the fields of the data set that the objective determines. `validate` calls this method.

        Raises:
            ValueError: the data set is set up for another objective.
        """
        if not isinstance(self.dataset, Qwen3VLConversationProvider):
            return
        if self.dataset.objective not in ("sft", self.objective.kind):
            raise ValueError(
                f"dataset.objective is {self.dataset.objective!r}, but objective.kind is {self.objective.kind!r}: "
                "remove dataset.objective, which is set from objective.kind"
            )
        self.dataset.objective = self.objective.kind
        self.dataset.reference_logps = self.objective.reference_logps
        if self.objective.kind == "embedding":
            if self.dataset.max_documents not in (None, self.objective.max_documents):
                raise ValueError(
                    f"dataset.max_documents is {self.dataset.max_documents}, but objective.max_documents is "
                    f"{self.objective.max_documents}: set only objective.max_documents"
                )
            self.dataset.max_documents = self.objective.max_documents

    def log_non_default_values(self) -> None:
        """Print the settings that differ from their defaults, unless Megatron's log messages are hidden.

        The file `run_config.yaml` in each checkpoint lists all settings.
        """
        if logging.getLogger("megatron").isEnabledFor(logging.WARNING):
            super().log_non_default_values()

    def _count_steps(self) -> None:
        """Convert `train.num_epochs` to a number of steps in `train.train_iters`, for this package's data sets.

        An epoch may end in the middle of a step; the last step then continues in the next epoch.
        """
        train, dataset = self.train, self.dataset
        if (epochs := train.num_epochs) is None or not isinstance(dataset, ConversationSettings):
            return  # Megatron-Bridge counts the rows of its own data sets
        given = {name: getattr(train, name) for name in ("train_iters", "train_samples", "rampup_batch_size")}
        if epochs <= 0 or any(value is not None for value in given.values()):
            found = " and ".join(f"train.{name} {value}" for name, value in given.items() if value is not None)
            raise ValueError(
                f"train.num_epochs is {epochs}{' with ' * bool(found)}{found}, expected a number above 0, and None for "
                "train_iters, train_samples and rampup_batch_size"
            )
        if not isinstance(dataset, Qwen3VLConversationProvider):
            raise ValueError(
                f"train.num_epochs is {epochs} with a {type(dataset).__name__}, expected None: the number of rows in "
                "an epoch is not known before they are read. Set train.train_iters instead"
            )
        count = int(dataset.count_epoch(self.model.context_parallel_size).rows)
        train.num_epochs, train.train_iters = None, ceil(Fraction(str(epochs)) * count / train.global_batch_size)
        if get_rank_safe() == 0:
            logger.info("train.num_epochs %s of %d rows: train.train_iters is %d", epochs, count, train.train_iters)

    def _complete_dataset(self) -> None:
        """Set the fields of the dataset that depend on other sections of the configuration.

        Warn if `train.exit_signal` would kill data-loading workers, because the run would then fail before it can save.
        """
        dataset, train = self.dataset, self.train
        exit_signal = int(train.exit_signal) if train.exit_signal_handler_for_dataloader else None
        if isinstance(dataset, ConversationSettings):
            dataset.rows_of_evaluation = rows_per_evaluation(self) or None
            dataset.ignored_signal = exit_signal
            dataset.params_dtype = self.model.params_dtype
        if isinstance(dataset, Qwen3VLConversationProvider):
            dataset.rows_of_microbatch = train.micro_batch_size
        if exit_signal is not None:
            kill_workers_at_exit()  # also workers of Megatron-Bridge's own loaders
        if not train.exit_signal_handler or not getattr(dataset, "num_workers", 0):
            return
        advice = (
            "set train.exit_signal_handler_for_dataloader=true" if exit_signal is None else "use Qwen3VLEnergonProvider"
        )
        # Megatron-Bridge's energon loaders never handle the signal.
        if exit_signal is None or isinstance(dataset, EnergonDatasetConfig):
            logger.warning(
                "train.exit_signal_handler is on, but the %d data-loading workers do not handle the signal. Launchers "
                "send it to them too, they end, and the run fails before it can save: %s, or set dataset.num_workers=0",
                *(dataset.num_workers, advice),
            )
