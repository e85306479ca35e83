"""A run's configuration: Megatron-Bridge's container with additional sections, and the checks of all of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal, get_args

from qwen3vl_bridge.data.dataset_provider import ConversationRows, Qwen3VLConversationProvider
from qwen3vl_bridge.models.refusals import GRAPHS, ON_TRAIN, check_microbatches, check_world
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.peft.lora import Qwen3VLParts
from qwen3vl_bridge.training.checkpoint_manager import MANAGER, check_script, manage_checkpoints
from qwen3vl_bridge.training.muon import check_optimizer
from qwen3vl_bridge.training.resuming import expect_checkpoint
from qwen3vl_bridge.training.run_refusals import (
    COMPLETED,
    MODULES_APART,
    WITH_FLOAT32,
    check_balance,
    check_host_memory,
    check_schedule,
    check_share,
    leave_exit_signal_to_run,
)
from qwen3vl_bridge.training.tower_settings import Qwen3VLTowers, check_towers
from qwen3vl_bridge.training.weight_loading import read_initial_weights

from megatron.bridge.training.config import ConfigContainer, OptimizerConfigOverrideProvider, RerunStateMachineConfig
from megatron.bridge.utils.common_utils import get_world_size_safe

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

    def finalize(self) -> None:
        """Check the fields."""
        for name, also in (("on_nan", ()), ("on_spike", (None,))):
            allowed = (*get_args(Action), *also)
            if (found := getattr(self, name)) not in allowed:
                raise ValueError(f"guard.{name} is {found!r}, expected one of {allowed}")
        if self.spike_factor <= 1:
            raise ValueError(f"guard.spike_factor is {self.spike_factor}, expected more than 1")
        if self.spike_window < 2:
            raise ValueError(f"guard.spike_window is {self.spike_window}, expected 2 or more")


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

    def finalize(self) -> None:
        """Check the fields."""
        if self.metric not in ("exact", "contains"):
            raise ValueError(f"accuracy.metric is {self.metric!r}, expected 'exact' or 'contains'")
        for name in ("samples", "max_new_tokens"):
            if (found := getattr(self, name)) < 1:
                raise ValueError(f"accuracy.{name} is {found}, expected 1 or more")


def check_lengths(cfg: ConfigContainer) -> None:
    """Refuse rows of another length than the model is built for."""
    if cfg.dataset.seq_length != cfg.model.seq_length:
        raise ValueError(
            f"dataset.seq_length is {cfg.dataset.seq_length}, expected model.seq_length, {cfg.model.seq_length}"
        )


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

    optimizer_config_override_provider: OptimizerConfigOverrideProvider = field(default_factory=Qwen3VLTowers)
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

    def validate(self) -> None:
        """Like Megatron-Bridge's, with our checks; raises ValueError for settings that contradict each other."""
        check_script()
        check_lengths(self)
        check((*MODULES_APART, *WITH_FLOAT32), self)
        check(GRAPHS, self.model)
        self.accuracy.finalize()
        if self.accuracy.path is not None:
            self._check_accuracy()
        check_optimizer(self)
        check_schedule(self)
        check_towers(self)
        microbatches = check_share(self, self.get_data_parallel_size(get_world_size_safe()))
        check_balance(self)
        if self.guard is not None:
            self._check_guard(self.guard)
        super().validate()
        check(ON_TRAIN, self.model)
        check(COMPLETED, self)
        if isinstance(self.peft, Qwen3VLParts):
            self.peft.check(self.model)
        check_microbatches(self.model, microbatches, "train.global_batch_size")
        self._check_shards_are_saved()
        check_host_memory(self)
        leave_exit_signal_to_run(self)
        manage_checkpoints(self)
        read_initial_weights(self, MANAGER)
        self._tell_dataset()
        self._check_checkpoints()
        self._check_meta_device()

    def _tell_dataset(self) -> None:
        """Set the data set's fields that follow from other sections: rows per evaluation, and rows per microbatch."""
        if isinstance(self.dataset, ConversationRows):
            settings = self.validation
            self.dataset.rows_of_evaluation = settings.eval_iters * (settings.eval_global_batch_size or 0) or None
        if isinstance(self.dataset, Qwen3VLConversationProvider):
            self.dataset.rows_of_microbatch = self.train.micro_batch_size

    def _check_checkpoints(self) -> None:
        """Refuse settings that would leave no checkpoint to resume from."""
        settings = self.checkpoint
        expect_checkpoint(settings)
        if settings.most_recent_k == 0:
            raise ValueError("checkpoint.most_recent_k is 0, expected at least 1, or -1 to keep all")

    def _check_meta_device(self) -> None:
        """Parameters get memory from the hook that reads initial weights, and only Megatron-FSDP moves them to GPUs."""
        if not self.model.init_model_with_meta_device:
            return
        weights = self.checkpoint.pretrained_checkpoint
        settings = {
            "ddp.use_megatron_fsdp": (self.ddp.use_megatron_fsdp, True),
            "model.tensor_model_parallel_size": (self.model.tensor_model_parallel_size, 1),
            "checkpoint.pretrained_checkpoint": (weights, weights or "first weights"),
            "checkpoint.custom_manager_class": (self.checkpoint.custom_manager_class, MANAGER),
        }
        wrong = [f"{name} is {found!r}, expected {need!r}" for name, (found, need) in settings.items() if found != need]
        if wrong:
            raise ValueError(f"model.init_model_with_meta_device is True, expected False, or: {'; '.join(wrong)}")

    def _check_shards_are_saved(self) -> None:
        """Refuse a float32 model under Megatron-FSDP: megatron-core expects one more wrapper around the model when it
        saves.
        """
        saves = self.checkpoint.save is not None and self.checkpoint.ckpt_format == "fsdp_dtensor"
        if not (saves and self.ddp.use_megatron_fsdp):
            return
        if not (self.model.bf16 or self.model.fp16):
            raise ValueError(
                "the model is in float32, which Megatron-FSDP can train but not save: expected a mixed_precision such "
                "as 'bf16_mixed', or checkpoint.save None"
            )

    def _check_guard(self, guard: GuardConfig) -> None:
        guard.finalize()
        stops = {
            "rerun_state_machine.check_for_nan_in_loss": self.rerun_state_machine.check_for_nan_in_loss,
            "ddp.check_for_nan_in_grad": self.ddp.check_for_nan_in_grad,
        }
        found = " and ".join(f"{name}=True" for name, is_set in stops.items() if is_set)
        if found and guard.on_nan == "skip":
            raise ValueError(
                f"guard.on_nan is 'skip' with {found}, which ends the run before the step could be skipped; expected "
                "False"
            )
        if found:
            logger.warning("%s ends the run before the guard can name samples; set it to False", found)

    def _check_accuracy(self) -> None:
        model = self.model
        split = {"pipeline": model.pipeline_model_parallel_size, "context": model.context_parallel_size}
        if wrong := [f"{name} parallelism {size}" for name, size in split.items() if size > 1]:
            raise ValueError(
                f"accuracy.path is {self.accuracy.path!r} with {' and '.join(wrong)}: generation needs the complete "
                "model on each rank, apart from tensor parallelism; expected accuracy.path None"
            )
        if self.dist.use_torch_fsdp2:
            raise ValueError(
                f"accuracy.path is {self.accuracy.path!r} with dist.use_torch_fsdp2: generation calls parts of the "
                "model, and torch's FSDP gathers parameters only for a call of the whole model; expected "
                "accuracy.path None, "
                "or ddp.use_megatron_fsdp"
            )
        if not isinstance(self.dataset, ConversationRows):
            raise ValueError(
                f"accuracy.path is {self.accuracy.path!r} with dataset {type(self.dataset).__name__}: expected a "
                "dataset of qwen3vl_bridge, whose processor encodes the questions"
            )
