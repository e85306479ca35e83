"""Draw the images of docs/architecture.md into docs/images.

    python -m scripts.draw_architecture                # write to docs/images
    python -m scripts.draw_architecture --output DIR   # write to another folder

The package computes what the images show: the tokens of a packed row on each rank (`token_index`), the numbers of
layers (built-in sizes), and the files of a family (registry).
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from qwen3vl_bridge.config.divisibility import row_length_multiple
from qwen3vl_bridge.core.layout import SequenceLayout, segment_multiple, token_index
from qwen3vl_bridge.registry import family, preset

from matplotlib.axes import Axes

from scripts.drawing import (
    BLUE,
    FOUR,
    GREEN,
    GREY,
    IMAGES,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    ROOT,
    arrow,
    box,
    canvas,
    cell,
    save,
)

PACKAGE = ROOT / "src" / "qwen3vl_bridge"


class Step(NamedTuple):
    """A box of the data flow: title, description, file of the package, and a color that says where it runs."""

    title: str
    does: str
    file: str
    colour: str


# The boxes in the order of the data flow, drawn four to a line.
DATA_FLOW = (
    Step("record", "read from a source", "data/sources.py", BLUE),
    Step("conversation", "converted to our format", "data/records.py", BLUE),
    Step("tokens", "one for each image yet", "data/chat_template.py", BLUE),
    Step("row plan", "which samples share a row", "data/packing.py", BLUE),
    Step("encoded sample", "pixels, tokens, loss mask", "data/encoding.py", BLUE),
    Step("TokenBatch", "positions, indices, layout", "data/collation.py", BLUE),
    Step("ModelInputs", "local(): this rank's share", "core/batch.py", GREEN),
    Step("on the device", "copied without a wait", "training/step.py", GREEN),
    Step("vision tokens", "and DeepStack features", "models/common/vision_tower.py", ORANGE),
    Step("hidden states", "embed, fuse by slots", "models/common/model.py", ORANGE),
    Step("logits", "text layers, DeepStack", "models/common/model.py", ORANGE),
    Step("losses [b, s]", "of long rows in chunks", "models/common/loss.py", ORANGE),
    Step("sum and count", "over tokens of the mask", "training/step.py", ORANGE),
    Step("gradient", "divided by all tokens once", "", ORANGE),
)


def draw_data_flow(file: Path) -> None:
    """Draw the steps from a record to the loss."""
    drawn, axes = canvas(9.2, 4.45)
    width, height, gap, left, line = 1.85, 0.72, 0.22, 0.85, 1.08
    for number, step in enumerate(DATA_FLOW):
        x, y = left + number % 4 * (width + gap), 3.55 - number // 4 * line
        box(axes, (x, y), (width, height), f"{step.title}\n{step.does}\n{step.file or 'megatron-core'}", step.colour)
        if number % 4:
            arrow(axes, (x - gap, y + height / 2), (x, y + height / 2))
        elif number:
            _turn(axes, (left + 3 * (width + gap) + width / 2, y + line), (x + width / 2, y + height))
    for label, place in (("data loading", 0), ("host", 1), ("device", 2.5)):
        y = 3.55 - place * line + height / 2
        axes.text(0.42, y, label, rotation=90, ha="center", va="center", fontsize=8.5, color=MUTED)
    axes.text(
        left + 2 * (width + gap),
        3.55 - 3 * line + height / 2,
        "Blue: processes that read ahead. Green: the rank's own, on the host.\n"
        "Orange: on the device. None of these steps makes the host wait for it.",
        fontsize=7.8,
        va="center",
    )
    save(drawn, file, "Data flow from a record to the loss")


def _turn(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw the arrow from the end of a line of boxes to the beginning of the next."""
    middle = (start[1] + end[1]) / 2
    axes.plot([start[0], start[0], end[0]], [start[1], middle, middle], color=MUTED, linewidth=1.1)
    arrow(axes, (end[0], middle), end)


# --- one packed row ---------------------------------------------------------------------------------------------------

