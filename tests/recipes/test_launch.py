"""Environment variables of recipes: torch's allocator and Transformer Engine's grouped product."""

import os
from unittest import mock

import pytest
from qwen3vl_recipes.dry_run import finalize_copy
from qwen3vl_recipes.registry import recipes


@pytest.mark.usefixtures("no_groups")
@mock.patch.dict(os.environ)
def test_recipes_set_expandable_segments_unless_user_set_allocator():
    """Megatron-Bridge's set-up sets the variable unless it is set; a dry run leaves the environment unchanged."""
    from megatron.bridge.training.config import apply_environment_variables

    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    for name in (old, new):
        os.environ.pop(name, None)
    cfg = recipes()["qwen3_vl_2b_sft_fsdp_config"]()
    finalize_copy(cfg, 8)
    assert old not in os.environ
    apply_environment_variables(cfg)
    assert os.environ[old] == "expandable_segments:True"
    os.environ[old] = "max_split_size_mb:64"
    apply_environment_variables(cfg)
    assert os.environ[old] == "max_split_size_mb:64"
    os.environ[new] = "max_split_size_mb:64"  # which the older name would put out of force
    assert old not in recipes()["qwen3_vl_2b_sft_config"]().env_vars


@pytest.mark.parametrize(
    ("name", "experts"), [("qwen3_vl_30b_a3b_sft_config", True), ("qwen3_vl_8b_sft_config", False)]
)
def test_only_moe_recipes_set_cutlass_grouped_gemm_variable(name, experts):
    assert recipes()[name]().env_vars.get("NVTE_USE_CUTLASS_GROUPED_GEMM") == ("1" if experts else None)
