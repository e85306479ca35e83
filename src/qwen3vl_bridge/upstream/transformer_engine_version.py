"""The release of Transformer Engine that megatron-core assumes to be installed.

Set: `_te_version`, the cache of `megatron.core.utils.get_te_version`. Without Transformer Engine megatron-core assumes
release 0.0.0, and rejects settings that are valid for the run. Delete this module when a configuration can be
completed for a machine other than this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core import utils
from packaging.version import Version


@contextmanager
def with_transformer_engine(release: str) -> Iterator[None]:
    """Let megatron-core assume a release of Transformer Engine inside the `with` block, unless one is installed."""
    found = utils.get_te_version()
    if not found.release[0]:
        utils._te_version = Version(release)
    try:
        yield
    finally:
        utils._te_version = found
