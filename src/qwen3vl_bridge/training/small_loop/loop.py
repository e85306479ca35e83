"""A small training loop for tests: Megatron-Bridge's configuration, megatron-core's schedule.

What lives here: set-up, the loop over steps, evaluation. Runs of users are Megatron-Bridge's own `finetune()`. What
may not: what a run is made of (`setup.py`), the step (`training/step.py`), what a checkpoint holds (`checkpoint.py`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from qwen3vl_bridge.encoder_parallel.encoder_batches import ServedStream, replicas_read
from qwen3vl_bridge.models.common.settings.parallelism import schedule_group
from qwen3vl_bridge.parallel.collectives import largest, sum_losses
from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.checkpointing.weight_loading import Pretrained
from qwen3vl_bridge.training.global_batch import check_share
from qwen3vl_bridge.training.monitoring.progress import Progress
from qwen3vl_bridge.training.small_loop import checkpoint
from qwen3vl_bridge.training.small_loop.data_streams import open_data
from qwen3vl_bridge.training.small_loop.events import Events
from qwen3vl_bridge.training.small_loop.log import Log
from qwen3vl_bridge.training.small_loop.setup import Run, assemble

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.process_groups_config import ProcessGroupCollection

logger = logging.getLogger(__name__)


def set_up(cfg: ConfigContainer) -> Run:
    """Build everything and load the newest checkpoint of the run, or else the pretrained one.

    Args:
        cfg: a recipe's configuration. It is validated, and completed in place.

    Raises:
        ValueError: settings this loop cannot honour.
        CheckpointError: a checkpoint that is not there or does not fit.
    """
    first = cfg.checkpoint.pretrained_checkpoint
    pretrained = Pretrained.find(first) if first else None
    if pretrained is not None:
        pretrained.check(cfg.model)
    run = assemble(cfg, pretrained)
    run.data = open_data(cfg, run.groups)
    streams = [run.data.stream("train", **share) for share in _data_shares(cfg, run.groups)]
    run.stream = streams[0] if cfg.model.add_decoder else ServedStream(streams)
    checkpoint.begin(run, pretrained)
    return run


def _data_shares(cfg: ConfigContainer, groups: ProcessGroupCollection) -> list[dict[str, int]]:
    """Whose microbatches this rank reads: its own, or of ranks of the vision tower those of all that they serve."""
    replicas, size = replicas_read(cfg.model, groups)
    return [dict(dp_rank=one, dp_size=size, micro_batch_size=cfg.train.micro_batch_size) for one in replicas]


def forward_backward(run: Run, batches: Iterator, microbatches: int, *, forward_only: bool) -> torch.Tensor:
    """Several microbatches through the schedule; returns [sum of losses, number of tokens] over all ranks."""
    # Each virtual pipeline stage reads every batch.
    iterators = list(itertools.tee(itertools.islice(batches, microbatches), len(run.model)))
    reports = _schedule(run)(
        forward_step_func=functools.partial(run.forward_step, run.state),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=run.model,
        num_microbatches=microbatches,
        seq_length=run.cfg.model.seq_length,
        micro_batch_size=run.cfg.train.micro_batch_size,
        forward_only=forward_only,
        p2p_communicator=_communicator(run),
        pg_collection=run.groups,
    )
    nothing = torch.zeros(2, dtype=torch.float64)  # stages before the last have no losses
    return sum_losses(sum((report["lm loss"].double() for report in reports), start=nothing), run.groups)


def _schedule(run: Run) -> Callable:
    """As Megatron-Bridge's loop chooses."""
    model = run.cfg.model
    if model.dist_train.use_dist_train:
        return forward_backward_pipelining_without_interleaving
    return get_forward_backward_func(run.groups.pp.size(), model.virtual_pipeline_model_parallel_size)


def _communicator(run: Run) -> P2PCommunicator | MultiModulePipelineCommunicator | None:
    if run.cfg.model.dist_train.use_dist_train:
        return run.cfg.model._p2p_communicator
    return P2PCommunicator(run.groups.pp, run.cfg.model) if run.groups.pp.size() > 1 else None


