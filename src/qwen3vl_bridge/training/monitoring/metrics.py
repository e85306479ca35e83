"""Speed, utilisation and per-part metrics of a run, for its log.

What lives here: which metrics are computed, and when. What may not: counting microbatches (`batch_meter.py`), experts'
tokens (`expert_load.py`), dropped samples (`left_out.py`), FLOPs (`throughput.py`), where metrics are written
(`trackers.py`).
"""

from __future__ import annotations

import resource
import time

from qwen3vl_bridge.parallel.collectives import max_of_each, sum_amounts
from qwen3vl_bridge.training.monitoring.batch_meter import Amounts, meter_of
from qwen3vl_bridge.training.monitoring.expert_load import ExpertLoad
from qwen3vl_bridge.training.monitoring.learning_rates import PartRates
from qwen3vl_bridge.training.monitoring.left_out import LeftOut
from qwen3vl_bridge.training.monitoring.throughput import peak_operations, step_costs
from qwen3vl_bridge.training.monitoring.trackers import check_trackers, publish, step_of
from qwen3vl_bridge.training.optimizer.before_step import TOWER_NORMS

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model


class Metrics(Callback):
    """Computes metrics every `logger.log_interval` steps.

    Rates are means over these steps, without the time of evaluations and checkpoints. Metrics that do not depend on
    time are the step's own, so that they are equal in a resumed run. Only real tokens count, without padding; FLOPs are
    those that the model needs for them (`flops.TowerCosts`).

    Args:
        cfg: the run's configuration.

    Raises:
        ValueError: a requested tracker is not available.
    """

    def __init__(self, cfg: ConfigContainer) -> None:
        check_trackers(cfg)
        self.cfg = cfg
        self._interval, self._seconds, self._since = Amounts(), 0.0, None
        self._load: ExpertLoad | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Determine the cost of steps, and the device's peak."""
        self.cfg = context.state.cfg  # complete by now
        self._groups: ProcessGroupCollection = get_attr_wrapped_model(context.model[0], "pg_collection")
        self._costs = step_costs(self.cfg)
        on_gpu = torch.cuda.is_available()
        self._peak = peak_operations(torch.cuda.get_device_name()) if on_gpu else None
        self._rates = PartRates(context)
        self._left_out = LeftOut(self.cfg.dataset)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the clock; if this step's metrics are logged, read its learning rates and count experts' tokens."""
        if self._since is None:
            self._since = time.perf_counter()
        if (context.state.train_state.step + 1) % self.cfg.logger.log_interval:
            return
        self._lr_of_parts = self._rates.now(context.optimizer)
        if self.cfg.model.moe_layers:
            self._load = ExpertLoad(context.model)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Add the step; after the last one of an interval, publish its metrics."""
        step = meter_of(context.state).take()
        self._interval += step
        if step_of(context) % self.cfg.logger.log_interval:
            self._tick()
            return
        publish(context, self._figures(context, step))

    def on_eval_start(self, context: CallbackContext) -> None:
        """Stop the clock until the next step."""
        self._since = None

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Stop the clock until the next step; the time of the checkpoint is not counted."""
        self._since = None

    def _tick(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def _figures(self, context: CallbackContext, step: Amounts) -> dict[str, float]:
        meter, count = meter_of(context.state), Amounts.count()
        left_out = [*self._left_out.numbers(meter.newly_dropped), *self._left_out.numbers(meter.unreadable)]
        own = (*self._interval.values(), *step.values(), *left_out)
        sums = sum_amounts(own, self._groups)  # which also waits for the device
        self._tick()
        interval, step, lost = Amounts(*sums[:count]), Amounts(*sums[count : 2 * count]), sums[2 * count :]
        figures = {"tokens": step.tokens, "images": step.images, "video_frames": step.video_frames}
        figures |= {"filled": step.tokens / max(step.slots, 1)}
        memory, *dropped = max_of_each([_memory(), *self._left_out.numbers(meter.dropped)])
        newly_dropped, unreadable = lost[: len(dropped)], lost[len(dropped) :]
        figures |= self._speed(interval) | {"memory_gb": memory / 1e9}
        totals = self._left_out.figures([*map(sum, zip(dropped, newly_dropped, strict=True))], unreadable)
        if torch.distributed.get_rank() == 0:
            self._left_out.say(totals, step_of(context))
        figures |= totals
        figures |= self._lr_of_parts
        norms = context.user_state.get(TOWER_NORMS) or {}
        figures |= {f"grad_norm_{part}": float(norm) for part, norm in norms.items()}
        if self._load is not None:
            figures |= self._load.take(self.cfg)
            self._load = None
        self._interval, self._seconds = Amounts(), 0.0
        return figures

    def _speed(self, interval: Amounts) -> dict[str, float]:
        figures = {
            "tokens_per_second": interval.tokens / self._seconds,
            "images_per_second": interval.images / self._seconds,
        }
        if self._costs is not None:
            done = self._costs.of_many(
                tokens=interval.tokens,
                token_pairs=interval.token_pairs,
                patches=interval.patches,
                patch_pairs=interval.patch_pairs,
            )
            each = done / self._seconds / torch.distributed.get_world_size()
            figures["tflops_per_gpu"] = each / 1e12
            if self._peak is not None:
                figures["mfu"] = each / self._peak
        return figures


def _memory() -> float:
    """Bytes: the peak memory of tensors on this process's GPU, or of the process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
