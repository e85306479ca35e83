"""Check losses and gradient norms of all ranks before the optimizer steps, and skip the step or stop the run.

Megatron-Bridge's loop calls no callback between backward pass and optimizer step. So `StepGuard` wraps two methods of
megatron-core's optimizer. `prepare_grads` starts a sum of losses and squared norms over all ranks.
`step_with_ready_grads` reads the sum, and steps or reports a skipped step. Between both, megatron-core synchronizes to
read its own norm. With Transformer Engine it does not, so that the guard adds one synchronization per step. Without a
guard the sums are read after the step.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import broadcast_object, gather_objects, sum_over_ranks
from qwen3vl_bridge.core.device_transfer import HostCopy
from qwen3vl_bridge.core.layout import SequenceLayout, token_index
from qwen3vl_bridge.dist_train.joint_run import lacks_joint_gradients
from qwen3vl_bridge.training import run_validation
from qwen3vl_bridge.training.objective_settings import objective_of
from qwen3vl_bridge.training.retrieval import RetrievalLoss
from qwen3vl_bridge.training.run_log import COMPONENT_NORMS, MEASURED, STEP_LOSS, read_metrics
from qwen3vl_bridge.upstream.gradient_norm import gradients_for_norm
from qwen3vl_bridge.weights.rows import Component, component_of

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.state import GlobalState
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

if TYPE_CHECKING:
    from qwen3vl_bridge.training.config import Action, GuardConfig

logger = logging.getLogger(__name__)

_RECORDED = "qwen3vl_losses"
_MAX_NAMES = 10  # samples in a message


class StepGuard(Callback):
    """Callback that implements `cfg.guard` and computes the gradient norm of each component of the model.

    Norms are computed before clipping, and logged as `grad_norm_language_model`, `grad_norm_vision_model` and
    `grad_norm_vision_projection`. Each step adds one small all-reduce over all ranks.
    """

    def on_train_start(self, context: CallbackContext) -> None:
        """Validate the settings, and wrap two methods of the optimizer to check losses and gradient norms.

        The methods are `prepare_grads` and `step_with_ready_grads`.

        Raises:
            ValueError: settings contradict each other, or nothing would be trained.
        """
        cfg, optimizer = context.state.cfg, context.optimizer
        run_checks((*run_validation.RUN_CAN_START, *run_validation.ON_THIS_MACHINE), cfg)
        _check_anything_trained(context)
        if hasattr(context.state, _RECORDED):
            raise ValueError("the callbacks of training_callbacks(cfg) were passed twice, expected once")
        self._groups = get_attr_wrapped_model(context.model[0], "pg_collection")
        self._grad_norms = GradNormsByComponent(context.model, optimizer, self._groups)
        self._guard = None
        if (settings := getattr(cfg, "guard", None)) is not None:
            latest, step = [], context.state.train_state.step
            if (
                step and cfg.checkpoint.save and torch.distributed.get_rank() == 0
            ):  # resumed: read the losses from the log
                latest = latest_losses(read_metrics(Path(cfg.checkpoint.save)), step, settings.spike_window)
            self._guard = Guard(settings, broadcast_object(latest))
        self._state = context.state
        self._microbatches: list[Microbatch] = []  # of the current step, on ranks that compute losses
        setattr(context.state, _RECORDED, self._microbatches)
        self._norms: dict[str, float] = {}
        self._loss = (0.0, 0.0)
        objective = objective_of(cfg)
        # Sum and number of the values of each metric.
        self._metrics = dict.fromkeys(objective.metrics if objective else (), (0.0, 0.0))
        self._sums_of_step: HostCopy | None = None
        self._device = next(context.model[0].parameters()).device
        self._prepare, optimizer.prepare_grads = optimizer.prepare_grads, self._prepare_and_sum
        self._step_ready, optimizer.step_with_ready_grads = optimizer.step_with_ready_grads, self._step_ready_if_good

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Store the step's gradient norms and loss in `context.user_state`, for other callbacks."""
        self._microbatches.clear()
        self._read()
        context.user_state[COMPONENT_NORMS], context.user_state[STEP_LOSS] = dict(self._norms), self._loss
        measured = context.user_state.setdefault(MEASURED, {})
        measured |= {f"grad_norm_{part}": norm for part, norm in self._norms.items()}
        measured |= {name: value / number for name, (value, number) in self._metrics.items() if number}

    def on_train_end(self, context: CallbackContext) -> None:
        """Remove the wrappers of the optimizer's methods."""
        del context.optimizer.prepare_grads, context.optimizer.step_with_ready_grads
        delattr(context.state, _RECORDED)

    def _prepare_and_sum(self) -> bool:
        """Prepare gradients and start to sum losses and norms over all ranks. Replaces `prepare_grads`."""
        overflow = self._prepare()  # True only with loss scaling; megatron-core skips the step by itself
        squares = self._grad_norms.local_squares()
        sums = torch.zeros(2 + 2 * len(self._metrics), dtype=torch.float64, device=self._device)
        if self._microbatches and not self._groups.tp.rank():  # tensor-parallel ranks have the same losses
            sums = torch.stack([microbatch.sums for microbatch in self._microbatches]).double().sum(0)
        seen = torch.full((1,), len(self._microbatches), dtype=torch.float64, device=self._device)
        self._sums_of_step = HostCopy(sum_over_ranks(torch.cat([squares.to(self._device), sums, seen])))
        if overflow:
            self._accepts_step(overflow=True)
        return overflow

    def _step_ready_if_good(self) -> bool:
        """Step the optimizer unless the guard rejects the step. Replaces `step_with_ready_grads`."""
        return self._accepts_step(overflow=False) and self._step_ready()

    def _accepts_step(self, *, overflow: bool) -> bool:
        """Return True if the guard accepts the step.

        Raises:
            BadStepError: The guard rejects the step, and `on_nan` or `on_spike` is "stop" for this problem.
            ValueError: The guard is on, but the forward step recorded no losses.
        """
        if self._guard is None:
            return True
        if not self._read():
            raise ValueError("cfg.guard is set, but no losses were recorded. Use qwen3vl_bridge.forward_step.")
        loss, tokens = self._loss
        finding = self._guard.check_step(
            loss / tokens if tokens else None, 0.0 if overflow else math.hypot(*self._norms.values())
        )
        if finding is None:
            return True
        samples = []
        if self._groups.tp.rank() == 0:
            for i, microbatch in enumerate(self._microbatches):
                samples += microbatch.sample_losses(i, self._groups)
        message = finding.message(self._state.train_state.step + 1, itertools.chain(*gather_objects(samples)))
        if finding.action == "stop":
            raise BadStepError(message)
        if torch.distributed.get_rank() == 0:
            logger.warning(message)
        return False

    def _read(self) -> float:
        """Read the sums of losses and squared norms of this step.

        Returns:
            The number of microbatches that all ranks have recorded; 0 if the sums have been read already.
        """
        if self._sums_of_step is None:
            return 0
        sums = iter(self._sums_of_step.tolist())
        by_part = list(itertools.islice(sums, len(Component)))
        loss, tokens, *metrics, microbatches = sums
        self._sums_of_step, self._loss = None, (loss, tokens)
        self._metrics = dict(zip(self._metrics, itertools.batched(metrics, 2), strict=True))
        self._norms = {component.value: math.sqrt(square) for component, square in zip(Component, by_part, strict=True)}
        return microbatches


