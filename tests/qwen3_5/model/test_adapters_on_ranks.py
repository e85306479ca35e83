"""Adapters of a model that is split over two ranks, saved from there: transformers and `peft` get its losses."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.forked import run_ranks
from tests.model.adapters.adapters_on_ranks import Job
from tests.model.adapters.test_adapters_on_ranks import EP, PP, TP, check_what_is_saved

from .test_adapters import ALL


@pytest.fixture(scope="module")
def jobs(qwen3_5_folders):
    dense, moe = (str(qwen3_5_folders[kind]) for kind in ("dense", "moe"))
    experts = ALL | dict(adapt_experts=True)
    return [
        Job("tensors", dense, "ours", TP, ALL),
        Job("tensors LoRA", dense, "lora", TP, ALL),
        Job("tensors experts", moe, "ours", TP, experts),
        Job("experts", moe, "ours", EP, experts),
        Job("stages", dense, "ours", PP, ALL),
        Job("stages pattern", dense, "ours", PP, dict(target_modules=["*.layers.2.*.in_proj"])),
    ]


@pytest.fixture(scope="module")
def out(jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    run_ranks("tests.model.adapters.adapters_on_ranks", 2, json.dumps([asdict(job) for job in jobs]), folder)
    return folder


def test_losses_are_those_of_what_is_saved(jobs, out):
    for job in jobs:
        check_what_is_saved(job, out)


def test_stages_have_the_adapters_of_the_whole_model(jobs, out):
    names = {job.name: json.loads((out / f"{job.name}.json").read_text())["adapters"] for job in jobs}
    assert names["stages"] == names["tensors"]
    layer = "model.language_model.layers.2.linear_attn.in_proj"
    assert names["stages pattern"] == sorted(
        f"{layer}_{part}.lora_{k}.weight" for part in ["qkv", "z", "b", "a"] for k in "AB"
    )
