"""A run's configuration: Megatron-Bridge's container with additional sections."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from qwen3vl_bridge.data.dataset_provider import ConversationRows, Qwen3VLConversationProvider
from qwen3vl_bridge.data.row_loading import end_workers_at_exit
from qwen3vl_bridge.models.refusals import check_world
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.training import run_refusals
from qwen3vl_bridge.training.checkpoint_manager import MANAGER, check_script
from qwen3vl_bridge.training.run_settings import AccuracyConfig, GuardConfig, Qwen3VLLearningRates
from qwen3vl_bridge.training.weight_loading import read_initial_weights

from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.training.config import ConfigContainer, OptimizerConfigOverrideProvider, RerunStateMachineConfig

logger = logging.getLogger(__name__)


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

    def validate(self) -> None:
        """Like Megatron-Bridge's, with our checks; raises ValueError for settings that contradict each other."""
        check_script()
        check(run_refusals.BEFORE_VALIDATE, self)
        super().validate()
        if self.checkpoint.custom_manager_class is None:
            self.checkpoint.custom_manager_class = MANAGER
        check(run_refusals.AFTER_VALIDATE, self)
        read_initial_weights(self, MANAGER)
        self._complete_dataset()

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
        ends = "launchers send them the signal too, it terminates them, and the run fails before it can save"
        if number is None:
            logger.warning(
                "train.exit_signal_handler is on, but not for the %d processes that read ahead: %s; set "
                "train.exit_signal_handler_for_dataloader=true, or dataset.num_workers=0",
                *(dataset.num_workers, ends),
            )
        elif isinstance(dataset, EnergonDatasetConfig):
            logger.warning(
                "train.exit_signal_handler_for_dataloader has no effect on the loaders of EnergonDatasetConfig: %s; "
                "set dataset.num_workers=0, or use Qwen3VLEnergonProvider",
                ends,
            )
