"""Memory and launches of recipes at their real sizes, on a fake GPU, beside the planner's estimate.

    python -m benchmarks.rehearsal
    python -m benchmarks.rehearsal --recipes qwen3_vl_8b_peft_config --csv /tmp/rehearsal.csv

For the first and the last rank of each recipe, `qwen3vl train --rehearse` takes three steps. Nothing is computed:
allocations, kernels and collectives are real, routing is balanced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from qwen3vl_recipes.registry import recipes

from benchmarks import measurement

GIB = 2**30


def rehearsed(recipe: str, rank: str) -> dict[str, Any]:
    """What the command reports as JSON, or {"error": its last line}."""
    command = [sys.executable, "-m", "qwen3vl_bridge", "train", "--rehearse", "--json", "--recipe", recipe]
    done = subprocess.run([*command, "--rank", rank], capture_output=True, text=True, env=os.environ)
    if not done.stdout.startswith("{"):
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout)


def row(recipe: str, rank: str) -> dict[str, Any]:
    """A row of the results."""
    seen = rehearsed(recipe, rank)
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


def main() -> None:
    """Rehearse, print and append to the results."""
    parser = measurement.parser(__doc__, "rehearsal.csv")
    parser.add_argument(
        "--recipes", nargs="+", default=[n for n, one in recipes().items() if one.gpus and "dist_train" not in n]
    )
    options = parser.parse_args()
    for name in options.recipes:
        for rank in ("0", "last") if recipes()[name].gpus > 1 else ("0",):
            found = row(name, rank)
            print("  ".join(str(value) for value in found.values()), flush=True)
            measurement.append(options.csv, [found])


if __name__ == "__main__":
    main()
