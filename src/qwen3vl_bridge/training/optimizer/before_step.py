"""The hook between a step's gradients and the optimizer, in Megatron-Bridge's loop.

What lives here: what happens there, once per step: losses and gradient norms of all ranks, delayed unfreezing, and
skipping a step or ending the run if the guard decides so. What may not: the guard's rules (`step_guard.py`), norms
(`gradient_norms.py`), frozen parts (`delayed_unfreezing.py`).

The loop has no callback there. megatron-core's optimizers prepare gradients, compute their norm, and then step, in a
method that can also report that nothing was stepped; the hook wraps the first and the last of these methods. The sums
are started in the first and read in the last, when megatron-core has waited for its norm (with Transformer Engine it
has not, and the guard waits once per step). Without a guard they are read after the step.
"""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path

from qwen3vl_bridge.batch.device_transfer import HostCopy
from qwen3vl_bridge.parallel.collectives import broadcast_object, gather_objects, sum_over_ranks
from qwen3vl_bridge.training.metrics_file import read_metrics
from qwen3vl_bridge.training.monitoring.trackers import MEASURED
from qwen3vl_bridge.training.optimizer.delayed_unfreezing import DelayedUnfreezing
from qwen3vl_bridge.training.optimizer.gradient_norms import PartSquares, parts_of_parameters
from qwen3vl_bridge.training.optimizer.loss_recorder import start_recording, stop_recording
from qwen3vl_bridge.training.optimizer.step_guard import Guard, SpoiltStepError, latest_losses
from qwen3vl_bridge.training.optimizer.tower_settings import Qwen3VLTowers, check_towers
from qwen3vl_bridge.weights.model_parts import Part

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.core.utils import get_attr_wrapped_model

logger = logging.getLogger(__name__)

# Key of each part's gradient norm, by its name, in `context.user_state`.
TOWER_NORMS = "tower_norms"
# Key of the (sum of losses, tokens) of a step over all ranks.
STEP_LOSS = "step_loss"


