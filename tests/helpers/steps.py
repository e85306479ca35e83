"""Run Megatron-Bridge's set-up and single steps, for tests that look at what happens in between.

Complete runs are in `tests/training/running.py`.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration
from qwen3vl_bridge.core.collectives import max_over_ranks, sum_over_ranks
from qwen3vl_bridge.dist_train.joint_run import JoinModules
from qwen3vl_bridge.training.callbacks import build_callbacks
from qwen3vl_bridge.training.process_groups import init_distributed
from qwen3vl_bridge.training.step import forward_step

import torch
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training import train as bridges
from megatron.bridge.training.callbacks import Callback, CallbackContext, CallbackManager
from megatron.bridge.training.checkpointing import CheckpointManager
from megatron.bridge.training.config import ConfigContainer, runtime_config_update
from megatron.bridge.training.initialize import destroy_global_state
from megatron.bridge.training.setup import setup
from megatron.bridge.training.state import GlobalState, TrainState
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from modelopt.torch.distill.plugins.megatron import get_tensor_shapes_adjust_fn_for_distillation

from tests.helpers.ranks import leave_groups


@dataclass(eq=False)
class Run:
    """The objects that Megatron-Bridge sets up for a configuration."""

    cfg: ConfigContainer
    state: GlobalState
    model: list[torch.nn.Module]  # a wrapped chunk for each virtual pipeline stage of this rank
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    groups: ProcessGroupCollection
    manager: CheckpointManager
    stream: Iterator[Any] | None = None  # of microbatches
    forward_step: Callable = forward_step
    callbacks: CallbackManager | None = None  # while the run is `followed`

    @property
    def progress(self) -> TrainState:
        return self.state.train_state

    def fire(self, event: str, **more: Any) -> None:
        """Call the callbacks of an event, as Megatron-Bridge's loop does."""
        if self.callbacks is not None:
            given = (self.state, self.model, self.callbacks.user_state, self.optimizer, self.scheduler)
            self.callbacks.fire(event, CallbackContext(*given, **more))


@contextlib.contextmanager
def followed(run: Run, callbacks: Sequence[Callback]) -> Iterator[dict[str, Any]]:
    """Call callbacks during the steps in the body; yield their `user_state`."""
    run.callbacks = CallbackManager()
    run.callbacks.add(list(callbacks))
    run.fire("on_train_start")
    yield run.callbacks.user_state
    run.fire("on_train_end")
    run.callbacks = None


def set_up(cfg: ConfigContainer, *, data: bool = True) -> Run:
    """Set up a run as before the first step of `finetune()`: checkpoints loaded, data open."""
    init_distributed()
    destroy_global_state()  # of a run before
    leave_groups()
    # A backward pass outside a schedule leaves a scale of another shape behind, which a schedule's does not fit.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    cfg.guard = None  # steps that nobody follows are refused with one
    if cfg.model.dist_train.use_dist_train:
        build_callbacks(cfg)  # such runs are refused without; below, `JoinModules` is called as the loop would
    runtime_config_update(cfg)
    state = GlobalState()
    state.cfg = cfg
    made = setup(state, get_dataset_provider(cfg.dataset) if data else lambda *_, **__: (None, None, None))
    for chunk in made.model:
        chunk.train()
    if cfg.model.dist_train.use_dist_train:
        JoinModules().on_train_start(CallbackContext(made.state, made.model, {}, made.optimizer, made.scheduler))
    made.state.timers("interval-time", log_level=0).start()  # which saving stops
    run = Run(
        *(cfg, made.state, made.model, made.optimizer, made.scheduler),
        *(made.pg_collection, made.checkpoint_manager, made.train_data_iterator),
    )
    weakref.finalize(run, release, made.model)
    return run


def release(model: list[torch.nn.Module]) -> None:
    """Free the models of a finished run.

    megatron-core's DistributedDataParallel and the autograd nodes of its parameters reference each other where Python's
    collector does not look. They would keep all process groups, with three threads each under gloo.
    """
    for chunk in model:
        vars(chunk).clear()


