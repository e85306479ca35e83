"""The tiny checkpoints of both families."""

from tests.models.qwen3_5.conftest import qwen3_5_folders  # noqa: F401
