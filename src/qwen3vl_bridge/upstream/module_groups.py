"""Process groups for a vision tower and a language model on separate ranks.

Called: Megatron-Bridge's `_create_dist_train_pgs`, as in its set-up if `dist.use_decentralized_pg` is on; and
megatron-core's `_set_global_memory_buffer`, which `initialize_model_parallel` calls but `_create_dist_train_pgs` does
not. Delete this module when the set-up of groups is a public function.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.training import initialize
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection


def create_module_groups(provider: Any) -> ProcessGroupCollection:
    """Create the process groups of both modules, and return the groups of this rank's module.

    megatron-core's model-parallel groups must not exist yet. The provider is changed: it records which module this rank
    trains, and gets a communicator between the modules (`provider_groups.p2p_communicator`).
    """
    parallel_state._set_global_memory_buffer()
    return initialize._create_dist_train_pgs(provider, 1, None, None)
