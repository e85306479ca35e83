"""Processes and groups from a provider's parallel sizes: joining, leaving, and seeding random generators."""

import os
import random

from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.refusals import check_world
from qwen3vl_bridge.models.settings import complete_dist_train

import numpy as np
import torch
from megatron.bridge.training.initialize import _create_dist_train_pgs
from megatron.bridge.utils.common_utils import get_local_rank_preinit
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed


def initialize(provider: VisionLanguageProvider, seed: int) -> ProcessGroupCollection:
    """Join the processes that torchrun started, or be the only one, and create the provider's parallel groups.

    The provider gets them too, and random generators are seeded.
    """
    if provider.dist_train.use_dist_train:
        _join()
        check_world(provider, torch.distributed.get_world_size())
        complete_dist_train(provider)
        parallel_state.destroy_model_parallel()
        parallel_state._set_global_memory_buffer()
        # Megatron-Bridge's own function, which its set-up calls if `dist.use_decentralized_pg` is on.
        provider._pg_collection = _create_dist_train_pgs(provider, 1, None, None)
    else:
        if not _groups_match(provider):
            _join()
            parallel_state.destroy_model_parallel()
            provider.initialize_model_parallel()
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    groups = provider._pg_collection
    seed += 100 * groups.pp.rank()  # stages draw different numbers, as in Megatron-Bridge's loop
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, force_reset_rng=True, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank()
    )
    return groups


def _groups_match(provider: VisionLanguageProvider) -> bool:
    """Whether groups of the provider's sizes already exist."""
    if not parallel_state.model_parallel_is_initialized():
        return False
    tensor = provider.tensor_model_parallel_size
    wanted = {
        parallel_state.get_tensor_model_parallel_world_size: tensor,
        parallel_state.get_pipeline_model_parallel_world_size: provider.pipeline_model_parallel_size,
        parallel_state.get_virtual_pipeline_model_parallel_world_size: provider.virtual_pipeline_model_parallel_size,
        parallel_state.get_context_parallel_world_size: provider.context_parallel_size,
        parallel_state.get_expert_model_parallel_world_size: provider.expert_model_parallel_size,
        parallel_state.get_expert_tensor_parallel_world_size: provider.expert_tensor_parallel_size or tensor,
    }
    return all(find() == size for find, size in wanted.items())


def _join() -> None:
    if torch.distributed.is_initialized():  # processes that torchrun started join only once
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "WORLD_SIZE" not in os.environ:
        # No port, which could collide with another run on this machine.
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    else:
        if torch.cuda.is_available():  # otherwise all processes of a machine would use its first GPU
            torch.cuda.set_device(get_local_rank_preinit())
        torch.distributed.init_process_group(backend)


def shutdown() -> None:
    """Leave all groups, and that of all processes."""
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
