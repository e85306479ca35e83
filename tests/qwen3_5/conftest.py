"""Tiny checkpoints of each kind."""

from __future__ import annotations

import qwen3vl_bridge.models.qwen3_5.bridge  # noqa: F401  which is not registered by itself

import pytest

from tests.qwen3_5.tiny import make_checkpoint

KINDS = {"dense": {}, "tied": {"tied": True}, "moe": {"moe": True}, "per expert": {"moe": True, "packed": False}}


@pytest.fixture(scope="session")
def qwen3_5_folders(tmp_path_factory):
    """Hugging Face folders by kind."""
    return {
        kind: make_checkpoint(tmp_path_factory.mktemp(kind), seed=seed, **options)
        for seed, (kind, options) in enumerate(KINDS.items())
    }