def train_step(run: Run) -> dict[str, float]:
    """One optimizer step over a global batch; returns what is worth logging."""
    cfg, started = run.cfg, time.perf_counter()
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    microbatches = check_share(cfg, cfg.data_parallel_size)
    loss, tokens = forward_backward(run, run.stream, microbatches, forward_only=False).tolist()
    learning_rate = get_canonical_lr_for_logging(run.optimizer.param_groups)
    updated, gradient_norm, _ = run.optimizer.step()
    if updated:
        run.scheduler.step(increment=cfg.train.global_batch_size)
    run.progress.step += 1
    run.progress.consumed_train_samples += cfg.train.global_batch_size
    entry = {
        "step": run.progress.step,
        "loss": loss / max(tokens, 1),
        "lr": learning_rate,
        "grad_norm": float(gradient_norm),
        "trained_tokens": int(tokens),
        "seconds": time.perf_counter() - started,
    }
    return entry if updated else entry | {"skipped": 1}


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Mean loss per trained token over the first `eval_iters` batches of the validation data, or all there are.

    Batches are read as they are needed; those at the end that fill no group of the schedule are left out.
    """
    cfg, shares = run.cfg, _data_shares(run.cfg, run.groups)
    most = cfg.validation.eval_iters * cfg.validation.eval_global_batch_size
    most //= cfg.data_parallel_size * cfg.train.micro_batch_size
    group = schedule_group(cfg.model)
    read = [run.data.evaluation("valid", **share) for share in shares]
    batches = itertools.islice(read[0] if cfg.model.add_decoder else zip(*read, strict=False), most)
    sums = torch.zeros(2, dtype=torch.float64)
    for chunk in run.model:
        chunk.eval()
    for together in itertools.batched(batches, group):
        if len(together) == group:
            sums += forward_backward(run, iter(together), group, forward_only=True)
    for chunk in run.model:
        chunk.train()
    loss, tokens = sums.tolist()
    if not tokens:
        raise ValueError(
            f"validation has no trained token in {most} microbatches of a data-parallel rank, or fewer than {group} "
            "microbatches, which the schedule takes together; expected some, or validation.eval_iters 0"
        )
    return {"step": run.progress.step, "valid_loss": loss / tokens}


def train(
    cfg: ConfigContainer, *, stop_after: int | None = None, callbacks: Sequence[Callback] = ()
) -> list[dict[str, float]]:
    """Train to `cfg.train.train_iters`, saving and evaluating as the configuration says.

    Args:
        cfg: a recipe's configuration.
        stop_after: leave, with a checkpoint, after this many steps of this call; None to go to the end.
        callbacks: called beside those that follow the configuration, at the places where Megatron-Bridge's loop does.

    Returns:
        The log: one entry a step, and one an evaluation. With `checkpoint.save` set it is also `metrics.jsonl` there.
    """
    run = set_up(cfg)
    try:
        return _train(run, stop_after, callbacks)
    finally:
        if run.cfg.train.exit_signal_handler:
            run.state.signal_handler.release()


def _train(run: Run, stop_after: int | None, callbacks: Sequence[Callback]) -> list[dict[str, float]]:
    cfg = run.cfg
    last = cfg.train.train_iters
    if stop_after is not None:
        last = min(last, run.progress.step + stop_after)
    if run.progress.step >= last:
        logger.warning(
            "nothing is left to do: %s is at step %d of train.train_iters %d; raise that, or choose another folder",
            *(cfg.checkpoint.load, run.progress.step, cfg.train.train_iters),
        )
    events = Events(run, [*training_callbacks(cfg), *callbacks])
    events.fire("on_train_start")
    leave = False
    shown = Progress(cfg.train.train_iters, run.progress.step, cfg.logger.log_interval)
    with Log(run) as log, shown:
        while run.progress.step < last and not leave:
            events.fire("on_train_step_start")
            entry = train_step(run)
            events.fire_step_end(entry)
            log.add(entry | events.measured)
            shown.advance(log.entries[-1])
            step = run.progress.step
            leave = _asked_to_leave(run)
            is_last = step == last or leave
            if _evaluates(cfg, step, is_last=step == last):
                events.fire("on_eval_start")
                entry = evaluate(run)
                events.fire("on_eval_end", total_loss_dict={"lm loss": torch.tensor(entry["valid_loss"])})
                log.add(entry | events.measured)
                shown.note(log.entries[-1])
            if cfg.checkpoint.save and (is_last or step % cfg.checkpoint.save_interval == 0):
                checkpoint.save(cfg.checkpoint.save, run)
                events.fire("on_checkpoint_save")
        events.fire("on_train_end")
    if leave:
        logger.warning("left after step %d of %d; the same command goes on from there", run.progress.step, last)
    return log.entries


def _evaluates(cfg: ConfigContainer, step: int, *, is_last: bool) -> bool:
    settings = cfg.validation
    if not settings.eval_interval or not settings.eval_iters or step < (settings.start_eval_at_iter or 0):
        return False
    return is_last or step % settings.eval_interval == 0


def _asked_to_leave(run: Run) -> bool:
    """Whether some rank was sent the signal of `train.exit_signal_handler`, or the run's time or steps are over."""
    settings, minutes = run.cfg.train, (time.time() - run.state.start_time) / 60
    late = settings.exit_duration_in_mins is not None and minutes > settings.exit_duration_in_mins
    received = [late]  # clocks of ranks differ
    if settings.exit_signal_handler:
        received.append(any(run.state.signal_handler.signals_received()))
    over = settings.exit_interval and run.progress.step % settings.exit_interval == 0
    return bool(over) or bool(largest(any(received)))
