"""Conversion of the largest released model is planned from headers alone, in few pieces and a few seconds."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from pathlib import Path

from qwen3vl_bridge.checkpoint import Topology, import_checkpoint
from qwen3vl_bridge.checkpoint.conversion_plan import make_plan, tensors_of
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, HuggingFace, TorchDist
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec
from qwen3vl_bridge.models.qwen3_5.presets import config_dict
from qwen3vl_bridge.models.qwen3_5.table import table
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import expand

import pytest

from tests.checkpoint.support import entry, file_of

from .test_table import MTP_PARAMETERS, PARAMETERS

SIZE = "397B-A17B"
FILES = 94  # as many as the released model has
SECONDS = 20  # of this process's own time; measured 6.6 and 9.2 on a busy machine


@pytest.fixture(scope="module")
def model():
    dimensions = dimensions_of(config_dict(SIZE))
    rows = list(expand(table(), dimensions))
    return rows, {"hf": HuggingFace(dimensions), "fsdp": FsdpDtensor(dimensions), "dist": TorchDist.of(dimensions)}


@pytest.mark.parametrize(("source", "target"), [("hf", "fsdp"), ("hf", "dist"), ("fsdp", "hf"), ("dist", "hf")])
def test_the_largest_model(model, source, target):
    """Names and shapes are all there is of it. Measured 1.3 to 2.2 s; the work is bound by what is to be moved."""
    rows, layouts = model
    there = {name: TensorSpec(name, "bfloat16", shape) for name, shape in tensors_of(rows, layouts[source]).items()}
    plan = make_plan(rows, layouts[source], layouts[target], there, where="here")
    assert plan.numel == PARAMETERS[SIZE] + MTP_PARAMETERS[SIZE]
    assert {name: spec.shape for name, spec in plan.specs.items()} == tensors_of(rows, layouts[target])
    assert not plan.transposed and not plan.cast
    pieces = sum(len(task.segments) for task in plan.tasks)
    print(f"{len(there)} tensors to {len(plan.tasks)} by {pieces} pieces")
    assert pieces <= 2 * (len(there) + len(plan.tasks))


@pytest.fixture(scope="module")
def released(model, tmp_path_factory) -> Path:
    """Configuration, index and headers as the released model has them; the numbers are holes that take no room."""
    rows, layouts = model
    folder, shapes = tmp_path_factory.mktemp("released"), tensors_of(rows, layouts["hf"])
    weight_map = {}
    for number, names in enumerate(itertools.batched(shapes, -(-len(shapes) // FILES)), 1):
        header, end = {}, 0
        for name in names:
            header[name] = entry("BF16", shapes[name], (end, end := end + 2 * math.prod(shapes[name])))
        file = folder / f"model-{number:05}-of-{FILES:05}.safetensors"
        file.write_bytes(start := file_of(header, 0))
        os.truncate(file, len(start) + end)
        weight_map |= dict.fromkeys(names, file.name)
    (folder / "config.json").write_text(json.dumps(config_dict(SIZE)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_its_import_is_planned_from_files(released, ckpt_format, tmp_path):
    """Headers are read, the plan is proven, every byte of the result has its place, for eight ranks of experts."""
    begun = time.process_time()
    options = dict(ckpt_format=ckpt_format, topology=Topology(ep=8), dry_run=True)
    report = import_checkpoint(released, tmp_path / "megatron", **options)
    seconds = time.process_time() - begun
    print(f"{ckpt_format}: {seconds:.1f} s")
    assert report.parameters == PARAMETERS[SIZE] + MTP_PARAMETERS[SIZE]
    assert seconds < SECONDS and not list(tmp_path.iterdir())