def _check_anything_trained(context: CallbackContext) -> None:
    """Raise ValueError if no rank has a parameter to train. All ranks must call this together."""
    if any(gather_objects(any(p.requires_grad for chunk in context.model for p in chunk.parameters()))):
        return
    if (peft := context.state.cfg.peft) is None:
        advice = "set model.freeze_language_model, freeze_vision_model or freeze_vision_projection to False"
    else:
        advice = f"change peft so that it matches a layer of the model; found {peft}"
    raise ValueError(f"nothing would be trained: no parameter of the model requires a gradient; {advice}")


class BadStepError(ValueError):
    """Raised for a step with a bad loss or gradient, before the weights change."""


class Guard:
    """Checks the loss and the gradient norm of each step, with the same result on all ranks.

    `latest` contains the losses of previous steps, oldest first.
    """

    def __init__(self, settings: GuardConfig, latest: Sequence[float] = ()) -> None:
        self.settings = settings
        self.latest = deque(latest, maxlen=settings.spike_window)

    def check_step(self, loss: float | None, gradient_norm: float) -> Finding | None:
        """Return the problem of a step, or None if loss and gradient norm are good. Add a finite loss to `latest`.

        Args:
            loss: mean loss of the step; None if the step has no trained tokens.
            gradient_norm: norm of the gradient of all components.
        """
        settings, known, limit = self.settings, len(self.latest), math.inf
        if 2 * known >= settings.spike_window:
            limit = settings.spike_factor * statistics.median(self.latest)
        if loss is not None and math.isfinite(loss):
            self.latest.append(loss)
        if loss is not None and not math.isfinite(loss):
            problem = f"the loss is {loss}, expected a finite value"
            return Finding(settings.on_nan, problem, "guard.on_nan", lambda mean: not math.isfinite(mean))
        if not math.isfinite(gradient_norm):
            problem = f"the loss is {loss}, but the gradient norm is {gradient_norm}, expected a finite value"
            return Finding(settings.on_nan, problem, "guard.on_nan")
        if settings.on_spike is not None and loss is not None and loss > limit:
            problem = (
                f"the loss is {loss:.6g}, expected at most {limit:.6g}: {settings.spike_factor:g} times the "
                f"median of the latest {known} losses"
            )
            return Finding(settings.on_spike, problem, "guard.on_spike", lambda mean: mean > limit)
        return None


