"""The callbacks of a run, in the order in which the loop calls them; and accuracy on held-out conversations."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.data.dataset_provider import ConversationRows
from qwen3vl_bridge.data.questions import Question, questions
from qwen3vl_bridge.data.sources.opening import open_source
from qwen3vl_bridge.dist_train.joint_run import Modules
from qwen3vl_bridge.inference.generation import end_token_ids, generate, ranks_in_step
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.parallel.collectives import is_first, sum_counts
from qwen3vl_bridge.training import run_refusals
from qwen3vl_bridge.training.checkpoint_manager import check_script
from qwen3vl_bridge.training.config import AccuracyConfig, Qwen3VLConfigContainer
from qwen3vl_bridge.training.guard import StepGuard
from qwen3vl_bridge.training.metrics import Metrics
from qwen3vl_bridge.training.run_log import RunLog, publish

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.core.utils import get_attr_wrapped_model
from torch.nn.utils.rnn import pad_sequence

logger = logging.getLogger(__name__)

_BATCH_SIZE = 16  # prompts


def training_callbacks(cfg: ConfigContainer) -> list[Callback]:
    """The callbacks that implement a configuration: `finetune(cfg, forward_step, callbacks=training_callbacks(cfg))`.

    Raises:
        RuntimeError: this is a process that saving has started, which runs the script again.
        ValueError: an attribute that is no setting, data that are not there, or a processor that is out of reach.
    """
    check_script()
    check(run_refusals.BEFORE_RUN, cfg)
    return callbacks_of(cfg)


def callbacks_of(cfg: ConfigContainer) -> list[Callback]:
    """The same without a look at what a run needs on this machine, for one that only shows what it would do."""
    if isinstance(cfg, Qwen3VLConfigContainer):
        vars(cfg)["_has_callbacks"] = True
    callbacks: list[Callback] = [StepGuard()]  # its norms are in the metrics
    if cfg.model.dist_train.use_dist_train:
        callbacks.append(Modules())
    if not cfg.logger.skip_train_metrics_log:
        callbacks.append(Metrics())
    if isinstance(cfg, Qwen3VLConfigContainer) and cfg.accuracy.path is not None:
        callbacks.append(Accuracy(cfg))
    # With data of its own, Megatron-Bridge refuses num_epochs and callbacks of their kind.
    if cfg.train.num_epochs is None or isinstance(cfg.dataset, ConversationRows):
        callbacks += [FinishedRun(), UndisturbedGenerator()]
    if torch.cuda.is_available():
        callbacks.append(FirstCollection())
    return [*callbacks, RunLog()]


class FinishedRun(Callback):
    """Ends a run that is started again after its last step, as a scheduler does that requeues a job: the loop returns.

    Megatron-Bridge's samplers refuse to begin after their last sample, and its loop would validate and save once more.
    """

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Skip training and validation if the loaded checkpoint is the run's last."""
        cfg, state = context.state.cfg, context.state.train_state
        if state.step < cfg.train.train_iters:
            return
        if is_first():
            logger.warning(
                "the run is complete: %s is at step %d, and train.train_iters is %d. Nothing is trained. To train "
                "longer, raise train.train_iters and set scheduler.override_opt_param_scheduler=true; a new run needs "
                "another folder",
                *(cfg.checkpoint.load, state.step, cfg.train.train_iters),
            )
        state.consumed_train_samples = 0
        cfg.validation.skip_train, cfg.validation.eval_iters = True, 0


class UndisturbedGenerator(Callback):
    """Keeps the restored random state of a resumed run: torch draws a seed for each new data loader after that."""

    _state: torch.Tensor | None = None

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Save the state."""
        self._state = torch.get_rng_state()

    def on_train_start(self, context: CallbackContext) -> None:
        """Restore it."""
        if self._state is not None:  # a script with its own set-up does not call `on_data_init_start`
            torch.set_rng_state(self._state)


class FirstCollection(Callback):
    """Frees what compiling and tuning kernels leave in cycles in the first step, GPU memory among it.

    Recipes collect every `train.manual_gc_interval` steps. Measured on the fake GPU: 1.5 GiB in Qwen3.5-9B.
    """

    _done = False

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Collect once."""
        if not self._done:
            gc.collect()
        self._done = True


class Accuracy(Callback):
    """Generates answers at each evaluation; the fraction of correct ones is `accuracy`.

    Data-parallel ranks have different prompts. If they share experts, or parameters under Megatron-FSDP, they must
    decode together, so every rank generates all answers.
    """

    def __init__(self, cfg: ConfigContainer) -> None:
        self.settings: AccuracyConfig = cfg.accuracy
        self.rows: ConversationRows = cfg.dataset
        self._questions: list[Question] | None = None

    def on_eval_end(self, context: CallbackContext) -> None:
        """Generate and log."""
        groups = get_attr_wrapped_model(context.model[0], "pg_collection")
        shared = ranks_in_step(context.model) is not None
        rank, ranks = (0, 1) if shared else (groups.dp.rank(), groups.dp.size())
        if self._questions is None:
            self._questions = self.read()[rank::ranks]
        counts = torch.tensor(self.ask(context.model), device=next(context.model[0].parameters()).device)
        right, asked = (counts if shared else sum_counts(counts, groups.dp)).tolist()
        publish(context, {"accuracy": right / max(asked, 1)})

    def read(self) -> list[Question]:
        """All ranks' prompts, read as the run's rows are."""
        source = open_source(
            self.settings.path,
            getattr(self.rows, "media_root", None),
            addresses=self.rows.downloaded() if hasattr(self.rows, "downloaded") else None,
            schema_adapter=getattr(self.rows, "schema_adapter", None),
            columns=getattr(self.rows, "columns", None),
        )
        return questions(source, self.rows, self.settings.samples)

    def ask(self, model: Sequence[torch.nn.Module]) -> list[int]:
        """Generate the answers to this rank's prompts; returns the number of correct answers, and of prompts."""
        asked = self._questions or []
        right, tokenizer = 0, self.rows.checkpoint().encoder.processor.tokenizer
        device = next(model[0].parameters()).device
        settings = dict(max_new_tokens=self.settings.max_new_tokens, eos_token_id=end_token_ids(list(model), tokenizer))
        for first in range(0, len(asked), _BATCH_SIZE):
            batch = asked[first : first + _BATCH_SIZE]
            prompts = _collate(batch, device)
            sequences = generate(list(model), **prompts, **settings)
            texts = tokenizer.batch_decode(sequences[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
            for question, text in zip(batch, texts, strict=True):
                expected, answer = question.answer.strip(), question.answer_in(text).strip()
                is_right = answer == expected if self.settings.metric == "exact" else expected in answer
                right += is_right
                if not is_right:
                    logger.info("%s: expected %r, the model answered %r", question.sample_id, question.answer, text)
        return [right, len(asked)]


def _collate(batch: Sequence[Question], device: torch.device) -> dict[str, Any]:
    """Prompts as rows with padding at the end, and the images of all of them in order."""
    prompts = [question.prompt.input_ids for question in batch]
    rows: dict[str, Any] = {
        "input_ids": pad_sequence(prompts, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True),
    }
    for name in sorted({name for question in batch for name in question.pictures}):
        rows[name] = torch.cat([question.pictures[name] for question in batch if name in question.pictures])
    return {name: value.to(device) for name, value in rows.items()}
