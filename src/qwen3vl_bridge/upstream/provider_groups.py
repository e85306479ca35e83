"""Process groups and the communicator between modules that Megatron-Bridge keeps on a provider.

Borrowed: `_pg_collection`, a field of Megatron-Bridge's providers that its setup and `provide_distributed_model` set,
and `_p2p_communicator`, which its setup sets for a vision tower and a language model on separate ranks. Delete this
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
    """Return the communicator between a vision tower and a language model on separate ranks; else None."""
    return getattr(provider, "_p2p_communicator", None)
