"""A small training loop for machines without CUDA: Megatron-Bridge's configuration, megatron-core's schedule.

What lives here: set-up, the loop over steps, evaluation. On CUDA Megatron-Bridge's own `finetune()` does this. What
may not: the step (`step.py`), what a checkpoint holds (`checkpoint.py`).

It shards nothing: where a recipe asks for Megatron-FSDP, which does not train correctly on gloo, this loop uses
megatron-core's DistributedDataParallel. Checkpoints have the layout of Megatron-FSDP all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.megatron_folder import find_iteration
from qwen3vl_bridge.checkpoint.staging import replace_file
from qwen3vl_bridge.parallel import sum_over_data_parallel
from qwen3vl_bridge.training import checkpoint
from qwen3vl_bridge.training.process_group import initialize
from qwen3vl_bridge.training.progress import Progress
from qwen3vl_bridge.training.step import forward_step
from qwen3vl_bridge.training.streams import Data, open_data

import torch
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.optim import setup_optimizer
from megatron.bridge.training.state import GlobalState, TrainState
from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """All that a training run is made of."""

    cfg: ConfigContainer
    state: GlobalState
    model: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    data: Data
    stream: Any
    groups: ProcessGroupCollection
    config_yaml: str  # as the recipe has it, before this loop replaces what needs CUDA

    @property
    def progress(self) -> TrainState:
        """Steps and samples done."""
        return self.state.train_state


def _refuse_what_would_be_ignored(cfg: ConfigContainer) -> None:
    wrong = {
        "peft": cfg.peft is not None,
        "model.fp16": cfg.model.fp16,
        "train.train_samples": cfg.train.train_samples is not None,
        "train.rampup_batch_size": cfg.train.rampup_batch_size is not None,
        "train.exit_interval": cfg.train.exit_interval is not None,
        "train.exit_duration_in_mins": cfg.train.exit_duration_in_mins is not None,
        "validation.eval_micro_batch_size (other than train.micro_batch_size)": (
            cfg.validation.eval_micro_batch_size not in (None, cfg.train.micro_batch_size)
        ),
        "optimizer.optimizer (other than 'adam')": cfg.optimizer.optimizer != "adam",
    }
    if found := [name for name, is_set in wrong.items() if is_set]:
        raise ValueError(f"the loop for CPUs does not follow {', '.join(found)}; leave it unset")
    if cfg.dataset.seq_length != cfg.model.seq_length:
        raise ValueError(
            f"dataset.seq_length is {cfg.dataset.seq_length}, expected model.seq_length, {cfg.model.seq_length}"
        )


def _refuse_model_parallelism(cfg: ConfigContainer) -> None:
    for name in ("tensor", "pipeline", "context", "expert"):
        size = getattr(cfg.model, f"{name}_{'model_' if name != 'context' else ''}parallel_size")
        if size > 1:
            raise ValueError(f"{name} parallelism is {size}, expected 1: the loop for CPUs only repeats the model")


def _without_sharding(cfg: ConfigContainer) -> None:
    """Replace what only works on CUDA, after the configuration has been checked as it stands."""
    if cfg.ddp.use_megatron_fsdp or cfg.optimizer.use_distributed_optimizer:
        logger.warning("Megatron-FSDP and the distributed optimizer need CUDA: training with DistributedDataParallel")
    cfg.ddp = dataclasses.replace(
        cfg.ddp,
        use_megatron_fsdp=False,
        use_distributed_optimizer=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    cfg.dist.use_megatron_fsdp = cfg.optimizer.use_distributed_optimizer = False


def set_up(cfg: ConfigContainer) -> Run:
    """Build everything and load the newest checkpoint of the run, or else the pretrained one.

    Args:
        cfg: a recipe's configuration. It is validated, and completed in place.

    Raises:
        ValueError: settings this loop cannot honour.
        CheckpointError: a checkpoint that is not there or does not fit.
    """
    _refuse_model_parallelism(cfg)
    _refuse_what_would_be_ignored(cfg)
    pretrained = cfg.checkpoint.pretrained_checkpoint and find_iteration(Path(cfg.checkpoint.pretrained_checkpoint))
    cfg.validate()
    config_yaml = dump_dataclass_to_yaml(cfg.to_dict())
    _without_sharding(cfg)
    groups = initialize(cfg.model, cfg.rng.seed)
    # A backward pass outside a schedule leaves a scale of another shape behind, which a schedule's does not fit.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    share = cfg.train.micro_batch_size * groups.dp.size()
    if cfg.train.global_batch_size % share:
        raise ValueError(
            f"train.global_batch_size is {cfg.train.global_batch_size}, expected a multiple of {share}: "
            f"micro_batch_size times {groups.dp.size()} data-parallel ranks"
        )
    model = cfg.model.provide_distributed_model(
        ddp_config=cfg.ddp, use_cpu_initialization=True, pg_collection=groups, data_parallel_random_init=False
    )
    optimizer, scheduler = setup_optimizer(cfg.optimizer, cfg.scheduler, model, pg_collection=groups)
    model_config = cfg.model
    model_config.grad_scale_func = optimizer.scale_loss
    model_config.finalize_model_grads_func = functools.partial(finalize_model_grads, pg_collection=groups)
    state = GlobalState()
    state.cfg, state._train_state = cfg, TrainState()
    data = open_data(cfg, groups)
    stream = data.stream("train", **_data_share(cfg, groups))
    run = Run(cfg, state, model, optimizer, scheduler, data, stream, groups, config_yaml)
    resumed = cfg.checkpoint.load and checkpoint.latest(cfg.checkpoint.load)
    if resumed:
        checkpoint.load(resumed, run)
        logger.info("resumed from %s at step %d", resumed, run.progress.step)
    elif pretrained:
        checkpoint.load_weights(pretrained, model)
    return run


def _data_share(cfg: ConfigContainer, groups: ProcessGroupCollection) -> dict[str, int]:
    return dict(dp_rank=groups.dp.rank(), dp_size=groups.dp.size(), micro_batch_size=cfg.train.micro_batch_size)


def _forward_backward(run: Run, batches: Iterator, microbatches: int, *, forward_only: bool) -> torch.Tensor:
    """Several microbatches through the schedule; returns [sum of losses, number of tokens] over all ranks."""
    reports = get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, run.state),
        data_iterator=batches,
        model=run.model,
        num_microbatches=microbatches,
        seq_length=run.cfg.model.seq_length,
        micro_batch_size=run.cfg.train.micro_batch_size,
        forward_only=forward_only,
        pg_collection=run.groups,
    )
    return sum_over_data_parallel(torch.stack([report["lm loss"].double() for report in reports]).sum(0), run.groups)


def train_step(run: Run) -> dict[str, float]:
    """One optimizer step over a global batch; returns what is worth logging."""
    cfg, started = run.cfg, time.perf_counter()
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    microbatches = cfg.train.global_batch_size // (cfg.train.micro_batch_size * run.groups.dp.size())
    loss, tokens = _forward_backward(run, run.stream, microbatches, forward_only=False).tolist()
    learning_rate = run.optimizer.param_groups[0]["lr"]
    updated, gradient_norm, _ = run.optimizer.step()
    if not updated:
        raise RuntimeError(f"step {run.progress.step + 1}: the optimizer found gradients that are not finite")
    run.scheduler.step(increment=cfg.train.global_batch_size)
    run.progress.step += 1
    run.progress.consumed_train_samples += cfg.train.global_batch_size
    return {
        "step": run.progress.step,
        "loss": loss / max(tokens, 1),
        "lr": learning_rate,
        "grad_norm": float(gradient_norm),
        "trained_tokens": int(tokens),
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Mean loss per trained token over the first `eval_iters` batches of the validation data, or all there are."""
    for chunk in run.model:
        chunk.eval()
    cfg, share = run.cfg, _data_share(run.cfg, run.groups)
    most = cfg.validation.eval_iters * cfg.validation.eval_global_batch_size
    most //= share["dp_size"] * share["micro_batch_size"]
    batches = list(itertools.islice(run.data.evaluation("valid", **share), most))
    loss, tokens = _forward_backward(run, iter(batches), len(batches), forward_only=True).tolist()
    for chunk in run.model:
        chunk.train()
    return {"step": run.progress.step, "valid_loss": loss / max(tokens, 1)}