DOCUMENTS, ROW, CP, SP = (14, 7, 17), 48, 2, 2


def packed_row() -> SequenceLayout:
    """Return a row of 48 tokens with three documents, as collation lays it out for CP 2 and SP 2."""
    assert ROW % row_length_multiple(CP, SP) == 0
    return SequenceLayout.packed_row(DOCUMENTS, multiple=segment_multiple(CP), total=ROW)


def tokens_of_ranks() -> dict[tuple[int, int], list[int]]:
    """Return the tokens (`token_index`) that each rank holds, by (context-parallel rank, sequence-parallel rank)."""
    layout = packed_row()
    return {(cp, sp): token_index(layout, CP, cp, SP, sp).flatten().tolist() for cp in range(CP) for sp in range(SP)}


def cell_name(token: int, rank: tuple[int, int], where: str) -> str:
    """Return the id of a token's cell in the SVG file, such as `token-row-5-cp0-sp1` or `token-slot3-5-cp0-sp1`."""
    return f"token-{where}-{token}-cp{rank[0]}-sp{rank[1]}"


def draw_packed_row(file: Path) -> None:
    """Draw the tokens of a packed row that each of four ranks holds."""
    layout, held = packed_row(), tokens_of_ranks()
    colours = dict(zip(held, FOUR, strict=True))
    padding = layout.padding_mask().tolist()
    rank_of = {token: rank for rank, tokens in held.items() for token in tokens}
    drawn, axes = canvas(9.2, 4.3)
    left, size = 0.5, (0.171, 0.3)

    def token(number: int, x: float, y: float, where: str) -> None:
        rank = rank_of[number]
        how = dict(hatch="////", alpha=0.55) if padding[number] else {}
        cell(axes, (x, y), size, cell_name(number, rank, where), facecolor=colours[rank], edgecolor="white", **how)
        ink = "white" if colours[rank] in FOUR[1::2] and not padding[number] else INK
        axes.text(x + size[0] / 2, y + 0.14, str(number), ha="center", va="center", fontsize=6.4, color=ink)

    axes.text(left, 4.0, "The row: three documents, each padded to a multiple of 2 x CP", fontweight="bold")
    for number in range(layout.total):
        token(number, left + number * size[0], 3.3, "row")
    begin = 0
    for number, (length, padded) in enumerate(zip(layout.lengths, layout.padded_lengths, strict=True)):
        x, width = left + begin * size[0], padded * size[0]
        name = f"document {number}: {length} tokens in {padded}" if length > 10 else f"{length} in {padded}"
        axes.plot([x + 0.02, x + width - 0.02], [3.68, 3.68], color=MUTED, linewidth=1.5)
        name = name if length else "padding"
        axes.text(x + width / 2, 3.78, name, ha="center", va="center", fontsize=7.5, color=MUTED)
        for chunk in range(1, 2 * CP):
            cut = x + chunk * width / (2 * CP)
            axes.plot([cut, cut], [3.2, 3.64], color=INK, linewidth=0.9, linestyle=(0, (2, 1.5)))
        begin += padded
    axes.text(left, 3.02, "Dashed: each segment's 2 x CP chunks. Rank r has chunks r and 2 x CP - 1 - r.", fontsize=7.8)
    axes.text(left, 2.6, "What each rank holds, slot by slot: token_index(layout, 2, cp, 2, sp)", fontweight="bold")
    for place, (rank, tokens) in enumerate(held.items()):
        y = 2.08 - place * 0.46
        axes.text(left, y + 0.15, f"CP {rank[0]}, SP {rank[1]}", fontsize=8.5, va="center")
        for slot, number in enumerate(tokens):
            token(number, left + 0.85 + slot * size[0] * 1.25, y, f"slot{slot}")
    axes.text(
        5.05,
        1.62,
        "One context-parallel rank's tokens are put one\n"
        "segment after the other and cut in SP parts, wherever\n"
        "segments end. Labels, loss mask, positions, padding\n"
        "mask, vision slots and DeepStack rows are gathers\n"
        "by this index.",
        fontsize=8.2,
        va="center",
        linespacing=1.5,
    )
    axes.text(left, 0.3, "Hatched: padding. Numbers: tokens of the flat batch.", fontsize=7.8, color=MUTED)
    save(drawn, file, "One packed row under CP 2 and SP 2, coloured by rank")


