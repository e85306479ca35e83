"""What happens between a step's gradients and the optimizer: losses and norms of all ranks, and the guard's decision.

The loop has no callback there. megatron-core's optimizers prepare gradients, compute their norm, and then step, in a
method that can also report that nothing was stepped; `StepGuard` wraps the first and the last of these methods. Sums
over ranks are started in the first and read in the last, when megatron-core has waited for its norm (with Transformer
Engine it has not, and the guard waits once per step). Without a guard they are read after the step.
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

from qwen3vl_bridge.batch import SequenceLayout, TokenBatch, token_index
from qwen3vl_bridge.batch.device_transfer import HostCopy
from qwen3vl_bridge.dist_train.joint_run import is_split_unjoined
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.parallel.collectives import broadcast_object, gather_objects, sum_over_ranks
from qwen3vl_bridge.training import run_refusals
from qwen3vl_bridge.training.run_log import MEASURED, PART_NORMS, STEP_LOSS, read_metrics
from qwen3vl_bridge.weights.rows import Part, part_of

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
_NAMED = 10  # samples in a message


class StepGuard(Callback):
    """Implements `cfg.guard`, and computes the gradient norms of the model's parts.

    Norms are before clipping, in `context.user_state["part_norms"]` and in the log as `grad_norm_language_model` and
    so on. A step costs one small all-reduce over all ranks.
    """

    def on_train_start(self, context: CallbackContext) -> None:
        """Wrap the optimizer's methods; raises ValueError for settings that contradict each other."""
        cfg, optimizer = context.state.cfg, context.optimizer
        check((*run_refusals.ON_TRAIN_START, *run_refusals.ON_THIS_MACHINE), cfg)
        _expect_trained(context)
        if hasattr(context.state, _RECORDED):
            raise ValueError("the callbacks of training_callbacks(cfg) were given twice, expected once")
        self._groups = get_attr_wrapped_model(context.model[0], "pg_collection")
        self._squares = PartSquares(context.model, optimizer, self._groups)
        self._guard = None
        if (settings := getattr(cfg, "guard", None)) is not None:
            latest, step = [], context.state.train_state.step
            if step and cfg.checkpoint.save and torch.distributed.get_rank() == 0:  # a resumed run: from its log
                latest = latest_losses(read_metrics(Path(cfg.checkpoint.save)), step, settings.spike_window)
            self._guard = Guard(settings, broadcast_object(latest))
        self._state = context.state
        self._microbatches: list[Microbatch] = []  # of the current step, on ranks that compute losses
        setattr(context.state, _RECORDED, self._microbatches)
        self._norms: dict[str, float] = {}
        self._loss = (0.0, 0.0)
        self._figures: HostCopy | None = None
        self._device = next(context.model[0].parameters()).device
        self._prepare, optimizer.prepare_grads = optimizer.prepare_grads, self._prepare_and_sum
        self._step_ready, optimizer.step_with_ready_grads = optimizer.step_with_ready_grads, self._step_ready_if_good

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Store the norms for other callbacks."""
        self._microbatches.clear()
        self._read()
        context.user_state[PART_NORMS], context.user_state[STEP_LOSS] = dict(self._norms), self._loss
        measured = context.user_state.setdefault(MEASURED, {})
        measured |= {f"grad_norm_{part}": norm for part, norm in self._norms.items()}

    def on_train_end(self, context: CallbackContext) -> None:
        """Restore the optimizer's own methods."""
        del context.optimizer.prepare_grads, context.optimizer.step_with_ready_grads
        delattr(context.state, _RECORDED)

    def _prepare_and_sum(self) -> bool:
        """Like the optimizer's `prepare_grads`; also starts one sum of losses and norms over all ranks."""
        overflow = self._prepare()  # of a scaled loss; megatron-core skips the step by itself
        squares, sums = self._squares.of_this_rank(), torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._microbatches and not self._groups.tp.rank():  # tensor-parallel ranks have the same losses
            sums = torch.stack([microbatch.sums for microbatch in self._microbatches]).double().sum(0)
        seen = torch.full((1,), len(self._microbatches), dtype=torch.float64, device=self._device)
        self._figures = HostCopy(sum_over_ranks(torch.cat([squares.to(self._device), sums, seen])))
        if overflow:
            self._judge(overflow=True)
        return overflow

    def _step_ready_if_good(self) -> bool:
        """Like the optimizer's `step_with_ready_grads`, unless the step is skipped."""
        return self._judge(overflow=False) and self._step_ready()

    def _judge(self, *, overflow: bool) -> bool:
        """Whether the guard allows the step; raises SpoiltStepError if the run is to end."""
        if self._guard is None:
            return True
        if not self._read():
            raise ValueError("cfg.guard has seen no losses: expected the forward step of qwen3vl_bridge")
        loss, tokens = self._loss
        finding = self._guard.judge(
            loss / tokens if tokens else None, 0.0 if overflow else math.hypot(*self._norms.values())
        )
        if finding is None:
            return True
        samples = []
        if self._groups.tp.rank() == 0:
            for i, microbatch in enumerate(self._microbatches):
                samples += microbatch.samples(i, self._groups)
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


