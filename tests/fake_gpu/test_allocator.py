"""Recipes' expandable segments are those of torch's allocator, whatever initialises CUDA afterwards."""

import re

import pytest

from .conftest import ROOT

# How the script begins that docs/train.md has.
(SCRIPT,) = re.findall(r"```python\n(.*?)\nif __name__", (ROOT / "docs" / "train.md").read_text(), re.DOTALL)
# What a process does before it computes. Each runs in a child that has imported torch and nothing of ours.
WAYS = {
    "the program": "from qwen3vl_bridge.cli.main import main; main(['train', '--list'])",
    "the program as a module": """
sys.argv = ["qwen3vl", "train", "--list"]
try:
    runpy.run_module("qwen3vl_bridge", run_name="__main__")
except SystemExit as done:
    assert not done.code
""",
    "finetune.py": "runpy.run_path('recipes/finetune.py')",
    "pretrain.py": "runpy.run_path('recipes/pretrain.py')",
    "Megatron-Bridge's launcher": "import qwen3vl_recipes.run_recipe",
    "a recipe": "from qwen3vl_recipes import qwen3_vl_8b_peft_config",
    "a script as docs/train.md's": SCRIPT,
    "without recipes": "import qwen3vl_bridge",
    "CUDA first": "torch.cuda.init(); import qwen3vl_recipes",
}
EACH = """
import multiprocessing, runpy

def expandable(way):
    exec(way)
    torch.empty(1, device="cuda")
    return torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:
    result = dict(zip(sys.argv[1:], processes.map(expandable, sys.argv[1:], chunksize=1)))
"""


def test_every_way_in_has_them_unless_cuda_is_first(on_fake_gpu):
    run = on_fake_gpu(EACH, *WAYS.values())
    without = {name for name, way in WAYS.items() if not run.result[way]}
    assert without == {"without recipes", "CUDA first"}
    assert run.stderr.count("expandable segments have no effect") == 1


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