# --- DeepStack --------------------------------------------------------------------------------------------------------


class Towers(NamedTuple):
    """Numbers of vision layers, DeepStack layers and text layers of a released size."""

    size: str
    vision_layers: int
    taps: list[int]
    text_layers: int


def towers(size: str = "8B") -> Towers:
    """Return the numbers of layers of a built-in size."""
    config = preset(size)
    vision = config["vision_config"]
    text_layers = config["text_config"]["num_hidden_layers"]
    return Towers(size, vision["depth"], list(vision["deepstack_visual_indexes"]), text_layers)


def draw_deepstack(file: Path) -> None:
    """Draw the DeepStack features from the vision tower to the first text layers."""
    found = towers()
    drawn, axes = canvas(9.2, 4.6)
    vision_x, merger_x, way_x, text_x, wide = 0.35, 2.55, 4.75, 6.95, 1.75

    def row(place: int) -> float:
        return 3.3 - place * 0.78

    axes.text(vision_x, 4.25, f"Qwen3-VL {found.size}", fontweight="bold", fontsize=10)
    for x, title in ((vision_x, "vision tower"), (merger_x, "patch mergers"), (text_x, "text model")):
        axes.text(x + wide / 2, 3.98, title, ha="center", fontsize=8.5, color=MUTED)
    high = 0.5
    for place, tap in enumerate(found.taps):
        y = row(place)
        first = 0 if place == 0 else found.taps[place - 1] + 1
        box(axes, (vision_x, y), (wide, high), f"layers {first} to {tap}\ntap after layer {tap}", BLUE)
        box(axes, (merger_x, y), (wide, high), f"DeepStack merger {place}\nfour patches to one row", PURPLE)
        box(axes, (text_x, y), (wide, high), f"layer {place}\nadds features[{place}] to its output", ORANGE)
        arrow(axes, (vision_x + wide, y + high / 2), (merger_x, y + high / 2))
        arrow(axes, (merger_x + wide, y + high / 2), (text_x, y + high / 2))
        axes.text(
            (merger_x + wide + text_x) / 2, y + high / 2 + 0.08, f"features[{place}] [M, h]", ha="center", fontsize=7.5
        )
        if place:
            for x in (vision_x, text_x):
                arrow(axes, (x + wide / 2, row(place - 1)), (x + wide / 2, y + high))
    rest, last = len(found.taps), found.vision_layers - 1
    y = row(rest)
    box(axes, (vision_x, y), (wide, high), f"layers {found.taps[-1] + 1} to {last}", BLUE)
    box(axes, (merger_x, y), (wide, high), "merger\nvision tokens [M, h]", PURPLE)
    box(axes, (text_x, y), (wide, high), f"layers {rest} to {found.text_layers - 1}\nadd nothing", ORANGE)
    arrow(axes, (vision_x + wide, y + high / 2), (merger_x, y + high / 2))
    for x in (vision_x, text_x):
        arrow(axes, (x + wide / 2, row(rest - 1)), (x + wide / 2, y + high))
    # Vision tokens go into the embedding, before the first text layer.
    box(axes, (way_x, y), (wide, high), "embedding\nfuse: in place of placeholders", GREEN)
    arrow(axes, (merger_x + wide, y + high / 2), (way_x, y + high / 2))
    climb = way_x + wide + 0.12
    top = 3.88
    axes.plot(
        [way_x + wide, climb, climb, text_x + wide / 2], [y + high / 2, y + high / 2, top, top], color=MUTED, lw=1.1
    )
    arrow(axes, (text_x + wide / 2, top), (text_x + wide / 2, row(0) + high))
    axes.text(
        vision_x,
        0.42,
        "features travel as megatron-core's context [t, K, h], their places among the rank's hidden states as "
        "context_mask [K]: to every layer, through recompute too.\n"
        "K: vision tokens of this context- and sequence-parallel rank. A pipeline stage appends what layers of later "
        "stages need to the hidden states that it sends.",
        fontsize=7.4,
        va="center",
        linespacing=1.5,
    )
    save(drawn, file, "DeepStack: features of tapped vision layers are added behind the first text layers")