class BeforeStep(Callback):
    """Implements `cfg.guard` and the schedules of `Qwen3VLTowers`, and computes the parts' gradient norms.

    Norms are before clipping, in `context.user_state["tower_norms"]` and in the log as `grad_norm_language_model` and
    so on. A step costs one small all-reduce over all ranks.
    """

    def on_train_start(self, context: CallbackContext) -> None:
        """Wrap the optimizer's methods.

        Raises:
            ValueError: settings that contradict each other, or that are not supported here.
        """
        cfg, optimizer = context.state.cfg, context.optimizer
        _check_settings(cfg)
        towers = cfg.optimizer_config_override_provider
        parts = parts_of_parameters(context.model, optimizer)
        frozen = towers.frozen_updates() if isinstance(towers, Qwen3VLTowers) else {}
        self._unfreezing = DelayedUnfreezing(optimizer, parts, frozen)
        self._groups = get_attr_wrapped_model(context.model[0], "pg_collection")
        self._squares = PartSquares(optimizer, parts, self._groups)
        self._guard = _guard(cfg, context.state.train_state.step)
        self._state, self._recorder = context.state, start_recording(context.state)
        self._norms: dict[str, float] = {}
        self._loss = (0.0, 0.0)
        self._figures: HostCopy | None = None
        self._device = next(context.model[0].parameters()).device
        self._prepare, optimizer.prepare_grads = optimizer.prepare_grads, self._prepare_and_sum
        self._step_ready, optimizer.step_with_ready_grads = optimizer.step_with_ready_grads, self._step_ready_if_good
        self._step, optimizer.step = optimizer.step, self._step_in_parts

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Clear the previous step's microbatches."""
        self._recorder.microbatches.clear()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Store the norms for other callbacks."""
        self._recorder.microbatches.clear()
        self._read()
        context.user_state[TOWER_NORMS], context.user_state[STEP_LOSS] = dict(self._norms), self._loss
        measured = context.user_state.setdefault(MEASURED, {})
        measured |= {f"grad_norm_{part}": norm for part, norm in self._norms.items()}

    def on_train_end(self, context: CallbackContext) -> None:
        """Restore the optimizer's own methods."""
        del context.optimizer.prepare_grads, context.optimizer.step_with_ready_grads, context.optimizer.step
        stop_recording(context.state)

    def _prepare_and_sum(self) -> bool:
        """Like the optimizer's `prepare_grads`; also starts one sum of losses and norms over all ranks."""
        overflow = self._prepare()  # of a scaled loss; megatron-core skips the step by itself
        self._unfreezing.drop_frozen_gradients()
        squares, sums = self._squares.of_this_rank(), self._recorder.sums(self._device)
        if self._groups.tp.rank():  # tensor-parallel ranks have the same losses
            sums = torch.zeros_like(sums)
        seen = torch.full((1,), len(self._recorder.microbatches), dtype=torch.float64, device=self._device)
        self._figures = HostCopy(sum_over_ranks(torch.cat([squares.to(self._device), sums, seen])))
        if overflow:
            self._judge(overflow=True)
            return True
        self._unfreezing.before()
        return False

    def _step_ready_if_good(self) -> bool:
        """Like the optimizer's `step_with_ready_grads`, unless the step is skipped."""
        return self._judge(overflow=False) and self._step_ready()

    def _judge(self, *, overflow: bool) -> bool:
        """Whether the guard allows the step; raises SpoiltStepError if the run is to end."""
        if self._guard is None:
            return True
        microbatches = self._read()
        if not microbatches:
            raise ValueError("cfg.guard has seen no losses: expected the forward step of qwen3vl_bridge")
        loss, tokens = self._loss
        norm = 0.0 if overflow else self._norm()
        finding = self._guard.judge(loss / tokens if tokens else None, norm)
        if finding is None:
            return True
        samples = self._recorder.samples(self._groups) if self._groups.tp.rank() == 0 else []
        message = finding.message(self._state.train_state.step + 1, itertools.chain(*gather_objects(samples)))
        if finding.action == "stop":
            raise SpoiltStepError(message)
        if torch.distributed.get_rank() == 0:
            logger.warning(message)
        return False

    def _read(self) -> float:
        """Read the sums of losses and norms; returns the number of microbatches."""
        if self._figures is None:
            return 0
        *by_part, loss, tokens, microbatches = self._figures.tolist()
        self._figures, self._loss = None, (loss, tokens)
        self._norms = {part.value: math.sqrt(square) for part, square in zip(Part, by_part, strict=True)}
        return microbatches

    def _norm(self) -> float:
        return math.sqrt(sum(norm**2 for norm in self._norms.values()))

    def _step_in_parts(self) -> tuple[bool, float | None, int | None]:
        """Like the optimizer's `step`; a skipped step has a norm too."""
        updated, norm, zeros = False, None, None
        try:
            updated, norm, zeros = self._step()
        finally:
            self._unfreezing.after(updated=updated)
        if norm is None:
            self._read()
            norm = self._norm()
        return updated, norm, zeros


def _check_settings(cfg: ConfigContainer) -> None:
    check_towers(cfg)
    if cfg.optimizer.optimizer_cuda_graph:
        raise ValueError("optimizer.optimizer_cuda_graph is True: expected False, or no step could be skipped")


def _guard(cfg: ConfigContainer, step: int) -> Guard | None:
    """The guard, which continues from the losses in a resumed run's log."""
    settings = getattr(cfg, "guard", None)
    if settings is None:
        return None
    latest = []
    if step and cfg.checkpoint.save and torch.distributed.get_rank() == 0:
        latest = latest_losses(read_metrics(Path(cfg.checkpoint.save)), step, settings.spike_window)
    return Guard(settings, broadcast_object(latest))
