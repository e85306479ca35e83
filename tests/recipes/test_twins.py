"""Every recipe trains: one step of its twin, split as the recipe splits, is the step of the whole twin."""

from __future__ import annotations

import json

import pytest
import torch
from qwen3vl_recipes.registry import recipes

from tests.forked import run_ranks
from tests.qwen3_5.tiny import make_checkpoint
from tests.training.running import train

from .twin import family, pattern, twin

NAMES = [name for name, recipe in recipes().items() if recipe.gpus]
# Of loss and gradient norm, relative, in the recipes' bfloat16. Linear attention (Qwen3.5) is further from float32
# there, and how far depends on the processor's kernels: a step of one process by 7e-4 and 2.7e-2, with experts 1.6e-3
# and 4.2e-2, so that two steps may differ by twice that. In float32 four ranks have the loss of one within 6e-8,
# and the norm within 2e-7.
LIMITS = {
    "qwen3_5 moe": (4e-3, 9e-2),  # measured 1.9e-3 and 5.1e-2
    "qwen3_5 tied": (2e-3, 5e-2),  # measured 3.6e-4 and 7.5e-3
    "qwen3_5 untied": (2e-3, 5e-2),  # measured 4.8e-4 and 5.2e-4
}
LIMITS |= dict.fromkeys(("untied", "tied", "moe"), (1e-3, 5e-3))  # measured 4.6e-4 and 1.2e-3


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
def whole(places):
    """The step of each family in one process."""
    folders, data = places
    found = {}
    for name in (
        *("qwen3_vl_2b_sft_config", "qwen3_vl_8b_sft_config", "qwen3_vl_30b_a3b_sft_config"),
        *("qwen35_vl_2b_sft_config", "qwen35_vl_9b_sft_config", "qwen35_vl_35b_a3b_sft_config"),
    ):
        (found[family(name)],) = train(twin(name, folders[family(name)], data, whole=True))
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
        expected = whole[family(name)]
        most_loss, most_norm = LIMITS[family(name)]
        loss = abs(step["loss"] / expected["loss"] - 1)
        norm = abs(step["grad_norm"] / expected["grad_norm"] - 1)
        print(f"{name}: loss {loss:.1e}, gradient norm {norm:.1e}")
        assert loss <= most_loss, (name, step, expected)
        assert step["trained"] > 0 and step["strayed"] == 0
        assert step["changed"] > step["trained"] / 2, (name, step)
        assert step["saved"] > 0, name
        assert "_peft_" in name or norm <= most_norm, (name, step, expected)


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
