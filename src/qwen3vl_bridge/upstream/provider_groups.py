"""Process groups and the communicator between modules that Megatron-Bridge keeps on a provider.

Read and set: `_pg_collection`, a field of providers that Megatron-Bridge's setup and `provide_distributed_model` set.
Read: `_p2p_communicator`, which the setup sets for a vision tower and a language model on separate ranks. Delete this
module when both have public names.
"""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection


def provider_groups(provider: Any) -> ProcessGroupCollection | None:
    """Return the process groups of a provider's model; None before they are set."""
    return provider._pg_collection


def set_provider_groups(provider: Any, groups: ProcessGroupCollection | None) -> None:
    """Set the process groups of a provider's model."""
    provider._pg_collection = groups


def p2p_communicator(provider: Any) -> Any:
    """Return the communicator between a vision tower and a language model, or None if they share ranks."""
    return getattr(provider, "_p2p_communicator", None)
