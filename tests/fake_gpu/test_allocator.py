"""Recipes' expandable segments are those of torch's allocator, whatever initialises CUDA afterwards."""

import pytest

SETTINGS = 'result["expandable"] = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]'
RECIPE = "from qwen3vl_recipes import qwen3_vl_8b_peft_config"
MEGATRON = "import qwen3vl_bridge, megatron.bridge"


@pytest.mark.parametrize(("first", "then", "variables", "expandable", "warns"), [
    (RECIPE, MEGATRON, {}, True, False), (MEGATRON, RECIPE, {}, False, True),
    (MEGATRON, RECIPE, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True, False),
    (RECIPE, MEGATRON, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False, False),
], ids=["recipe first", "Megatron-Bridge first", "in the environment", "off in the environment"])  # fmt: skip
def test_expandable_segments(on_fake_gpu, first, then, variables, expandable, warns):
    run = on_fake_gpu(f"{first}\n{then}\ntorch.empty(1, device='cuda')\n{SETTINGS}", **variables)
    assert run.result["expandable"] == expandable
    assert ("expandable segments have no effect" in run.stderr) == warns
