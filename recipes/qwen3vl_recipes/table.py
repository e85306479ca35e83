"""The tables of recipes in docs/recipes.md: on which GPUs each fits, and how else the planner would split it.

    python -m qwen3vl_recipes.table --write docs/recipes.md

What lives here: which numbers of GPUs are tried, and the tables. What may not: estimates (`qwen3vl_bridge.planning`).
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
    from qwen3vl_bridge.planning.reports import words_of_ranks

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


def proposal_line(name: str, recipe: Recipe) -> str:
    """How else the planner would split a recipe, and how its time compares, as a line of Markdown."""
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
    """In Markdown: recipes whose time and first proposal the planner can tell."""
    lines = ["| recipe | its split | the planner's first | holds | times as long |\n", "|---" * 5 + "|\n"]
    for name, recipe in recipes().items():
        if recipe.gpus and not any(kind in name for kind in ("_dora_", "_dist_train_")):
            lines.append(proposal_line(name, recipe))
    return "".join(lines)


def main() -> None:
    """Print the tables, or put them into a file between their marks."""
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
