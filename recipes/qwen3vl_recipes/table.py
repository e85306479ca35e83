"""The table of recipes in docs/recipes.md: on which GPUs each fits, by the planner.

    python -m qwen3vl_recipes.table --write docs/recipes.md

What lives here: which numbers of GPUs are tried, and the table. What may not: estimates (`qwen3vl_bridge.planning`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_recipes.dry_run import memory_plan
from qwen3vl_recipes.registry import Recipe, recipes

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.estimate import Estimate

KINDS = ("H100", "H200", "B200")
BEGIN, END = "<!-- recipes: begin -->\n", "<!-- recipes: end -->\n"
# What is left free of a GPU: an estimate is none of a measurement's precision.
FREE = 0.05
_MOST_NODES = 128


def smallest(recipe: Recipe, gpu: str) -> tuple[int, Estimate] | None:
    """The fewest GPUs of a kind on which a recipe fits as it is split, and what each holds then.

    Args:
        recipe: it.
        gpu: a key of `GPUS`.

    Returns:
        None where it fits on no number that was tried: the recipe's own, 1, a node, and doubled from there. Vision and
        language on ranks of their own fit on the recipe's own or on none.
    """
    from qwen3vl_bridge.planning.hardware import GPUS

    kind = GPUS[gpu]
    cfg = recipe.function()
    for gpus in sorted({1, recipe.gpus, *(kind.gpus_per_node * 2**power for power in range(_MOST_NODES.bit_length()))}):
        try:
            found = memory_plan(cfg, gpus)
        except (ValueError, AssertionError):  # it cannot be split over so few, or its batch not over so many
            continue
        if found.worst.total <= (1 - FREE) * kind.memory_bytes:
            return gpus, found
    return None


def table() -> str:
    """In Markdown."""
    from qwen3vl_bridge.planning.hardware import GIB
    from qwen3vl_bridge.planning.printing import words_of_ranks

    lines = [f"| recipe | split | on | {' | '.join(f'{kind}, fewest' for kind in KINDS)} |\n", "|---" * 6 + "|\n"]
    for name, recipe in recipes().items():
        if not recipe.gpus or "_dora_" in name:  # whose norms of weights the planner does not count
            continue
        meant = memory_plan(recipe.function(), recipe.gpus)
        cells = [f"`{name}`", words_of_ranks(meant), f"{recipe.gpus} {recipe.gpu}: {meant.worst.total / GIB:.0f} GiB"]
        for kind in KINDS:
            found = smallest(recipe, kind)
            cells.append("none tried" if found is None else f"{found[0]}: {found[1].worst.total / GIB:.0f} GiB")
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def main() -> None:
    """Print the table, or put it into a file between its marks."""
    parser = argparse.ArgumentParser(description="The table of recipes: on which GPUs each fits.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it into this file, between the marks")
    file = parser.parse_args().write
    from qwen3vl_bridge.logs import quiet

    quiet()
    made = table()
    if file is None:
        print(made)
        return
    before, rest = file.read_text().split(BEGIN)
    file.write_text(before + BEGIN + made + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
