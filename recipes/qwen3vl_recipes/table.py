"""The table of recipes in docs/recipes.md: what a rank of each allocated in a rehearsal, and on which GPUs it fits.

Written by `python -m qwen3vl_recipes.table --write docs/recipes.md`, in the repository.
"""

from __future__ import annotations

import argparse
import csv
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
# Written by benchmarks/rehearsal.py.
REHEARSALS = Path("benchmarks/results/rehearsal.csv")


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


def latest_rehearsals(file: Path = REHEARSALS) -> dict[str, list[dict[str, str]]]:
    """For each recipe the latest row of each of its ranks that were rehearsed, with each kind of layers."""
    with file.open() as lines:
        rows = {(row["recipe"], row["rank"], row["layers"]): row for row in csv.DictReader(lines)}
    found: dict[str, list[dict[str, str]]] = {}
    for (recipe, *_), row in sorted(rows.items(), key=lambda item: int(item[0][1].split()[0])):
        found.setdefault(recipe, []).append(row)
    return found


def table() -> str:
    """The table in Markdown."""
    from qwen3vl_bridge.planning.hardware import GIB
    from qwen3vl_bridge.planning.plan_reports import describe_ranks

    titles = ["recipe", "split", "on", "rehearsed / planned GiB", f"fewest {' / '.join(KINDS)}"]
    lines, measured = [f"| {' | '.join(titles)} |\n", "|---" * len(titles) + "|\n"], latest_rehearsals()
    for name, recipe in recipes().items():
        if not recipe.gpus:
            continue
        meant = memory_plan(recipe(), recipe.gpus)
        cells = [f"`{name}`", describe_ranks(meant), f"{recipe.gpus} {recipe.gpu}: {meant.peak.total / GIB:.0f} GiB"]
        cells.append(cell(measured.get(name, [])))
        fewest = [smallest(recipe, kind) for kind in KINDS]
        cells.append("/".join("-" if found is None else str(found[0]) for found in fewest))
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def cell(ranks: list[dict[str, str]]) -> str:
    """What ranks allocated with Transformer Engine's layers beside what was planned, in GiB; what two have in common
    once.
    """
    said = (f"{x['allocated GiB']} / {x['planned GiB']}" for x in ranks if x["layers"] == "transformer_engine")
    return ", ".join(dict.fromkeys(said)) or "-"


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