def forward_backward(
    run: Run,
    batches: Iterator[Any],
    microbatches: int,
    *,
    forward_only: bool = False,
    reports: list[dict[str, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Run microbatches through the schedule; return [sum of losses, number of tokens] over all ranks in float64.

    The values that the loss function of each microbatch reports are added to `reports`.
    """
    # Each virtual pipeline stage reads every batch.
    iterators = list(itertools.tee(itertools.islice(batches, microbatches), len(run.model)))
    length, rows = run.cfg.model.seq_length, run.cfg.train.micro_batch_size
    of_student_and_teacher = (
        None if run.cfg.dist.use_decentralized_pg
        else get_tensor_shapes_adjust_fn_for_distillation(
            run.model, seq_length=length, micro_batch_size=rows, decoder_seq_length=length
        )
    )  # fmt: skip
    made = _schedule(run)(
        forward_step_func=partial(run.forward_step, run.state),
        data_iterator=iterators if len(iterators) > 1 else iterators[0], model=run.model, num_microbatches=microbatches,
        seq_length=length, micro_batch_size=rows, forward_only=forward_only,
        adjust_tensor_shapes_fn=of_student_and_teacher, p2p_communicator=_communicator(run), pg_collection=run.groups,
    )  # fmt: skip
    if reports is not None:
        reports += made
    nothing = torch.zeros(2, dtype=torch.float64)  # stages before the last have no losses
    # Tensor-parallel ranks have the same losses.
    mine = sum((report["lm loss"].double() for report in made), start=nothing) if run.groups.tp.rank() == 0 else nothing
    return sum_over_ranks(mine)


def train_step(run: Run) -> dict[str, float]:
    """Take one step of Megatron-Bridge; return the values to compare, equal on every rank."""
    learning_rate = get_canonical_lr_for_logging(run.optimizer.param_groups)
    losses, skipped, grad_norm = step_with_callbacks(run)
    entry = {
        "step": run.progress.step,
        # Stages before the last have none.
        "loss": max_over_ranks([float(losses["lm loss"]) if losses else float("-inf")])[0], "lr": learning_rate,
        "grad_norm": float(grad_norm),
    }  # fmt: skip
    return entry | {"skipped": 1} if skipped else entry


def step_with_callbacks(run: Run) -> tuple[dict[str, torch.Tensor], bool, float | None]:
    """Take one step with its callbacks; return losses, whether it was skipped, and the gradient norm."""
    run.fire("on_train_step_start")
    losses, skipped, _, _, _, grad_norm, *_ = bridges.train_step(
        partial(run.forward_step, run.state), run.stream, run.model, run.optimizer, run.scheduler, run.state,
        run.groups, _schedule(run), _communicator(run),
    )  # fmt: skip
    run.fire("on_train_step_end", loss_dict=losses, grad_norm=grad_norm, skipped_iter=bool(skipped))
    run.progress.step += 1
    run.progress.consumed_train_samples += run.cfg.train.global_batch_size
    return losses, bool(skipped), grad_norm


def save(run: Run) -> Path:
    """Save a checkpoint in `cfg.checkpoint.save` and return its folder. Every rank calls it."""
    bridges.save_checkpoint_and_time(
        *(run.state, run.model, run.optimizer, run.scheduler, 0.0, run.manager), train_data_iterator=run.stream
    )
    return find_iteration(Path(run.cfg.checkpoint.save))


def _schedule(run: Run) -> Callable:
    """Return the schedule that Megatron-Bridge's loop chooses."""
    model = run.cfg.model
    if model.dist_train.use_dist_train:
        return forward_backward_pipelining_without_interleaving
    return get_forward_backward_func(run.groups.pp.size(), model.virtual_pipeline_model_parallel_size)


def _communicator(run: Run) -> Any:
    if run.cfg.model.dist_train.use_dist_train:
        return run.cfg.model._p2p_communicator
    return P2PCommunicator(run.groups.pp, run.cfg.model)
