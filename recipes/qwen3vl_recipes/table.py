"""The tables of recipes in docs/recipes.md: on which GPUs each fits, and how the planner would split it instead.

    python -m qwen3vl_recipes.table --write docs/recipes.md

What lives here: the numbers of GPUs that are tried, and the tables. What may not: estimates
(`qwen3vl_bridge.planning`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_recipes.dry_run import beside_proposals, memory_plan
from qwen3vl_recipes.registry import Recipe, recipes

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.memory.estimate import Estimate

KINDS = ("H100", "H200", "B200")
BEGIN, END = "<!-- recipes: begin -->\n", "<!-- recipes: end -->\n"
BEGIN_PROPOSALS, END_PROPOSALS = "<!-- proposals: begin -->\n", "<!-- proposals: end -->\n"
# Part of a GPU's memory that is kept free, because estimates are not as precise as measurements.
FREE = 0.05
_MOST_NODES = 128


def smallest(recipe: Recipe, gpu: str) -> tuple[int, Estimate] | None:
    """The fewest GPUs of a kind on which a recipe fits with its parallel sizes, and the memory of each.

    Args:
        recipe: the recipe.
        gpu: a key of `GPUS`.

    Returns:
        None if it fits on none of the numbers that were tried: the recipe's own, 1, a node, and doubled from there.
        With separate vision ranks only the recipe's own number is tried.
    """
    from qwen3vl_bridge.planning.hardware import GPUS

    kind = GPUS[gpu]
    cfg = recipe.function()
    for gpus in sorted({1, recipe.gpus, *(kind.gpus_per_node * 2**power for power in range(_MOST_NODES.bit_length()))}):
        try:
            found = memory_plan(cfg, gpus)
        except (ValueError, AssertionError):  # the sizes need more GPUs, or the batch fewer
            continue
        if found.worst.total <= (1 - FREE) * kind.memory_bytes:
            return gpus, found
    return None


def table() -> str:
    """The table in Markdown."""
    from qwen3vl_bridge.planning.hardware import GIB
    from qwen3vl_bridge.planning.reports import words_of_ranks

    lines = [f"| recipe | split | on | {' | '.join(f'{kind}, fewest' for kind in KINDS)} |\n", "|---" * 6 + "|\n"]
    for name, recipe in recipes().items():
        if not recipe.gpus or "_dora_" in name:  # norms of weights in DoRA, which the planner does not model
            continue
        meant = memory_plan(recipe.function(), recipe.gpus)
        cells = [f"`{name}`", words_of_ranks(meant), f"{recipe.gpus} {recipe.gpu}: {meant.worst.total / GIB:.0f} GiB"]
        for kind in KINDS:
            found = smallest(recipe, kind)
            cells.append("none tried" if found is None else f"{found[0]}: {found[1].worst.total / GIB:.0f} GiB")
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def proposal_line(name: str, recipe: Recipe) -> str:
    """The planner's alternative to a recipe's split, and its relative time, as a line of Markdown."""
    from qwen3vl_bridge.planning.hardware import GIB
    from qwen3vl_bridge.planning.proposals import AS_FAST
    from qwen3vl_bridge.planning.reports import words_of, words_of_training

    own, (first, *_) = beside_proposals(recipe.function(), recipe.gpus, recipe.gpu)
    times, held = own.seconds_per_row / first.seconds_per_row, first.estimate
    words = f"{words_of(held.split)}; {words_of_training(held.training)}", f"{held.worst.total / GIB:.0f} GiB"
    cells = [
        f"`{name}`",
        words_of(own.estimate.split),
        *(words if times >= AS_FAST else ("the same", "")),
        f"{times:.2f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def proposals() -> str:
    """The table in Markdown, of recipes for which the planner has a time and a proposal."""
    lines = ["| recipe | its split | the planner's first | holds | times as long |\n", "|---" * 5 + "|\n"]
    for name, recipe in recipes().items():
        if recipe.gpus and not any(kind in name for kind in ("_dora_", "_dist_train_")):
            lines.append(proposal_line(name, recipe))
    return "".join(lines)


def main() -> None:
    """Print the tables, or write them into a file between their marks."""
    parser = argparse.ArgumentParser(
        description="The tables of recipes: where each fits, and how else it could be split."
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="put them into this file, between the marks")
    file = parser.parse_args().write
    from qwen3vl_bridge.compat.library_logs import quiet

    quiet()
    made = {(BEGIN, END): table(), (BEGIN_PROPOSALS, END_PROPOSALS): proposals()}
    if file is None:
        print(*made.values(), sep="\n")
        return
    text = file.read_text()
    for (begin, end), one in made.items():
        before, rest = text.split(begin)
        text = before + begin + one + end + rest.split(end)[1]
    file.write_text(text)


if __name__ == "__main__":
    main()
