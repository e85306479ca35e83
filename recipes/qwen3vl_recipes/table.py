"""Write benchmarks/results/recipes.md: each recipe's planned and simulated memory, and the GPUs on which it fits.

Run `python -m qwen3vl_recipes.table --write benchmarks/results/recipes.md` in the repository.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_recipes.dry_run import estimate_memory
from qwen3vl_recipes.registry import Recipe, recipes

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.estimate import MemoryEstimate

KINDS = ("H100", "H200", "B200")
BEGIN, END = "<!-- recipes: begin -->\n", "<!-- recipes: end -->\n"
# Fraction of a GPU's memory that must remain free, because estimates are not exact.
FREE = 0.05
_MOST_NODES = 128
# benchmarks/simulation.py writes this file.
SIMULATIONS = Path("benchmarks/results/simulation.csv")


def smallest(recipe: Recipe, gpu: str) -> tuple[int, MemoryEstimate] | None:
    """Return the smallest number of GPUs on which a recipe fits with its parallel sizes, and the memory estimate.

    The numbers tried are the recipe's own, 1, and the GPUs of a node times powers of two. Return None if the recipe
    fits on none of them. A recipe with separate vision ranks supports only its own number.
    """
    from qwen3vl_bridge.planning.hardware import GPUS

    kind = GPUS[gpu]
    cfg = recipe()
    for gpus in sorted({1, recipe.gpus, *(kind.gpus_per_node * 2**power for power in range(_MOST_NODES.bit_length()))}):
        try:
            found = estimate_memory(cfg, gpus)
        except (ValueError, AssertionError):  # too few GPUs for the parallel sizes, or too many for the batch
            continue
        if found.peak.total <= (1 - FREE) * kind.memory_bytes:
            return gpus, found
    return None


def latest_simulations(file: Path = SIMULATIONS) -> dict[str, list[dict[str, str]]]:
    """Return the latest simulations of each recipe, one for each simulated rank and layer implementation."""
    with file.open() as lines:
        rows = {(row["recipe"], row["rank"], row["layers"]): row for row in csv.DictReader(lines)}
    found: dict[str, list[dict[str, str]]] = {}
    for (recipe, *_), row in sorted(rows.items(), key=lambda item: int(item[0][1].split()[0])):
        found.setdefault(recipe, []).append(row)
    return found


def table() -> str:
    """Return the table of all recipes for GPUs, in Markdown."""
    from qwen3vl_bridge.planning.hardware import GIB
    from qwen3vl_bridge.planning.plan_reports import describe_parallelism

    titles = ["recipe", "parallelism", "on", "simulated / planned GiB", f"fewest {' / '.join(KINDS)}"]
    lines, measured = [f"| {' | '.join(titles)} |\n", "|---" * len(titles) + "|\n"], latest_simulations()
    for name, recipe in recipes().items():
        if not recipe.gpus:
            continue
        planned = estimate_memory(recipe(), recipe.gpus)
        memory = f"{planned.peak.total / GIB:.0f} GiB"
        cells = [f"`{name}`", describe_parallelism(planned), f"{recipe.gpus} {recipe.gpu}: {memory}"]
        cells.append(cell(measured.get(name, [])))
        fewest = [smallest(recipe, kind) for kind in KINDS]
        cells.append("/".join("-" if found is None else str(found[0]) for found in fewest))
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def cell(ranks: list[dict[str, str]]) -> str:
    """Return the table cell with simulated and planned GiB, of the ranks simulated with Transformer Engine's layers."""
    pairs = (f"{x['allocated GiB']} / {x['planned GiB']}" for x in ranks if x["layers"] == "transformer_engine")
    return ", ".join(dict.fromkeys(pairs)) or "-"


def main() -> None:
    """Print the table; with --write, write it into a file, between the marks `BEGIN` and `END`."""
    parser = argparse.ArgumentParser(description="Print the table of recipes and the GPUs on which each fits.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into this file, between the marks")
    file = parser.parse_args().write
    from qwen3vl_bridge.upstream.library_logs import quiet

    quiet()
    if file is None:
        print(table())
        return
    before, rest = file.read_text().split(BEGIN)
    file.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
