"""The record of an item's place in a folder of torch.distributed.checkpoint.

Borrowed: `_StorageInfo`, which `.metadata` contains as a pickled object for each item. The public writers need all
tensors in memory, and a process group. Delete this module when torch has a public name for it.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem


def storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Return torch's storage record for a checkpoint item of `length` bytes at `offset` in the file `relative_path`."""
    return filesystem._StorageInfo(relative_path, offset, length)