# --- a family ---------------------------------------------------------------------------------------------------------

FAMILY = "qwen3_vl"


def family_fields() -> dict[str, str]:
    """Return the module of each field of `Family` that is defined in the family's folder, by field name."""
    found, inside = family(FAMILY), f"qwen3vl_bridge.models.{FAMILY}."
    named = {one.name: _module_of(getattr(found, one.name)) for one in fields(found)}
    return {
        field: module.removeprefix(inside).partition(".")[0]
        for field, module in named.items()
        if module.startswith(inside)
    }


def _module_of(value: object) -> str:
    """Return the dotted name of a module, or of the module of a function; "" for other values."""
    if isinstance(value, ModuleType):
        return value.__name__
    return value if isinstance(value, str) else getattr(value, "__module__", "")


def family_modules() -> list[str]:
    """Return the modules of the family's folder."""
    return sorted(path.stem for path in (PACKAGE / "models" / FAMILY).glob("*.py") if path.stem != "__init__")


def importers(module: str) -> list[str]:
    """Return the files of the package that import a module of the family's folder."""
    folder = PACKAGE / "models" / FAMILY
    wanted = f"qwen3vl_bridge.models.{FAMILY}.{module}"
    found = (path for path in sorted(PACKAGE.rglob("*.py")) if wanted in set(_imports(path)))
    return [path.stem if path.parent == folder else path.relative_to(PACKAGE).as_posix() for path in found]


def _imports(file: Path) -> Iterator[str]:
    """Return the dotted names that a file imports."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def draw_family(file: Path) -> None:
    """Draw a family's folder and what the registry reads from it."""
    named, modules = family_fields(), family_modules()
    read = list(dict.fromkeys(named.values()))
    others = [module for module in modules if module not in read]
    step, high, wide = 0.46, 0.36, 1.95
    rows = max(len(named), len(others))
    drawn, axes = canvas(9.2, 0.85 + rows * step)
    field_x, read_x, other_x, other_wide = 0.35, 3.0, 5.65, 3.2
    top = 0.2 + rows * step

    def place(number: float) -> float:
        return top - (number + 1) * step + 0.1

    for x, width, title in (
        (field_x, wide, "Family in registry.py"),
        (read_x, wide, f"models/{FAMILY}/"),
        (other_x, other_wide, "imported from there"),
    ):
        axes.text(x + width / 2, top + 0.22, title, ha="center", fontweight="bold", fontsize=9)
    for module in read:  # in the middle of the fields that name it
        numbers = [n for n, field in enumerate(named) if named[field] == module]
        y = place(sum(numbers) / len(numbers))
        box(axes, (read_x, y), (wide, high), f"{module}.py", ORANGE)
        for n in numbers:
            arrow(axes, (field_x + wide, place(n) + high / 2), (read_x, y + high / 2))
    for number, field in enumerate(named):
        box(axes, (field_x, place(number)), (wide, high), field, BLUE)
    for number, module in enumerate(others):
        said = f"{module}.py\nby {', '.join(importers(module))}"
        box(axes, (other_x, place(number)), (other_wide, high), said, GREY)
    save(drawn, file, "A family's folder and what the registry reads from it")


PICTURES = {
    "data_flow.svg": draw_data_flow,
    "packed_row.svg": draw_packed_row,
    "deepstack.svg": draw_deepstack,
    "family.svg": draw_family,
}


def main() -> None:
    """Write the images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder of the pictures")
    output = parser.parse_args().output
    for name, draw in PICTURES.items():
        draw(output / name)


if __name__ == "__main__":
    main()
