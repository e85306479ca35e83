"""Draw boxes, arrows and cells into SVG files with a light panel.

Text is stored as text, and files do not depend on the date. Another version of matplotlib may write other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"

# A light panel makes an image as easy to read on a dark page as on a light page.
PANEL, EDGE, INK, MUTED = "#fbfbfd", "#d0d5dd", "#1b2430", "#475467"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#c7dcf7", "#fbd9b5", "#cdebd0", "#e2d3f4", "#e9ecf1"
# Colors that distinguish four kinds: two hues, each light and dark.
FOUR = ("#a9cdf5", "#3d7fc9", "#fbc58d", "#d97a1f")

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "qwen3vl_bridge",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": EDGE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def figure(width: float, height: float, **arguments: Any) -> tuple[Figure, Any]:
    """Return a figure with a light panel and its axes, like `pyplot.subplots`. Width and height are in inches."""
    matplotlib.rcParams.update(_STYLE)
    drawn, axes = pyplot.subplots(figsize=(width, height), facecolor="none", **arguments)
    drawn.add_artist(
        FancyBboxPatch(
            (0.004, 0.004),
            0.992,
            0.992,
            boxstyle="round,pad=0,rounding_size=0.012",
            transform=drawn.transFigure,
            facecolor=PANEL,
            edgecolor=EDGE,
            linewidth=1,
            zorder=-10,
        )
    )
    return drawn, axes


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure and its invisible axes, with coordinates in inches from the lower left corner."""
    drawn, axes = figure(width, height)
    axes.set_position((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return drawn, axes


def box(axes: Axes, at: tuple[float, float], size: tuple[float, float], lines: str, colour: str, **text: Any) -> None:
    """Draw a box with text.

    Args:
        axes: axes of a canvas.
        at: lower left corner of the box.
        size: width and height.
        lines: text of the box; the first line is its title.
        colour: color of the box.
        text: arguments of `Axes.text` for the title.
    """
    (x, y), (width, height) = at, size
    shape = FancyBboxPatch(
        at, width, height, boxstyle="round,pad=0,rounding_size=0.06", facecolor=colour, edgecolor=MUTED, linewidth=0.8
    )
    axes.add_patch(shape)
    title, *others = lines.split("\n")
    step = 0.155
    top = y + height / 2 + step * len(others) / 2
    axes.text(x + width / 2, top, title, ha="center", va="center", fontsize=8.5, fontweight="bold", **text)
    for number, line in enumerate(others, 1):
        axes.text(x + width / 2, top - number * step, line, ha="center", va="center", fontsize=7.2, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **how: Any) -> None:
    """Draw an arrow between two points. `how` are arguments of `FancyArrowPatch`."""
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": MUTED, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, **style | how))


def cell(axes: Axes, at: tuple[float, float], size: tuple[float, float], name: str, **how: Any) -> None:
    """Draw a rectangle with an id (`name`) in the SVG file. `how` are arguments of `Rectangle`."""
    axes.add_patch(Rectangle(at, *size, gid=name, **how))


def save(drawn: Figure, file: Path, what: str) -> None:
    """Write a figure to an SVG file without a date, and close the figure.

    Args:
        drawn: the figure.
        file: the file to write.
        what: title of the image, which describes it for people who cannot see it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(file, format="svg", facecolor="none", metadata={"Date": None, "Creator": None, "Title": what})
    pyplot.close(drawn)
    file.write_text("".join(f"{line.rstrip()}\n" for line in file.read_text("utf-8").splitlines()), "utf-8")


def texts_of(file: Path) -> list[str]:
    """Return all texts in an SVG file, in the order in which they were drawn."""
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text("utf-8"))]


def names_of(file: Path, prefix: str) -> list[str]:
    """Return the ids in an SVG file that begin with a prefix; see `cell`."""
    return re.findall(rf'id="({re.escape(prefix)}[^"]*)"', file.read_text("utf-8"))


def differing(found: Path, expected: Path, names: Collection[str]) -> list[str]:
    """Return the file names that are missing in the folder `found`, or have other texts or cells in `expected`."""

    def shown(file: Path) -> tuple[list[str], list[str]]:
        return texts_of(file), names_of(file, "token-")

    return [name for name in names if not (found / name).exists() or shown(found / name) != shown(expected / name)]
