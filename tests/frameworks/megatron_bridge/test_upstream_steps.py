"""Forward steps that Megatron-Bridge and verl have for Qwen3-VL train our models as transformers does in one process.

`qwen3_vl_step` cuts labels over context-parallel ranks and not the tokens; `vlm_step` cuts nothing, numbers tokens from
0 and expects a loss mask back; both give pictures without their pixels, or with them, to later pipeline stages. Qwen3.5
trains multi-token prediction along, which reads labels of other ranks.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.forked import run_ranks
from tests.noise import check
from tests.parity.matrix import MODELS
from tests.parity.references import write_references, write_settings

from .upstream_steps_on_ranks import CONTENT

QWEN3_5 = MODELS["qwen3_5"]
TOPOLOGIES = {"dense": ["CP2", "PP2"], "MoE": ["CP2"], "Qwen3.5": ["CP2"]}
STEPS = [("qwen3_vl_step", "rows"), ("qwen3_vl_step", "packed"), ("vlm_step", "rows"), ("vlm_step", "packed")]
CASES = [
    [family, topology, *step]
    for family, topologies in TOPOLOGIES.items()
    for topology in topologies
    # verl's fused kernels give the model no mask, by which multi-token prediction would know what is trained on.
    for step in [*STEPS, *[("fused", "packed")] * (family != "Qwen3.5")]
]


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder, tmp_path_factory):
    folders, limits = {}, {}
    qwen3_5 = QWEN3_5.make(tmp_path_factory.mktemp("Qwen3.5"), **QWEN3_5.options["dense"])
    for family, folder in (("dense", untied_folder), ("MoE", moe_folder), ("Qwen3.5", qwen3_5)):
        copy = shutil.copytree(folder, tmp_path_factory.mktemp(family) / "hf")  # they are other tests' too
        if family == "Qwen3.5":
            write_settings(copy, dict(QWEN3_5.settings))
        limits[family] = write_references(copy, [CONTENT])
        folders[family] = str(copy)
    output = tmp_path_factory.mktemp("steps") / "found.pt"
    run_ranks(
        "tests.frameworks.megatron_bridge.upstream_steps_on_ranks",
        2,
        output,
        json.dumps(CASES),
        json.dumps(folders),
        timeout=500,
    )
    return torch.load(output), limits


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_they_train_as_one_process_does(found, case):
    errors, limits = found
    check(errors[tuple(case)], limits[case[0]])