def _expect_trained(context: CallbackContext) -> None:
    """Refuse a model of which no rank trains a parameter, whose run would save what it was given. A collective call."""
    if any(gather_objects(any(p.requires_grad for chunk in context.model for p in chunk.parameters()))):
        return
    if (peft := context.state.cfg.peft) is None:
        expected = "one of model.freeze_language_model, freeze_vision_model and freeze_vision_projection False"
    else:
        expected = f"a peft that adapts some layer, unlike {peft}"
    raise ValueError(f"nothing would be trained: no parameter of the model requires a gradient; expected {expected}")


class SpoiltStepError(ValueError):
    """Raised for a step that would have ruined the weights; the weights are unchanged."""


class Guard:
    """Judges consecutive steps, with the same result on all ranks; `latest` are the losses of the previous ones."""

    def __init__(self, settings: GuardConfig, latest: Sequence[float] = ()) -> None:
        self.settings = settings
        self.latest = deque(latest, maxlen=settings.spike_window)

    def judge(self, loss: float | None, gradient_norm: float) -> Finding | None:
        """What is wrong with a step by its mean loss (None without tokens) and its gradient norm, or None.

        Its loss is added to the recent ones, that of a spike too, skipped or not: if losses have risen permanently,
        they are accepted after half a window.
        """
        settings, known, limit = self.settings, len(self.latest), math.inf
        if 2 * known >= settings.spike_window:
            limit = settings.spike_factor * statistics.median(self.latest)
        if loss is not None and math.isfinite(loss):
            self.latest.append(loss)
        if loss is not None and not math.isfinite(loss):
            what = f"the loss is {loss}, expected a finite one"
            return Finding(settings.on_nan, what, "guard.on_nan", lambda mean: not math.isfinite(mean))
        if not math.isfinite(gradient_norm):
            what = f"the loss is {loss}, but its gradient norm is {gradient_norm}, expected a finite one"
            return Finding(settings.on_nan, what, "guard.on_nan")
        if settings.on_spike is not None and loss is not None and loss > limit:
            what = (
                f"the loss is {loss:.6g}, expected at most {limit:.6g}: {settings.spike_factor:g} times the "
                f"median of the latest {known}"
            )
            return Finding(settings.on_spike, what, "guard.on_spike", lambda mean: mean > limit)
        return None


class Finding(NamedTuple):
    """What is wrong with a step, and what the setting says to do about it."""

    action: Action
    what: str
    setting: str
    to_blame: Callable[[float], bool] | None = None  # a sample by its mean loss; None if losses do not show it

    def message(self, step: int, samples: Iterable[SampleLoss]) -> str:
        """The message of the error, or of the log, for a step with these samples of all ranks."""
        means = _mean_losses(samples)
        blamed, head = [], "samples responsible, with their mean loss"
        if self.to_blame is not None:
            blamed = [(name, mean) for name, mean in means if self.to_blame(mean)]
        if not blamed:
            blamed, head = means, "the losses do not identify a sample; samples of the step, highest mean loss first"
        names = ", ".join(f"{name} ({mean:.4g})" for name, mean in blamed[:_NAMED])
        more = f" and {len(blamed) - _NAMED} more" if len(blamed) > _NAMED else ""
        done = "the step is skipped" if self.action == "skip" else "stopped before the weights changed"
        return f"step {step}: {self.what}; {done} ({self.setting}={self.action}); {head}: {names or 'none'}{more}"


def _mean_losses(samples: Iterable[SampleLoss]) -> list[tuple[str, float]]:
    """Each sample's name and mean loss, those that are not finite first, then in descending order."""
    names, sums = {}, {}
    for sample in samples:  # context-parallel ranks have tokens of the same samples
        loss, tokens = sums.get(sample.segment, (0.0, 0.0))
        names[sample.segment], sums[sample.segment] = sample.name, (loss + sample.loss, tokens + sample.tokens)
    means = [(names[segment], loss / max(tokens, 1.0)) for segment, (loss, tokens) in sorted(sums.items())]
    return sorted(means, key=lambda entry: (math.isfinite(entry[1]), -entry[1] if math.isfinite(entry[1]) else 0.0))


def latest_losses(entries: Iterable[Mapping[str, Any]], step: int, window: int) -> list[float]:
    """The losses that a run's guard knew after a step, from the entries of the run's log."""
    known = [
        entry["loss"]
        for entry in entries
        if entry.get("step", math.inf) <= step and entry.get("loss") is not None and entry.get("trained_tokens", 1)
    ]
    return known[-window:]


class SampleLoss(NamedTuple):
    """The part of a sample's loss that a rank has computed."""

    segment: tuple[int, int, int]  # data-parallel rank, microbatch, segment: the same on all context-parallel ranks
    name: str
    loss: float  # sum over tokens
    tokens: float  # number of those that count


