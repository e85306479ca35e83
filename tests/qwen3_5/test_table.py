"""The weight table against transformers: the same tensors in the same shapes; and the released sizes' parameters.

Conversion of the largest one is planned from headers alone, in few pieces and a few seconds.
"""

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
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.models.qwen3_5.presets import PRESETS, config_dict, hf_config
from qwen3vl_bridge.models.qwen3_5.table import table
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import expand, parameter_count

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

from tests.checkpoint.support import entry, file_of

MTP_PARAMETERS = {  # of released files' multi-token prediction, which transformers' models lack
    "0.8B": 20_452_864,
    "2B": 60_828_160,
    "4B": 120_599_552,
    "9B": 243_290_624,
    "27B": 424_699_392,
    "35B-A3B": 844_640_768,
    "122B-A10B": 2_523_679_232,
    "397B-A17B": 6_595_568_128,
}
PARAMETERS = {  # of transformers' models on the meta device
    "0.8B": 852_985_920,
    "2B": 2_213_241_664,
    "4B": 4_539_265_536,
    "9B": 9_409_813_744,
    "27B": 27_356_728_560,
    "35B-A3B": 35_107_181_936,
    "122B-A10B": 122_562_817_776,
    "397B-A17B": 396_802_360_816,
}


@pytest.mark.parametrize("size", PRESETS)
def test_tensors_of_every_size(size):
    config = hf_config(size)
    is_moe = PRESETS[size].experts is not None
    with torch.device("meta"):
        model = (Qwen3_5MoeForConditionalGeneration if is_moe else Qwen3_5ForConditionalGeneration)(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if PRESETS[size].tied:
        del expected["lm_head.weight"]
    dimensions = dimensions_of(config_dict(size))
    found = tensors_of(expand(table(), dimensions), HuggingFace(dimensions))
    mtp = {name: found.pop(name) for name in list(found) if name.startswith("mtp.")}
    assert found == expected
    assert sum(map(math.prod, expected.values())) == PARAMETERS[size]
    assert sum(map(math.prod, mtp.values())) == MTP_PARAMETERS[size]
    assert parameter_count(table(), dimensions) == PARAMETERS[size] + MTP_PARAMETERS[size]


@pytest.mark.parametrize("kind", ["dense", "moe", "3.6"])
def test_tensors_of_multi_token_prediction(qwen3_5_folders, kind):
    """Those of transformers' parts, in the layouts of released files."""
    folder = qwen3_5_folders[kind]
    model = ModelConfig(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    experts = model.expert_layout(shapes)
    assert tensors_of(model.rows(experts), HuggingFace(model.dimensions)) == shapes
    assert any(name.startswith("mtp.") for name in shapes)


def test_layers_without_a_list():
    """Transformers drops the interval where it saves, older files have nothing else."""
    config = config_dict("2B")
    listed = dimensions_of(config)
    del config["text_config"]["layer_types"]
    assert dimensions_of(config) == listed
    config["text_config"]["full_attention_interval"] = 3
    assert dimensions_of(config).indices["full_layers"] == tuple(range(2, 24, 3))


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
