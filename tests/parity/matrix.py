"""Every parallel layout of a model with every content and kind of rows: cases, runs and the table of errors.

    python -m tests.parity.matrix [--models qwen3_5] [--write-table benchmarks/results/parity.md]

runs all cases; the test suite runs some of each layout. Qwen3.5 is trained with multi-token prediction.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint as make_qwen3_vl
from qwen3vl_bridge.weights.rows import ExpertLayout

from tests.helpers.forked import results_of_ranks
from tests.models.qwen3_5.tiny import make_checkpoint as make_qwen3_5
from tests.models.qwen4_exp.tiny import make_checkpoint as make_qwen4_exp
from tests.parity.on_ranks import errors_of_cases
from tests.parity.references import MATRIX_CONTENTS, write_references, write_settings
from tests.parity.topologies import CHUNKWISE, MODULES, TOPOLOGIES, Topology

FAMILIES = ("dense", "MoE")
ERRORS = ("loss", "gradient", "grad_norm", "weight")


@dataclass(frozen=True)
class Models:
    """The folders of the two models."""

    make: Any
    options: Mapping[str, Mapping[str, Any]]  # of `make`, by `FAMILIES`
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of the provider
    refused: tuple[str, ...] = ()  # topologies that the family does not allow


MODELS = {
    "qwen3_vl": Models(make_qwen3_vl, {"dense": dict(seed=1), "MoE": dict(seed=3, moe=True)}),
    "qwen3_5": Models(
        make_qwen3_5,
        {
            "dense": dict(seed=0, mtp=ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT),
            "MoE": dict(seed=4, moe=True, mtp=ExpertLayout.OUTPUT_MAJOR),
        },
        settings=dict(mtp_loss_scaling_factor=0.3),
        refused=("TP2",),
    ),
    # Its reference needs transformers 5.16 or later. Ranks have microbatches with other numbers of rows.
    "qwen4_exp": Models(
        make_qwen4_exp,
        {"MoE": dict(seed=5, mtp=False)},
        settings=dict(variable_seq_lengths=True),
        refused=("TP2", "EP2, allgather", "EP2, HybridEP"),
    ),
}
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"

Case = tuple[str, str, str, str]
Limits = Mapping[str, Mapping[str, float]]  # of each family's errors


def cases(ranks: int, topologies: dict[str, Topology] = TOPOLOGIES) -> list[Case]:
    """Return all [family, topology, content, rows] for this number of ranks, sorted by topology."""
    return [
        (family, name, content, rows)
        for name, topology in topologies.items()
        if topology.ranks == ranks
        for family in topology.families
        for content, rows in itertools.product(MATRIX_CONTENTS, topology.rows)
    ]


# A case of each kind of parallelism on two ranks, with every content in its microbatches: what runs by default.
EACH: list[Case] = [
    ("MoE", "TP2+SP+EP2", "mixed", "padded"), ("MoE", "PP2", "mixed", "packed"), ("dense", "CP2", "mixed", "packed"),
    ("dense", "PP2+VPP2", "mixed", "padded"), ("dense", "DP2", "mixed", "packed"),
    ("MoE", "EP2, DeepEP", "mixed", "padded"), ("MoE", "EP2, HybridEP", "mixed", "packed"),
]  # fmt: skip


def some_cases(ranks: int, each: int, *, both: bool) -> list[Case]:
    """Return this many cases of each topology, chosen so that each kind is covered."""
    groups: dict[str, dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case in cases(ranks):
        groups[case[1]][case[0]].append(case)
    models = [
        group
        for turn, families in enumerate(groups.values())
        for group in (list(families.values()) if both else [list(families.values())[turn % len(families)]])
    ]
    # Steps of 5, which has no factor in common with the number of contents and rows, visit every combination in time;
    # begun at 2 they do with the topologies there are, which a test watches.
    return [group[(5 * (each * turn + i) + 2) % len(group)] for turn, group in enumerate(models) for i in range(each)]


def with_references(
    models: dict[str, Path], to: Path, contents: Iterable[str] = MATRIX_CONTENTS, **settings: Any
) -> tuple[dict[str, Path], Limits]:
    """Copy models, and write the reference results with these settings and the limits of errors."""
    folders = {family: shutil.copytree(folder, to / family) for family, folder in models.items()}
    for folder in folders.values():
        write_settings(folder, settings)
    return folders, {family: write_references(folder, contents) for family, folder in folders.items()}


def run(
    chosen: list[Case], folders: dict[str, Path], ranks: int, *, show: bool = False
) -> dict[Case, dict[str, float]]:
    """Run cases in processes with gloo and return their errors; print them if `show`."""
    return results_of_ranks(errors_of_cases, ranks, chosen, folders, timeout=60 * len(chosen), show=show)


def table(found: dict[Case, dict[str, float]]) -> str:
    groups: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for (family, topology, _, _), errors in found.items():
        groups[topology, family].append(errors)
    lines = ["| split | model | cases | loss | gradient | gradient norm | weights |", "|---|---|---|---|---|---|---|"]
    order = list(TOPOLOGIES | MODULES | CHUNKWISE)
    for topology, family in sorted(groups, key=lambda group: (order.index(group[0]), group[1])):
        errors = groups[topology, family]
        figures = [max((e[name] for e in errors if name in e), default=None) for name in ERRORS]
        cells = ["–" if figure is None else f"{figure:.1e}" for figure in figures]
        lines.append(" | ".join([f"| {topology}", family, str(len(errors)), *cells]) + " |")
    return "\n".join(lines)


def wrong(found: dict[Case, dict[str, float]], limits: Limits) -> dict[Case, dict[str, float]]:
    """Return the cases with errors above the limits of their family."""
    return {
        case: errors
        for case, errors in found.items()
        if any(not errors[name] <= limit for name, limit in limits[case[0]].items() if name in errors)
    }


def check(chosen: list[Case], folders: dict[str, Path], limits: Limits, ranks: int) -> None:
    found = run(chosen, folders, ranks)
    print(table(found), limits)
    assert found.keys() == set(chosen)
    assert not wrong(found, limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write-table", type=Path, help="put the table of errors between this file's marks")
    parser.add_argument("--topology", action="append", choices=TOPOLOGIES, help="only this one; may be repeated")
    parser.add_argument("--models", choices=MODELS, default="qwen3_vl", help="of which family (default: %(default)s)")
    arguments: Any = parser.parse_args()
    models = MODELS[arguments.models]
    wanted = set(arguments.topology or TOPOLOGIES) - set(models.refused)

    found: dict[Case, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        made = {family: models.make(Path(scratch) / family, **options) for family, options in models.options.items()}
        folders, limits = with_references(made, Path(scratch) / "references", **models.settings)
        for ranks in sorted({topology.ranks for topology in TOPOLOGIES.values()}):
            chosen = [case for case in cases(ranks) if case[1] in wanted]
            found |= run(chosen, folders, ranks, show=True) if chosen else {}
    print(table(found))
    if too_far := wrong(found, limits):
        sys.exit(f"further off than {limits}: {too_far}")
    if arguments.write_table:
        before, rest = arguments.write_table.read_text().split(BEGIN)
        _, after = rest.split(END)
        arguments.write_table.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")
    print(f"{len(found)} cases, all within {limits}")


if __name__ == "__main__":
    main()
