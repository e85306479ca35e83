"""The class with which torch.distributed.checkpoint records the file, offset and length of a checkpoint item.

Created: `_StorageInfo`, which `.metadata` contains as a pickled object for each item. torch's public writers would need
all tensors in memory, and a process group. Delete this module when torch has a public name for the class.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem


def storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Return torch's storage record for a checkpoint item of `length` bytes at `offset` in the file `relative_path`."""
    return filesystem._StorageInfo(relative_path, offset, length)
