"""The table of recipes in docs/recipes.md: on which GPUs each fits.

Written by `python -m qwen3vl_recipes.table --write docs/recipes.md`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_recipes.dry_run import memory_plan
from qwen3vl_recipes.registry import Recipe, recipes

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.estimate import MemoryEstimate

KINDS = ("H100", "H200", "B200")
BEGIN, END = "<!-- recipes: begin -->\n", "<!-- recipes: end -->\n"
# Part of a GPU's memory that is kept free, because estimates are not as precise as measurements.
FREE = 0.05
_MOST_NODES = 128


def smallest(recipe: Recipe, gpu: str) -> tuple[int, MemoryEstimate] | None:
    """The fewest GPUs of a kind on which a recipe fits with its parallel sizes, and the memory of each.

    Tried are the recipe's own number, 1, a node, and doubled from there; with separate vision ranks only its own.
    """
    from qwen3vl_bridge.planning.hardware import GPUS

    kind = GPUS[gpu]
    cfg = recipe()
    for gpus in sorted({1, recipe.gpus, *(kind.gpus_per_node * 2**power for power in range(_MOST_NODES.bit_length()))}):
        try:
            found = memory_plan(cfg, gpus)
        except (ValueError, AssertionError):  # the sizes need more GPUs, or the batch fewer
            continue
        if found.peak.total <= (1 - FREE) * kind.memory_bytes:
            return gpus, found
    return None


def table() -> str:
    """The table in Markdown."""
    from qwen3vl_bridge.planning.hardware import GIB
    from qwen3vl_bridge.planning.plan_reports import describe_ranks

    lines = [f"| recipe | split | on | {' | '.join(f'{kind}, fewest' for kind in KINDS)} |\n", "|---" * 6 + "|\n"]
    for name, recipe in recipes().items():
        if not recipe.gpus or "_dora_" in name:  # norms of weights in DoRA, which the planner does not model
            continue
        meant = memory_plan(recipe(), recipe.gpus)
        cells = [f"`{name}`", describe_ranks(meant), f"{recipe.gpus} {recipe.gpu}: {meant.peak.total / GIB:.0f} GiB"]
        for kind in KINDS:
            found = smallest(recipe, kind)
            cells.append("none tried" if found is None else f"{found[0]}: {found[1].peak.total / GIB:.0f} GiB")
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def main() -> None:
    """Print the table, or write it into a file between its marks."""
    parser = argparse.ArgumentParser(description="The table of recipes: where each fits.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it into this file, between the marks")
    file = parser.parse_args().write
    from qwen3vl_bridge.compat.library_logs import quiet

    quiet()
    if file is None:
        print(table())
        return
    before, rest = file.read_text().split(BEGIN)
    file.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
