"""The key-value store that all processes of a job share.

Called: `torch.distributed.distributed_c10d._get_default_store`. Processes that exchange values at different times
cannot use a collective. Delete this module when torch has a public function for it.
"""

from __future__ import annotations

from torch.distributed import Store, distributed_c10d


def job_store() -> Store:
    """Return the store that all processes of the default group share."""
    return distributed_c10d._get_default_store()