class Finding(NamedTuple):
    """A problem of a step, and the action that `GuardConfig` prescribes for it."""

    action: Action
    problem: str
    setting: str
    # Returns True for the mean loss of a sample that causes the problem; None if losses do not identify such samples.
    is_responsible: Callable[[float], bool] | None = None

    def message(self, step: int, samples: Iterable[SampleLoss]) -> str:
        """Return the error or log message for a step; `samples` are the samples of all ranks in this step."""
        means = _mean_losses(samples)
        shown, head = [], "samples responsible, with their mean loss"
        if self.is_responsible is not None:
            shown = [(name, mean) for name, mean in means if self.is_responsible(mean)]
        if not shown:
            shown, head = means, "the losses do not identify a sample; samples of the step, highest mean loss first"
        names = ", ".join(f"{name} ({mean:.4g})" for name, mean in shown[:_MAX_NAMES])
        more = f" and {len(shown) - _MAX_NAMES} more" if len(shown) > _MAX_NAMES else ""
        done = "the step is skipped" if self.action == "skip" else "stopped before the weights changed"
        return f"step {step}: {self.problem}; {done} ({self.setting}={self.action}); {head}: {names or 'none'}{more}"


def _mean_losses(samples: Iterable[SampleLoss]) -> list[tuple[str, float]]:
    """Return (name, mean loss) of each sample: losses that are not finite first, then from high to low."""
    names, sums = {}, {}
    for sample in samples:  # several context-parallel ranks may have tokens of one sample
        loss, tokens = sums.get(sample.segment, (0.0, 0.0))
        names[sample.segment], sums[sample.segment] = sample.name, (loss + sample.loss, tokens + sample.tokens)
    means = [(names[segment], loss / max(tokens, 1.0)) for segment, (loss, tokens) in sorted(sums.items())]
    return sorted(means, key=lambda entry: (math.isfinite(entry[1]), -entry[1] if math.isfinite(entry[1]) else 0.0))


def latest_losses(entries: Iterable[Mapping[str, Any]], step: int, window: int) -> list[float]:
    """Return the losses of the last `window` steps up to `step`; `entries` are the entries of the run's log."""
    losses = [
        entry["loss"]
        for entry in entries
        if entry.get("step", math.inf) <= step and entry.get("loss") is not None and entry.get("trained_tokens", 1)
    ]
    return losses[-window:]


class SampleLoss(NamedTuple):
    """The part of a sample's loss that one rank has computed."""

    segment: tuple[int, int, int]  # data-parallel rank, microbatch, segment: the same on all context-parallel ranks
    name: str
    loss: float  # sum over trained tokens
    tokens: float  # number of tokens in the sum


@dataclass(frozen=True)
class Microbatch:
    """The losses of one microbatch on this rank; they stay on the device until they are read."""

    losses: Tensor  # [b, s] float32, per token
    mask: Tensor  # [b, s] float32, 1 where the loss counts
    sums: Tensor  # float32: sum of the counted losses, their number, and sums of the objective's metrics
    layout: SequenceLayout  # of the complete batch, on the host
    sample_ids: tuple[str, ...]  # of the segments, if known

    def sample_losses(self, number: int, groups: ProcessGroupCollection) -> list[SampleLoss]:
        """Return this rank's part of the loss of each sample; `number` is the index of this microbatch in its step.

        Synchronizes with the device.
        """
        layout, rank = self.layout, groups.dp.rank()
        index = token_index(layout, groups.cp.size(), groups.cp.rank()).T.flatten()
        segment = layout.segment_ids()[index]
        counted = torch.stack((self.losses.float() * self.mask, self.mask), -1).view(-1, 2).double().cpu()
        sums = torch.zeros(len(layout.lengths), 2, dtype=torch.float64).index_add_(0, segment, counted)
        names = dict(enumerate(self.sample_ids))
        return [
            SampleLoss(
                (rank, number, i),
                names.get(i, f"segment {i} of microbatch {number} on data-parallel rank {rank}"),
                *sums[i].tolist(),
            )
            for i, length in enumerate(layout.lengths)
            if length
        ]


