"""What a training run is made of: model, optimizer and schedule from Megatron-Bridge's configuration.

What lives here: assembling these on a machine without CUDA, and refusing what the small loop does not follow. What may
not: data and checkpoints, the steps (`loop.py`).

It shards nothing: where a recipe asks for Megatron-FSDP, which does not train correctly on gloo, the loop uses
megatron-core's DistributedDataParallel. Checkpoints have the layout of Megatron-FSDP all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.encoder_parallel.step import join_modules
from qwen3vl_bridge.models.common.settings.parallelism import check_microbatches
from qwen3vl_bridge.peft.lora import Qwen3VLParts
from qwen3vl_bridge.training.checkpoint_manager import leave_checkpoints
from qwen3vl_bridge.training.checkpointing.initial_weights import leave_first_weights
from qwen3vl_bridge.training.checkpointing.weight_loading import Pretrained
from qwen3vl_bridge.training.config import check_lengths
from qwen3vl_bridge.training.exit_signal import leave_exit_signal_to_run
from qwen3vl_bridge.training.global_batch import check_share
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.small_loop.checkpoint_settings import check_checkpoint_settings
from qwen3vl_bridge.training.small_loop.data_streams import Data
from qwen3vl_bridge.training.step import forward_step

import torch
from megatron.bridge.training.config import ConfigContainer, runtime_config_update
from megatron.bridge.training.optim import setup_optimizer
from megatron.bridge.training.state import GlobalState, TrainState
from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """All that a training run is made of.

    Attributes:
        cfg: the configuration, complete.
        state: what Megatron-Bridge's forward step reads.
        model: this rank's part of the model, a chunk for each of its virtual pipeline stages.
        optimizer, scheduler: megatron-core's.
        groups: this rank's process groups.
        config_yaml: the configuration as the recipe has it, before what needs CUDA was replaced.
        forward_step: one microbatch through the model.
        data, stream: where batches come from, once there is any.
        origin: the checkpoint whose Hugging Face files the run's own take along, once there is one.
    """

    cfg: ConfigContainer
    state: GlobalState
    model: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    groups: ProcessGroupCollection
    config_yaml: str
    forward_step: Callable = forward_step
    data: Data | None = None
    stream: Any = None
    origin: Pretrained | None = None

    @property
    def progress(self) -> TrainState:
        """Steps and samples done."""
        return self.state.train_state


def assemble(cfg: ConfigContainer, pretrained: Pretrained | None = None) -> Run:
    """Everything but data, with the weights that the provider loads or starts from.

    Args:
        cfg: a recipe's configuration. It is validated, and completed in place.
        pretrained: weights to be loaded before adapters are put in; without adapters they are loaded later.

    Raises:
        ValueError: settings this loop cannot honour.
    """
    _refuse_what_would_be_ignored(cfg)
    if cfg.peft is not None:
        _check_adapters(cfg, pretrained)
    cfg._shards_nothing = True  # or what Megatron-FSDP could not save would be refused
    runtime_config_update(cfg)
    leave_exit_signal_to_run(cfg)
    leave_checkpoints(cfg)
    leave_first_weights(cfg)
    config_yaml = dump_dataclass_to_yaml(cfg.to_dict())
    _without_sharding(cfg)
    groups = initialize(cfg.model, cfg.rng.seed)
    # A backward pass outside a schedule leaves a scale of another shape behind, which a schedule's does not fit.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    destroy_moe_metrics_tracker()  # it has as many layers as the model that came before
    check_microbatches(cfg.model, check_share(cfg, cfg.data_parallel_size), "train.global_batch_size")
    model = cfg.model.provide_distributed_model(
        ddp_config=cfg.ddp,
        use_cpu_initialization=True,
        pg_collection=groups,
        data_parallel_random_init=False,
        pre_wrap_hook=None if cfg.peft is None else _with_adapters(cfg, pretrained, groups),
    )
    optimizer, scheduler = setup_optimizer(
        cfg.optimizer,
        cfg.scheduler,
        model,
        pg_collection=groups,
        optimizer_config_override_provider=cfg.optimizer_config_override_provider,
    )
    cfg.model.grad_scale_func = optimizer.scale_loss
    cfg.model.finalize_model_grads_func = functools.partial(finalize_model_grads, pg_collection=groups)
    if cfg.model.dist_train.use_dist_train:
        join_modules(cfg.model, optimizer, sharded=cfg.optimizer.use_distributed_optimizer)
    state = GlobalState()
    state.cfg, state._train_state = cfg, TrainState()
    return Run(cfg, state, model, optimizer, scheduler, groups, config_yaml)


def _refuse_what_would_be_ignored(cfg: ConfigContainer) -> None:
    wrong = {
        "model.fp16": cfg.model.fp16,
        "model.init_model_with_meta_device": cfg.model.init_model_with_meta_device,
        "train.train_samples": cfg.train.train_samples is not None,
        "train.rampup_batch_size": cfg.train.rampup_batch_size is not None,
        "validation.eval_micro_batch_size (other than train.micro_batch_size)": (
            cfg.validation.eval_micro_batch_size not in (None, cfg.train.micro_batch_size)
        ),
        "logger.mlflow_experiment": cfg.logger.mlflow_experiment is not None,
        "logger.comet_project": cfg.logger.comet_project is not None,
        "optimizer.optimizer (other than 'adam')": cfg.optimizer.optimizer != "adam",
    }
    if found := [name for name, is_set in wrong.items() if is_set]:
        raise ValueError(f"the loop for CPUs does not follow {', '.join(found)}; leave it unset")
    check_lengths(cfg)
    check_checkpoint_settings(cfg.checkpoint)


def _check_adapters(cfg: ConfigContainer, pretrained: Pretrained | None) -> None:
    if cfg.model.dist_train.use_dist_train:
        raise ValueError("peft is set with model.dist_train.use_dist_train, expected None")
    if not isinstance(cfg.peft, Qwen3VLParts):
        raise ValueError(f"peft is a {type(cfg.peft).__name__}, expected Qwen3VLLoRA or Qwen3VLDoRA")
    if pretrained is None:
        raise ValueError(
            "checkpoint.pretrained_checkpoint is None, expected the weights that the adapters are of, a Megatron "
            "checkpoint or a Hugging Face folder; a run that goes on needs them too, as it saves adapters alone"
        )


def _with_adapters(
    cfg: ConfigContainer, pretrained: Pretrained, groups: ProcessGroupCollection
) -> Callable[[list[torch.nn.Module]], list[torch.nn.Module]]:
    """What happens to chunks before they are wrapped, as in Megatron-Bridge's own set-up: weights, then adapters."""

    def hook(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        if (registered := cfg.model.pre_wrap_hook) is not None:
            chunks = registered(chunks)
        pretrained.load(chunks, groups)
        cfg.peft(chunks, training=True)
        cfg.peft.set_params_to_save(chunks)
        return chunks

    return hook


def _checkpoints(cfg: ConfigContainer) -> list[str]:
    """The settings that make a run read or write checkpoints."""
    names = ("pretrained_checkpoint", "load", "save")
    return [f"checkpoint.{name}" for name in names if getattr(cfg.checkpoint, name)]


def _without_sharding(cfg: ConfigContainer) -> None:
    """Replace what only works on CUDA, after the configuration has been checked as it stands."""
    sharded, distributed = cfg.ddp.use_megatron_fsdp, cfg.optimizer.use_distributed_optimizer
    # A distributed optimizer trains here; what it would save could not be loaded.
    keep = distributed and not sharded and not _checkpoints(cfg)
    if sharded or (distributed and not keep):
        logger.warning("Megatron-FSDP and the distributed optimizer need CUDA: training with DistributedDataParallel")
    cfg.ddp = dataclasses.replace(
        cfg.ddp,
        use_megatron_fsdp=False,
        use_distributed_optimizer=keep,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    cfg.dist.use_megatron_fsdp = False
    cfg.optimizer.use_distributed_optimizer = keep
