"""Every recipe trains: one step of its twin, split as the recipe splits, is the step of the whole twin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from qwen3vl_recipes.registry import recipes

from tests.forked import run_ranks
from tests.noise import SEEDS, allowed, check, rounded_folder
from tests.qwen3_5.tiny import make_checkpoint
from tests.training.running import train

from .twin import family, pattern, twin

NAMES = [name for name, recipe in recipes().items() if recipe.gpus]
FIGURES = ("loss", "grad_norm")
ROUNDED = 2**-6  # of a loss in bfloat16, relative: four of its roundings


def errors(found, expected) -> dict[str, float]:
    """Relative."""
    return {name: abs(found[name] / expected[name] - 1) for name in FIGURES}


@pytest.fixture(scope="module")
def places(untied_folder, tied_folder, moe_folder, tmp_path_factory):
    """The tiny checkpoints of each family, and the conversations."""
    from examples.digits.dataset import make_dataset

    data = tmp_path_factory.mktemp("twins")
    make_dataset(data)
    folders = {"untied": untied_folder, "tied": tied_folder, "moe": moe_folder}
    for kind, options in (("untied", {}), ("tied", {"tied": True}), ("moe", {"moe": True})):
        folders[f"qwen3_5 {kind}"] = make_checkpoint(tmp_path_factory.mktemp("qwen3_5"), **options)
    return {kind: str(folder) for kind, folder in folders.items()}, str(data)


@pytest.fixture(scope="module")
def whole(places, tmp_path_factory):
    """The step of each family in one process and float32, and limits of errors."""
    (folders, data), root = places, tmp_path_factory.mktemp("neighbours")
    found = {}
    for name in (
        *("qwen3_vl_2b_sft_config", "qwen3_vl_8b_sft_config", "qwen3_vl_30b_a3b_sft_config"),
        *("qwen35_vl_2b_sft_config", "qwen35_vl_9b_sft_config", "qwen35_vl_35b_a3b_sft_config"),
    ):
        kind, noises = family(name), []
        (expected,) = train(twin(name, folders[kind], data, whole=True, exact=True))
        for seed in SEEDS:
            near = rounded_folder(Path(folders[kind]), root / f"{kind} {seed}", seed)
            (other,) = train(twin(name, str(near), data, whole=True, exact=True))
            noises.append(errors(other, expected))
        found[kind] = expected, allowed(noises)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted({pattern(name).ranks for name in NAMES}))
def test_a_step_of_every_twin(ranks, places, whole, tmp_path):
    folders, data = places
    # Recipes of which the twins have the same settings, all of them, are one run.
    alike: dict[str, list[str]] = {}
    for name in NAMES:
        if pattern(name).ranks == ranks:
            alike.setdefault(str(twin(name, folders[family(name)], data).to_dict()), []).append(name)
    names = [same[0] for same in alike.values()]
    run_ranks(
        "tests.recipes.twins_on_ranks", ranks, tmp_path / "found.pt", json.dumps(names), json.dumps(folders), data
    )
    found = torch.load(tmp_path / "found.pt")
    assert found.keys() == set(names)
    print(f"{ranks} ranks: {len(names)} runs stand for {sum(map(len, alike.values()))} recipes")
    for name, step in found.items():
        expected, limits = whole[family(name)]
        compared = errors(step, expected)
        if "_peft_" in name:  # the whole twin has no adapters
            del compared["grad_norm"]
        print(name)
        check(compared, limits)
        assert abs(step["rounded"] / expected["loss"] - 1) <= ROUNDED, (name, step, expected)
        assert step["trained"] > 0 and step["strayed"] == 0
        assert step["changed"] > step["trained"] / 2, (name, step)
        assert step["saved"] > 0, name


def test_the_patterns_are_those_of_the_recipes():
    patterns = {name: pattern(name) for name in NAMES}
    assert {one.ranks for one in patterns.values()} <= {1, 2, 4, 8}
    assert patterns["qwen3_vl_8b_sft_config"].tensor == 2 and patterns["qwen3_vl_8b_sft_config"].data == 2
    assert max(one.pipeline for one in patterns.values()) == max(one.context for one in patterns.values()) == 2
    apart = [one for name, one in patterns.items() if "_dist_train_" in name]
    assert len(apart) == 2 and all(one.vision and one.vision % one.vision_tensor == 0 for one in apart)
    for way in ("tensor", "pipeline", "expert", "vision_tensor"):
        assert {getattr(one, way) for one in apart} == {1, 2}, way
    assert not any(one.vision for name, one in patterns.items() if "_dist_train_" not in name)
