"""Expandable segments of torch's allocator: set by the commands and by the documented script, not by importing."""

import pytest

# The beginning of the script in docs/train.md.
SCRIPT = """
import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import qwen3vl_bridge
from qwen3vl_bridge.upstream.library_logs import quiet

quiet()
from megatron.bridge.training.finetune import finetune
from qwen3vl_recipes import qwen3_vl_8b_peft_config
"""
ENTRY = """
sys.argv = ["{script}", "--list"]
try:
    runpy.run_path("recipes/{script}", run_name="__main__")
except SystemExit as end:
    assert not end.code
"""
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
    "finetune.py": ENTRY.format(script="finetune.py"),
    "pretrain.py": ENTRY.format(script="pretrain.py"),
    "Megatron-Bridge's launcher": """
import qwen3vl_recipes.run_recipe
sys.argv = ["run_recipe"]
try:
    qwen3vl_recipes.run_recipe.main()
except SystemExit as end:
    assert "usage" in end.code
""",
    "a script as docs/train.md's": SCRIPT,
    "an import": "import qwen3vl_bridge; from qwen3vl_recipes import qwen3_vl_8b_peft_config",
    "CUDA first": "torch.cuda.init(); from qwen3vl_bridge.cli.main import main; main(['train', '--list'])",
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


@pytest.mark.slow
def test_commands_and_documented_script_enable_expandable_segments(on_fake_gpu):
    run = on_fake_gpu(EACH, *WAYS.values())
    without = {name for name, way in WAYS.items() if not run.result[way]}
    assert without == {"an import", "CUDA first"}


WARNS = """
import os
import qwen3vl_bridge, megatron.bridge
from qwen3vl_bridge.training.run_validation import BEFORE_RUN
from qwen3vl_recipes import qwen3_vl_2b_sft_config
cfg = qwen3_vl_2b_sft_config()
torch.cuda.init()
BEFORE_RUN[-1](cfg)
result["expandable"] = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "expandable", "warns"), [
    ({}, False, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True, False),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False, False),
], ids=["unset", "on", "off"])  # fmt: skip
def test_run_warns_if_cuda_alloc_conf_variable_is_not_set(on_fake_gpu, variables, expandable, warns):
    run = on_fake_gpu(WARNS, **variables)
    assert run.result["expandable"] == expandable
    assert run.stderr.count("PYTORCH_CUDA_ALLOC_CONF is not set") == int(warns)
