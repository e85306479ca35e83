"""Create the callbacks of a run, and measure accuracy on held-out conversations."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.core.collectives import is_rank_zero, raise_on_all_ranks
from qwen3vl_bridge.data.dataset_provider import ConversationSettings
from qwen3vl_bridge.data.prompts import Prompts
from qwen3vl_bridge.data.sources import open_source
from qwen3vl_bridge.dist_train.joint_run import JoinModules
from qwen3vl_bridge.inference.evaluation import evaluate, make_references, mean_score
from qwen3vl_bridge.inference.generation import end_token_ids
from qwen3vl_bridge.training import run_validation
from qwen3vl_bridge.training.best_checkpoint import record_best
from qwen3vl_bridge.training.checkpoint_manager import check_script, saved_steps
from qwen3vl_bridge.training.config import AccuracyConfig, Qwen3VLConfigContainer
from qwen3vl_bridge.training.guard import StepGuard
from qwen3vl_bridge.training.metrics import Metrics
from qwen3vl_bridge.training.reference_scores import check_reference_model
from qwen3vl_bridge.training.run_log import RunLog, publish_metrics

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer

logger = logging.getLogger(__name__)


def training_callbacks(cfg: ConfigContainer) -> list[Callback]:
    """Validate a configuration and return the callbacks of its run, for `finetune(..., callbacks=...)`.

    Raises:
        RuntimeError: This process was started for asynchronous saves, and runs the training script again.
        ValueError: `cfg` contains an unknown setting, data do not exist, or the processor cannot be loaded.
    """
    check_script()
    run_checks((*run_validation.BEFORE_RUN, check_reference_model), cfg)
    return build_callbacks(cfg)


def build_callbacks(cfg: ConfigContainer) -> list[Callback]:
    """Return the callbacks of a run. Unlike `training_callbacks`, do not check its data, processor and script.

    Dry runs and simulations call this function.
    """
    if isinstance(cfg, Qwen3VLConfigContainer):
        vars(cfg)["has_callbacks"] = True  # see `Qwen3VLConfigContainer`
    callbacks: list[Callback] = [StepGuard()]  # first: the others use its gradient norms
    if cfg.model.dist_train.use_dist_train:
        callbacks.append(JoinModules())
    if not cfg.logger.skip_train_metrics_log:
        callbacks.append(Metrics())
    if isinstance(cfg, Qwen3VLConfigContainer) and cfg.accuracy.path is not None:
        callbacks.append(Accuracy(cfg))
    # If num_epochs is set for one of its own datasets, Megatron-Bridge rejects callbacks with `on_data_init_start`.
    if cfg.train.num_epochs is None or isinstance(cfg.dataset, ConversationSettings):
        callbacks += [SkipFinishedRun(), KeepRngState()]
    if torch.cuda.is_available():
        callbacks.append(CollectGarbageAfterFirstStep())
    callbacks.append(RunLog())
    if getattr(cfg.checkpoint, "keep_best", None) is not None:  # Megatron-Bridge's own class lacks it
        callbacks.append(RecordBest())
    return callbacks


class SkipFinishedRun(Callback):
    """Callback that ends a run at once if it is started again after its last step, such as a requeued job.

    Without it, Megatron-Bridge's samplers raise an error, or its loop validates and saves once more.
    """

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Skip training and validation if the loaded checkpoint is the last of the run."""
        cfg, state = context.state.cfg, context.state.train_state
        if state.step < cfg.train.train_iters:
            return
        if is_rank_zero():
            logger.warning(
                "the run is complete: %s is at step %d, and train.train_iters is %d. Nothing is trained. To train "
                "longer, raise train.train_iters and set scheduler.override_opt_param_scheduler=true; a new run needs "
                "another folder",
                *(cfg.checkpoint.load, state.step, cfg.train.train_iters),
            )
        state.consumed_train_samples = 0
        cfg.validation.skip_train, cfg.validation.eval_iters = True, 0


class KeepRngState(Callback):
    """Callback that restores torch's random state after data loaders are built: each loader draws a seed from it."""

    _state: torch.Tensor | None = None

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Save torch's random state before data loaders are built."""
        self._state = torch.get_rng_state()

    def on_train_start(self, context: CallbackContext) -> None:
        """Restore torch's random state."""
        if self._state is not None:  # a script with its own set-up does not call `on_data_init_start`
            torch.set_rng_state(self._state)


class CollectGarbageAfterFirstStep(Callback):
    """Callback that collects garbage after the first step.

    Compiling kernels in this step leaves reference cycles, which hold GPU memory: 1.5 GiB for Qwen3.5-9B, measured on
    the fake GPU. Recipes collect garbage only every `train.manual_gc_interval` steps.
    """

    _done = False

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Collect garbage at the end of the first step."""
        if not self._done:
            gc.collect()
        self._done = True


class Accuracy(Callback):
    """Callback that generates answers at each evaluation and logs their mean score as `accuracy`."""

    def __init__(self, cfg: ConfigContainer) -> None:
        self.settings: AccuracyConfig = cfg.accuracy
        self.dataset: ConversationSettings = cfg.dataset

    def on_train_start(self, context: CallbackContext) -> None:
        """Read the questions, so that unsuitable data raise an error before the first step."""
        make_references(self.prompts.questions, self.settings.metric)

    def on_eval_end(self, context: CallbackContext) -> None:
        """Generate answers and log their mean score. Wrong answers are listed in the log."""
        model = list(context.model)
        answers = evaluate(
            model,
            self.prompts,
            self.settings.metric,
            max_new_tokens=self.settings.max_new_tokens,
            eos_token_id=end_token_ids(model, self.prompts.encoder.processor.tokenizer),
        )
        for answer in answers if is_rank_zero() else ():
            if answer.score < 1:
                logger.info(
                    "%s: expected %r, the model answered %r", answer.sample_id, answer.references, answer.answer
                )
        publish_metrics(context, {"accuracy": mean_score(answers)})

    @cached_property
    def prompts(self) -> Prompts:
        """Return the prompts of the first conversations, encoded with the settings of the training data."""
        source = open_source(
            self.settings.path,
            getattr(self.dataset, "media_root", None),
            url_cache=self.dataset.make_url_cache() if hasattr(self.dataset, "make_url_cache") else None,
            schema_adapter=getattr(self.dataset, "schema_adapter", None),
            columns=getattr(self.dataset, "columns", None),
        )
        encoder = replace(self.dataset, answers="last").processor_settings().encoder
        return Prompts(source, encoder, range(min(self.settings.samples, len(source))))


class RecordBest(Callback):
    """Callback that updates `best_checkpoint.json` after each evaluation.

    The checkpoint manager updates the file after each save, but the last evaluation of a run comes after the last save.
    This callback must come after `RunLog`, which writes the metrics.
    """

    def on_eval_end(self, context: CallbackContext) -> None:
        """Write `best_checkpoint.json`."""
        settings = context.state.cfg.checkpoint
        folder = Path(settings.save)
        with raise_on_all_ranks():
            if is_rank_zero():
                record_best(folder, settings.keep_best, saved_steps(folder))
