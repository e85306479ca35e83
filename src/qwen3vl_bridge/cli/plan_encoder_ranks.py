"""`qwen3vl plan --dist-train`: the number of vision ranks, and the memory of both kinds of ranks.

What lives here: its options and results. What may not: the rule (`planning/encoder_sizing.py`), the other options
(`plan.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.planning import reports
from qwen3vl_bridge.planning.encoder_sizing import DistProposal, size
from qwen3vl_bridge.planning.hardware import GIB, Gpu
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.speed.stage_times import PUBLISHED
from qwen3vl_bridge.planning.split import Split

_OPTIONS = ("vision_gpus", "vision_tp", "patches_per_token", "patches_per_frame", "largest_frame")
_WITH = "with --dist-train:"


def add_options(parser: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Add the options that go with --dist-train.

    Args:
        parser: to add them to.
        positive: parses a number of 1 or more.
    """
    add = parser.add_argument
    add("--dist-train", action="store_true", help="place the vision tower on separate ranks, some of --gpus; "
    "their number follows the rule in docs/dist_train.md")  # fmt: skip
    add("--vision-gpus", type=positive, metavar="N", help=f"{_WITH} number of the tower's ranks, overriding the rule")
    add("--vision-tp", type=positive, metavar="N", help=f"{_WITH} the tower's tensor parallelism")
    for option, words, usual in (
        ("--patches-per-token", "patches of rows divided by their tokens", PUBLISHED.patches),
        ("--patches-per-frame", "patches in the frame that contains a patch, averaged over patches", PUBLISHED.frame),
        ("--largest-frame", "patches in a row's largest frame, averaged over rows", PUBLISHED.largest),
    ):
        add(option, type=float, metavar="X", help=f"{_WITH} {words} (default: {usual}, the mix of docs/packing.md)")


def check_unused(options: argparse.Namespace) -> None:
    """Refuse options that only --dist-train reads.

    Raises:
        ValueError: one of them is given.
    """
    given = [f"--{name.replace('_', '-')}" for name in _OPTIONS if getattr(options, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} without --dist-train, expected both or neither")


def run(
    options: argparse.Namespace,
    config: Mapping[str, Any],
    gpu: Gpu,
    training: Training,
    sizes: Mapping[str, Any],
    *,
    choose: bool,
) -> bool:
    """Print sizes that fit.

    Args:
        options: as parsed.
        config: a Qwen3-VL `config.json`.
        gpu: the kind of GPU.
        training: its settings, which `choose` completes.
        sizes: the given sizes of the language model.
        choose: choose the other sizes, sharding and recomputation; False if `sizes` and `training` are complete.

    Returns:
        Whether anything fits.

    Raises:
        ValueError: invalid sizes.
    """
    language = None
    given = {"patches": "patches_per_token", "frame": "patches_per_frame", "largest": "largest_frame"}
    chosen = {name: value for name, option in given.items() if (value := getattr(options, option)) is not None}
    mix = replace(PUBLISHED, **chosen)
    ranks = {"vision": options.vision_gpus, "vision_tp": options.vision_tp}
    fixed = {name: number for name, number in ranks.items() if number is not None}
    if choose:
        fixed |= sizes
    else:
        one = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
        together = options.sequence_parallel
        parallel = sizes.get("tp", 1) > 1 if together is None else together
        world = one * sizes.get("ep", 1) * (sizes.get("etp") or sizes.get("tp", 1))
        language = Split(world, **sizes, sequence_parallel=parallel, tower=False)
    found = size(config, options.gpus, gpu, training, language=language, mix=mix, fixed=fixed)
    if options.json:
        print(reports.as_json([dump(one, gpu.memory_bytes) for one in found]))
    else:
        print_sizes(found, gpu.memory_bytes)
    return bool(found)


def dump(found: DistProposal, memory: int) -> dict[str, Any]:
    """An estimate for JSON output, with the values specific to separate vision ranks."""
    one = found.sized
    return reports.dump_estimate(found.estimate, memory) | {
        "dist_train": one.split.settings(),
        "vision_ranks_needed": one.needed,
        "keeps_up": one.keeps_up,
        "vision_seconds": one.vision,
        "language_seconds": list(one.language),
        "seconds_per_row": one.seconds_per_row,
    }


def print_sizes(found: Sequence[DistProposal], memory: int) -> None:
    """One line for each choice of sizes, the best first; then the estimate and settings of the best."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not found:
        console.print(
            "nothing fits together with a vision tower that keeps up: use more GPUs, shorter rows, --max-patches, or "
            "--vision-gpus",
            style="red",
        )
        return
    table = Table(title=f"{found[0].sized.split.world} GPUs of {memory / GIB:.1f} GiB, the cheapest first")
    for name in ("vision", "language", "memory and recomputation"):
        table.add_column(name, overflow="fold")
    for name in ("vision ranks needed", "the tower's time, relative to the slowest stage", "GiB", "relative time"):
        table.add_column(name, justify="right", overflow="fold")
    for one in found:
        sized, vision, language = one.sized, one.sized.split.vision, one.sized.split.language
        table.add_row(
            f"{vision.world}: {reports.words_of(vision)}",
            f"{language.world}: {reports.words_of(language)}",
            reports.words_of_training(one.estimate.training),
            f"{sized.needed:.1f}",
            f"{sized.vision / max(sized.language):.0%}",
            " and ".join(f"{part.total / GIB:.1f}" for part in _peak_ranks(one)),
            f"{sized.seconds_per_row / found[0].sized.seconds_per_row:.2f}",
        )
    console.print(table)
    reports.print_estimate(found[0].estimate, memory)
    for name, value in found[0].sized.split.settings().items():
        console.print(f"cfg.model.dist_train.{name} = {value}", highlight=False)


def _peak_ranks(found: DistProposal) -> tuple[Any, Any]:
    vision, *language = found.estimate.stages
    return vision, max(language, key=lambda stage: stage.total)