def record_losses(count: Callable, state: GlobalState, batch: TokenBatch, mask: Tensor) -> Callable:
    """Return a loss function that calls `count` and also records the losses of a training microbatch for `StepGuard`.

    If no `StepGuard` has started, `count` is returned unchanged.

    Args:
        count: loss function, from losses [rows, tokens] to (sum, number of tokens, values to report).
        mask: this rank's part of the loss mask [rows, tokens], on the device.

    Raises:
        ValueError: The configuration has settings that only this package's callbacks carry out, but training was
            started without these callbacks.
    """
    microbatches: list[Microbatch] | None = getattr(state, _RECORDED, None)
    if microbatches is None:
        settings = {
            "model.dist_train.use_dist_train": lacks_joint_gradients(state.cfg.model),
            "guard": getattr(state.cfg, "guard", None) is not None,
        }
        if ignored := [name for name, is_set in settings.items() if is_set]:
            raise ValueError(
                f"{' and '.join(ignored)} would be ignored, because no callbacks have started: call "
                "finetune(cfg, qwen3vl_bridge.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))"
            )
        return count

    objective = objective_of(state.cfg)

    def count_and_record(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        counted = count(losses)
        report = counted[2]
        sums = report.get("total loss", report["lm loss"])  # distillation reports a "total loss"
        if objective is not None:
            sums = torch.cat((sums, *(report[name] for name in objective.metrics)))
        if isinstance(count, RetrievalLoss):  # its argument is not the losses of tokens
            of_tokens = count.token_losses
        else:  # a copy: on CUDA megatron-core's combined schedule frees the losses after the backward pass
            of_tokens = losses.detach().clone()
        microbatches.append(Microbatch(of_tokens, mask, sums, batch.layout, batch.sample_ids))
        return counted

    return count_and_record


class GradNormsByComponent:
    """Computes the gradient norm of each component of the model.

    The norm is taken over the tensors that the optimizer updates: parameters or their float32 copies. A distributed
    optimizer updates only this rank's shards. A gradient that several ranks store is counted once.

    Args:
        model: this rank's chunks, as given to the optimizer.

    Raises:
        ValueError: The optimizer updates a tensor that belongs to no parameter of the model.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, groups: ProcessGroupCollection
    ) -> None:
        ranks = groups.tp_dp_cp.size() * groups.pp.size()  # all ranks, or those of this rank's module
        named = [(component_of(name), p) for chunk in model for name, p in chunk.named_parameters()]
        self._sums = []
        for member in optimizers_of(optimizer):
            stepped = member.get_parameters()
            parts = {tensor: part for part, p in named for tensor in _stepped_tensors(member, p)}
            if missing := set(stepped) - parts.keys():
                raise ValueError(
                    f"the optimizer updates {len(missing)} tensors that belong to no parameter of the model, "
                    f"expected none: found shapes {sorted({tuple(tensor.shape) for tensor in missing})[:8]}"
                )
            group = member.get_grad_stats_parallel_group()
            # Each rank of the group has a part of the squared norm, and every such group computes the same sum. The sum
            # over all ranks would count it once per group.
            share = 1.0 if group is None else group.size() / ranks
            self._sums.append(
                (member, share, [[p for p in stepped if parts[p] is component] for component in Component])
            )

    @torch.no_grad()
    def local_squares(self) -> Tensor:
        """Return this rank's share of the squared norm of each component; the sum over ranks is the squared norm.

        Call this after the optimizer's `prepare_grads`.

        Returns:
            A float64 tensor [components], on the device of the gradients.
        """
        totals = []
        for member, share, by_part in self._sums:
            gradients = [gradients_for_norm(member, parameters) for parameters in by_part]
            norms = [torch.nn.utils.get_total_norm(some) if some else None for some in gradients]
            if known := [norm for norm in norms if norm is not None]:
                zero = torch.zeros_like(known[0])
                squares = torch.stack([zero if norm is None else norm for norm in norms]).double().square()
                totals.append(share * squares)
        return torch.stack(totals).sum(0) if totals else torch.zeros(len(Component), dtype=torch.float64)


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return a chained optimizer's members that have parameters, or a list of only `optimizer` if it is not chained."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in chain if not getattr(member, "is_stub_optimizer", False)]


def _stepped_tensors(optimizer: MegatronOptimizer, parameter: Tensor) -> Iterator[Tensor]:
    """Yield a parameter, and its float32 copy or shard if the optimizer may update that instead."""
    yield parameter
    if getattr(parameter, "main_param", None) is not None:
        yield parameter.main_param
    shards = getattr(optimizer, "model_param_group_index_map", {})
    if parameter in shards:
        group, index = shards[parameter]
        yield optimizer.param_groups[group]["params"][index]