@dataclass(frozen=True)
class Microbatch:
    """The losses of one microbatch on this rank; they stay on the device until they are read."""

    losses: Tensor  # [b, s] float32, of every token
    mask: Tensor  # [b, s] float32, 1 where the loss counts
    sums: Tensor  # [2] float32, sum of the losses that count, and their number
    layout: SequenceLayout  # of the whole batch, on the host
    sample_ids: tuple[str, ...]  # of its segments, as far as they are known

    def samples(self, number: int, groups: ProcessGroupCollection) -> list[SampleLoss]:
        """The samples whose tokens this rank has, in the step's microbatch of that number; waits for the device."""
        layout, rank = self.layout, groups.dp.rank()
        index = token_index(layout, groups.cp.size(), groups.cp.rank()).T.flatten()
        segment = layout.per_token(torch.arange(len(layout.lengths)))[index]
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


def recorded(count: Callable, state: GlobalState, batch: TokenBatch, mask: Tensor) -> Callable:
    """The loss function `count`, from losses [b, s] to (sum, tokens, values to report), of a training microbatch.

    It records losses if `StepGuard` has been started; `mask` [b, s] is this rank's part of the batch's, on the device.

    Raises:
        ValueError: the configuration has settings that callbacks implement, and none was started.
    """
    microbatches: list[Microbatch] | None = getattr(state, _RECORDED, None)
    if microbatches is None:
        settings = {
            "model.dist_train.use_dist_train": is_split_unjoined(state.cfg.model),
            "guard": getattr(state.cfg, "guard", None) is not None,
        }
        if ignored := [name for name, is_set in settings.items() if is_set]:
            raise ValueError(
                f"{' and '.join(ignored)} would be ignored: the callbacks have not started; expected "
                "finetune(cfg, qwen3vl_bridge.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))"
            )
        return count

    def count_and_record(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        counted = count(losses)
        sums = counted[2].get("total loss", counted[2]["lm loss"])  # the former with a teacher
        # On CUDA megatron-core's combined schedule frees what the loss function was given after the backward pass.
        microbatches.append(Microbatch(losses.detach().clone(), mask, sums, batch.layout, batch.sample_ids))
        return counted

    return count_and_record


class PartSquares:
    """Squares of the gradient norms of the parts of a model, which are this rank's chunks as the optimizer has them.

    An optimizer steps parameters of the model, float32 copies of them, or, if it is distributed, this rank's piece of
    either. megatron-core provides which of them are replicated on other ranks, and over which ranks squares are summed.

    Raises:
        ValueError: the optimizer steps a tensor that is not found in the model.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, groups: ProcessGroupCollection
    ) -> None:
        ranks = groups.tp_dp_cp.size() * groups.pp.size()  # ranks of the parts: all, or those of one module
        named = [(part_of(name), p) for chunk in model for name, p in chunk.named_parameters()]
        self._sums = []
        for member in optimizers_of(optimizer):
            stepped = member.get_parameters()
            parts = {tensor: part for part, p in named for tensor in _stepped_for(member, p)}
            if missing := set(stepped) - parts.keys():
                raise ValueError(
                    f"the optimizer updates {len(missing)} tensors that belong to no parameter of the model, "
                    f"expected none: found shapes {sorted({tuple(tensor.shape) for tensor in missing})[:8]}"
                )
            group = member.get_grad_stats_parallel_group()
            # Every such group computes the same sum; a sum over all ranks of the parts counts it once for each group.
            share = 1.0 if group is None else group.size() / ranks
            self._sums.append((member, share, [[p for p in stepped if parts[p] is part] for part in Part]))

    @torch.no_grad()
    def of_this_rank(self) -> Tensor:
        """[parts] float64, on the gradients' device: their sum over all ranks is the squares of the parts' norms.

        Gradients must be where the optimizer reads them.
        """
        totals = []
        for member, share, by_part in self._sums:
            # Skips replicas on other ranks, and finds the gradients of every kind of optimizer.
            gradients = [member._filter_grads_for_norm(parameters) for parameters in by_part]
            norms = [torch.nn.utils.get_total_norm(some) if some else None for some in gradients]
            if known := [norm for norm in norms if norm is not None]:
                zero = torch.zeros_like(known[0])
                squares = torch.stack([zero if norm is None else norm for norm in norms]).double().square()
                totals.append(share * squares)
        return torch.stack(totals).sum(0) if totals else torch.zeros(len(Part), dtype=torch.float64)


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers in a chain, without those that have no parameters."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in every if not getattr(one, "is_stub_optimizer", False)]


def _stepped_for(optimizer: MegatronOptimizer, parameter: Tensor) -> Iterator[Tensor]:
    """The tensors that an optimizer may step to change a parameter."""
    yield parameter
    if getattr(parameter, "main_param", None) is not None:
        yield parameter.main_param
    pieces = getattr(optimizer, "model_param_group_index_map", {})
    if parameter in pieces:
        group, index = pieces[parameter]
        yield optimizer.param_groups[group]["params"][index]
