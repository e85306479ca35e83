"""The fingerprint of a data set of the `datasets` library.

Read: `Dataset._fingerprint`, a hash of the files and transformations that a data set is made of. The library documents
only this private name. Delete this module when there is a public one.
"""

from __future__ import annotations

from typing import Any


def fingerprint_of(dataset: Any) -> str:
    """Return the fingerprint of a `datasets.Dataset`: a hash that is equal in every process for the same data."""
    return dataset._fingerprint
