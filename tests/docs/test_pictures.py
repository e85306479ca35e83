"""The drawn pictures of docs/ show what the code and the benchmarks' results say now, and are small."""

from __future__ import annotations

import re
from pathlib import Path

from qwen3vl_bridge.batch import token_index

import pytest

pytest.importorskip("matplotlib")

from scripts import draw_architecture as architecture
from scripts import draw_benchmarks as benchmarks
from scripts.drawing import IMAGES, INK, MUTED, PANEL, ROOT, differing, names_of

TOKEN = re.compile(r"token-(row|slot(\d+))-(\d+)-cp(\d)-sp(\d)")


def test_pictures_of_the_architecture_are_those_of_the_code(tmp_path):
    for name, draw in architecture.PICTURES.items():
        draw(tmp_path / name)
    assert differing(IMAGES, tmp_path, architecture.PICTURES) == [], "run python -m scripts.draw_architecture"


def test_plots_and_their_sentences_are_those_of_the_results(tmp_path):
    page = benchmarks.PAGE.read_text("utf-8")
    assert benchmarks.with_figures(page) == page, "run python -m scripts.draw_benchmarks"
    for plot in benchmarks.PLOTS:
        plot.draw(tmp_path / plot.file)
    files = [plot.file for plot in benchmarks.PLOTS]
    assert differing(IMAGES, tmp_path, files) == [], "run python -m scripts.draw_benchmarks"


def test_every_csv_file_is_on_the_page():
    page = benchmarks.PAGE.read_text("utf-8")
    for path in benchmarks.RESULTS.glob("*.csv"):
        script = path.with_suffix(".py").name
        assert f"`benchmarks/results/{path.name}`" in page or f"`benchmarks/{script}`" in page, path


def test_each_token_of_the_packed_row_lies_where_the_code_puts_it():
    layout, slots, row = architecture.packed_row(), {}, {}
    for name in names_of(IMAGES / "packed_row.svg", "token-"):
        _, slot, token, cp, sp = TOKEN.fullmatch(name).groups()
        rank = int(cp), int(sp)
        if slot is None:
            assert int(token) not in row
            row[int(token)] = rank
        else:
            slots.setdefault(rank, {})[int(slot)] = int(token)
    assert sorted(row) == list(range(layout.total))
    for (cp, sp), held in slots.items():
        expected = token_index(layout, 2, cp, 2, sp).flatten().tolist()
        assert [held[slot] for slot in range(len(expected))] == expected and len(held) == len(expected)
        assert {token for token, rank in row.items() if rank == (cp, sp)} == set(expected)
    assert len(slots) == 4


def test_files_of_the_data_flow_are_there():
    for step in architecture.DATA_FLOW:
        assert not step.file or (architecture.PACKAGE / step.file).is_file(), step


def test_the_family_is_drawn_whole():
    named, modules = architecture.family_fields(), architecture.family_modules()
    assert {"table", "provider", "bridge", "presets"} <= named.keys() and set(named.values()) <= set(modules)
    assert [one for one in modules if one not in named.values() and not architecture.importers(one)] == []


def test_every_drawn_picture_is_small_and_on_a_page():
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    pictures = sorted(IMAGES.glob("*.svg"))
    assert {path.name for path in pictures} >= architecture.PICTURES.keys()
    for path in pictures:
        assert path.stat().st_size < 100_000, path
        assert f"images/{path.name}" in pages, path
        assert PANEL in path.read_text("utf-8"), path  # its own ground, so that a dark page does not matter


@pytest.mark.parametrize("ink", [INK, MUTED])
def test_text_stands_out_from_the_panel(ink):
    """Contrast as WCAG 2 has it, 4.5 for small text."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert (luminance(PANEL) + 0.05) / (luminance(ink) + 0.05) > 4.5


def test_no_picture_of_a_page_is_missing():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for found in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text("utf-8")):
            assert found.startswith("http") or (Path(page).parent / found).is_file(), f"{page}: {found}"
