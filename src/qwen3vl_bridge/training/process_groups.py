"""Create and destroy process groups for a provider's parallel sizes, and seed random generators."""

import os
import random

from qwen3vl_bridge.config.fields import complete_dist_train
from qwen3vl_bridge.config.model_validation import check_world
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.upstream.module_groups import create_module_groups
from qwen3vl_bridge.upstream.provider_groups import set_provider_groups

import numpy as np
import torch
from megatron.bridge.utils.common_utils import get_local_rank_preinit
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed


def initialize(provider: VisionLanguageProvider, seed: int) -> ProcessGroupCollection:
    """Initialize torch.distributed, create the provider's parallel groups, and seed random generators.

    Without torchrun this process is the only rank. The groups are returned, and stored in the provider.
    """
    if provider.dist_train.use_dist_train:
        init_distributed()
        check_world(provider, torch.distributed.get_world_size())
        complete_dist_train(provider)
        parallel_state.destroy_model_parallel()
        groups = create_module_groups(provider)
    else:
        if not _groups_match(provider):
            init_distributed()
            parallel_state.destroy_model_parallel()
            provider.initialize_model_parallel()
        groups = ProcessGroupCollection.use_mpu_process_groups()
    set_provider_groups(provider, groups)
    seed += 100 * groups.pp.rank()  # as in Megatron-Bridge's loop, stages have different seeds
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, force_reset_rng=True, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank()
    )
    return groups


def _groups_match(provider: VisionLanguageProvider) -> bool:
    """Return True if megatron-core has already created process groups with the provider's parallel sizes."""
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


def init_distributed() -> None:
    """Initialize torch.distributed with the processes that torchrun has started, or with this process alone."""
    if torch.distributed.is_initialized():  # this must happen only once
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "WORLD_SIZE" not in os.environ:
        # A store without a port, which could collide with another run on this machine.
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    else:
        if torch.cuda.is_available():  # otherwise all ranks of a node use the first GPU
            torch.cuda.set_device(get_local_rank_preinit())
        torch.distributed.init_process_group(backend)


def shutdown() -> None:
    """Destroy all process groups."""
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
