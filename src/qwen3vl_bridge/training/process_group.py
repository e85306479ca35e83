"""Processes and groups: torch.distributed and megatron-core's parallel state from a provider's sizes.

What lives here: setting both up and tearing them down. What may not: collectives of ours (`parallel.py`).
"""

import os

import torch
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection


def initialize(provider: ModelProviderMixin, seed: int) -> ProcessGroupCollection:
    """Join the processes torchrun started, or be the only one, and build the provider's parallel groups.

    Args:
        provider: its parallel sizes are used, and it is given the groups.
        seed: of torch's and megatron-core's random generators.
    """
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "WORLD_SIZE" in os.environ:
            torch.distributed.init_process_group(backend)
        else:
            # Alone, and no port to collide on with another run on this machine.
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.manual_seed(seed)
    parallel_state.destroy_model_parallel()
    provider.initialize_model_parallel(seed=seed)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider._pg_collection


def shutdown() -> None:
    """Leave the groups and the processes."""
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
