"""Simulate recipes at their real sizes on a fake GPU, and compare their memory with the planner's estimate.

    python -m benchmarks.simulation
    python -m benchmarks.simulation --recipes qwen3_vl_8b_peft_config --csv /tmp/simulation.csv
    python -m benchmarks.simulation --replan     # run nothing, update the planned memory of the rows

For the first and the last rank of each recipe, `qwen3vl train --simulate-gpu` takes three steps. Allocations and
launches of kernels and collectives are as in a run, but no values are computed. Routing is balanced.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from qwen3vl_recipes.registry import recipes

from benchmarks import flash_attn_shapes, measurement

GIB = 2**30
# Recipes of Qwen3.5 in mxfp8. On Blackwell, Transformer Engine needs flash-attn for attention heads of size 256.
# `flash_attn_shapes` replaces flash-attn if it is not installed.
WITH_FLASH_ATTN = {f"qwen35_vl_{size}_pretrain_fp8_mx_config" for size in ("35b_a3b", "122b_a10b", "397b_a17b")}


def simulated(recipe: str, rank: str) -> dict[str, Any]:
    """Simulate a rank with `qwen3vl train`, and return its JSON report, or {"error": last line of its output}."""
    command = [sys.executable, "-m", "qwen3vl_bridge", "train", "--simulate-gpu", "--json", "--recipe", recipe]
    with tempfile.TemporaryDirectory() as folder:
        path = [flash_attn_shapes.provide(Path(folder))] if recipe in WITH_FLASH_ATTN else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run([*command, "--rank", rank], capture_output=True, text=True, env=environment)
    if not done.stdout.startswith("{"):
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout)


def row(recipe: str, rank: str) -> dict[str, Any]:
    """Simulate a rank of a recipe, and return a row of the results."""
    seen = simulated(recipe, rank)
    gib = {name: f"{seen[name] / GIB:.2f}" if seen.get(name) else "" for name in ("planned", "peak", "reserved")}
    launches, collectives = seen.get("launches", {}), seen.get("collectives", {})
    planned = seen.get("planned")
    return {
        "recipe": recipe,
        "rank": f"{seen.get('rank', rank)} of {seen.get('world', '')}",
        "layers": seen.get("layers", ""),
        "planned GiB": gib["planned"],
        "allocated GiB": gib["peak"],
        "ratio": f"{seen['peak'] / planned:.3f}" if planned and not seen["error"] else "",
        "reserved GiB": gib["reserved"],
        "kernels": sum(launches.get(kind, (0, 0))[0] for kind in ("kernel", "triton", "gemm")),
        "TFLOP of products": f"{launches.get('gemm', (0, 0))[1] / 1e12:.1f}",
        "collectives": sum(number for number, _ in collectives.values()),
        "GiB of collectives": f"{sum(nbytes for _, nbytes in collectives.values()) / GIB:.2f}",
        "error": seen.get("error") or "",
    }


@functools.cache
def _plan(recipe: str, layers: str) -> Any:
    from qwen3vl_bridge.planning.from_config import estimate_run

    from qwen3vl_recipes.dry_run import estimate_memory, finalize_copy

    cfg, gpus = recipes()[recipe](), recipes()[recipe].gpus
    if layers != "local":
        return estimate_memory(cfg, gpus)
    cfg.model.transformer_impl = "local"
    return estimate_run(finalize_copy(cfg, gpus), gpus)


def planned_now(one: dict[str, str]) -> float:
    """Return the planner's GiB for the rank of a row. Qwen3.5 with local layers needs flash-linear-attention."""
    from qwen3vl_recipes.simulation import find_stage

    return find_stage(_plan(one["recipe"], one["layers"]), int(one["rank"].split()[0])).allocated / GIB


def replan(file: Path) -> None:
    """Update the planned memory and its ratio in all rows of a CSV file."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    for one in rows:
        if one["planned GiB"]:
            planned = planned_now(one)
            one |= {"planned GiB": f"{planned:.2f}", "ratio": f"{float(one['allocated GiB']) / planned:.3f}"}
    with file.open("w", newline="") as written:
        writer = csv.DictWriter(written, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


_OBJECTIVES = re.compile("_(dpo|kto|embedding|reranker)_config")  # whose rows cannot be simulated


def main() -> None:
    """Simulate recipes, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "simulation.csv")
    names = [n for n, one in recipes().items() if one.gpus and "dist_train" not in n and not _OBJECTIVES.search(n)]
    parser.add_argument("--recipes", nargs="+", default=names)
    parser.add_argument("--replan", action="store_true", help="only write again what is planned, of every row")
    options = parser.parse_args()
    if options.replan:
        replan(options.csv)
        return
    for name in options.recipes:
        for rank in ("0", "last") if recipes()[name].gpus > 1 else ("0",):
            found = row(name, rank)
            print("  ".join(str(value) for value in found.values()), flush=True)
            measurement.append(options.csv, [found])


if __name__ == "__main__":
    main()
