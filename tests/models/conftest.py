"""Tiny checkpoints of each kind, and their providers, configurations and models."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
from transformers import AutoConfig

from tests.models.qwen3_5.conftest import qwen3_5_folders  # noqa: F401
from tests.parity.conftest import Pair, make_pair


@pytest.fixture(scope="module")
def provider(untied_folder):
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)


@pytest.fixture(scope="module")
def config(untied_folder):
    return AutoConfig.from_pretrained(untied_folder)


@pytest.fixture(scope="module")
def pair(untied_folder) -> Pair:
    return make_pair(untied_folder)


@pytest.fixture(scope="session")
def folders(untied_folder, tied_folder, moe_folder, tmp_path_factory):
    """Return Hugging Face folders of models that are dense, have one dense layer, or have experts in every layer."""
    from tests.models.checkpoints.test_torch_dist import make_experts_everywhere

    experts = make_experts_everywhere(moe_folder, tmp_path_factory.mktemp("experts"))
    return {"untied": untied_folder, "tied": tied_folder, "mixed": moe_folder, "experts": experts}
