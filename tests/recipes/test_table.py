"""docs/recipes.md says where recipes fit, and it is what the planner says."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.planning.hardware import GIB, GPUS

import pytest
from qwen3vl_recipes.dry_run import memory_plan
from qwen3vl_recipes.registry import recipes
from qwen3vl_recipes.table import BEGIN, END, FREE, KINDS, smallest

pytestmark = pytest.mark.usefixtures("alone")
DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"
NAMES = [name for name, recipe in recipes().items() if recipe.gpus and "_dora_" not in name]


def rows() -> dict[str, list[str]]:
    """Cells of the table by recipe."""
    lines = DOCS.read_text().split(BEGIN)[1].split(END)[0].splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name.strip("`"): rest for name, *rest in cells}


def test_every_recipe_has_its_row():
    assert list(rows()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_fits_on_what_it_is_meant_for(name):
    recipe = recipes()[name]
    found = memory_plan(recipe.function(), recipe.gpus).peak.total
    assert found <= (1 - FREE) * GPUS[recipe.gpu].memory_bytes
    assert rows()[name][1] == f"{recipe.gpus} {recipe.gpu}: {found / GIB:.0f} GiB"


@pytest.mark.parametrize("kind", KINDS)
def test_the_fewest_that_fit(kind):
    for name in ("qwen3_vl_8b_pretrain_config", "qwen3_vl_235b_a22b_sft_fsdp_config"):
        gpus, found = smallest(recipes()[name], kind)
        assert rows()[name][2 + KINDS.index(kind)] == f"{gpus}: {found.peak.total / GIB:.0f} GiB"