def train(cfg: ConfigContainer, *, stop_after: int | None = None) -> list[dict[str, float]]:
    """Train to `cfg.train.train_iters`, saving and evaluating as the configuration says.

    Args:
        cfg: a recipe's configuration.
        stop_after: leave, with a checkpoint, after this many steps of this call; None to go to the end.

    Returns:
        The log: one entry a step, and one an evaluation. With `checkpoint.save` set it is also `metrics.jsonl` there.
    """
    run = set_up(cfg)
    last = cfg.train.train_iters
    if stop_after is not None:
        last = min(last, run.progress.step + stop_after)
    log: list[dict[str, float]] = []
    record = _recorder(cfg, log, run.progress.step)
    with Progress(total=cfg.train.train_iters, done=run.progress.step) as shown:
        while run.progress.step < last:
            record(train_step(run))
            shown.advance(log[-1])
            step, is_last = run.progress.step, run.progress.step == last
            if (
                cfg.validation.eval_interval
                and cfg.validation.eval_iters
                and (step % cfg.validation.eval_interval == 0 or is_last)
            ):
                record(evaluate(run))
                shown.note(log[-1])
            if cfg.checkpoint.save and (is_last or step % cfg.checkpoint.save_interval == 0):
                checkpoint.save(cfg.checkpoint.save, run)
    return log


def _recorder(cfg: ConfigContainer, log: list, step: int) -> Callable[[dict[str, float]], None]:
    """Keeps entries in memory, and in `metrics.jsonl` where the run saves: a resumed run continues its file."""
    writes = cfg.checkpoint.save and torch.distributed.get_rank() == 0
    path = Path(cfg.checkpoint.save) / "metrics.jsonl" if writes else None
    if path is not None and path.exists():
        # Steps after the checkpoint that is resumed from are done again; so is a line that was cut off.
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        replace_file(path, "".join(line + "\n" for line in kept).encode())

    def record(entry: dict[str, float]) -> None:
        log.append(entry)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    return record


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")
