"""Functions replaced in a process with a GPU: at most eight, as listed in docs/compatibility.md."""

from qwen3vl_bridge.upstream.replacements import When

import pytest

from tests.helpers.flash_linear_attention import FOLDER, PYTHONPATH
from tests.upstream.documented import documented

# Imports of a run.
IMPORTS = """
import qwen3vl_bridge
from qwen3vl_bridge.upstream.replacements import replaced
result["before"] = len(replaced())
from megatron.bridge.training import finetune
import qwen3vl_bridge.training.step, qwen3vl_bridge.training.config
result["replaced"] = {one.name: one.when for one in replaced()}
"""
MOST = 8


@pytest.mark.slow
def test_functions_replaced_in_gpu_process_match_compatibility_page(on_fake_gpu):
    """Without Transformer Engine here, so only what is replaced with it too is counted."""
    found = on_fake_gpu(IMPORTS, **({"PYTHONPATH": PYTHONPATH} if FOLDER.is_dir() else {})).result
    assert found["before"] == 0
    assert When.NO_CUDA not in found["replaced"].values()
    always = {name for name, when in found["replaced"].items() if when == When.ALWAYS}
    assert always == {row.name for row in documented() if row.when == When.ALWAYS}
    linear_attention = {row.name for row in documented() if row.when == When.LINEAR_ATTENTION}
    dist_train = {row.name for row in documented() if row.when == When.DIST_TRAIN}  # not with linear attention
    assert len(always) + max(len(linear_attention), len(dist_train)) <= MOST
