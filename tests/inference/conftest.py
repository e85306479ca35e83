"""Fixtures of generation: the tiny models of all families."""

from tests.models.qwen3_5.conftest import qwen3_5_folders  # noqa: F401  (a fixture)
