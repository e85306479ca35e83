"""The device that a test runs on: CUDA, marked `gpu`; or a simulation of the same test on the CPU, marked `slow`."""

from pathlib import Path

import pytest
import torch

from tests.models.qwen3_5 import tiny

KINDS = ("dense", "moe", "qwen3_5")


@pytest.fixture(
    scope="session", params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
def device(request) -> str:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("a simulation for machines without a GPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return request.param


@pytest.fixture(scope="session")
def folders(untied_folder, moe_folder, tmp_path_factory) -> dict[str, Path]:
    """A tiny Hugging Face folder of each kind."""
    qwen3_5 = tiny.make_checkpoint(tmp_path_factory.mktemp("qwen3_5"))
    return dict(zip(KINDS, (untied_folder, moe_folder, qwen3_5), strict=True))
