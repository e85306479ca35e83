"""What the callers' tests share: one process with megatron-core's groups, as frameworks make them, and a reference."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from transformers import AutoModelForImageTextToText

from tests.frameworks.support import Truth
from tests.helpers.batches import make_samples


@pytest.fixture(scope="module", autouse=True)
def _groups():
    """Callers set up torch.distributed and megatron-core's state themselves, before there is a provider."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)


@pytest.fixture(scope="module", params=["dense", "MoE"])
def folder(request):
    names = {"dense": "untied_folder", "tied": "tied_folder", "MoE": "moe_folder"}
    return request.getfixturevalue(names[request.param])


@pytest.fixture(scope="module")
def truth(folder) -> Truth:
    """What transformers makes of samples with an image, without one, with a video, and without one again."""
    reference = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    return Truth(reference, make_samples("mixed", reference.config, seed=7))
