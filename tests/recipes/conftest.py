"""What the tests of recipes share."""

from __future__ import annotations

import pytest


@pytest.fixture
def alone():
    """No process groups of other tests, for configurations of many ranks that are only completed."""
    from qwen3vl_bridge.training.process_groups import shutdown

    shutdown()
