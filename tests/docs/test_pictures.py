"""The drawn pictures of docs/ show what the code and the benchmarks' results say now."""

import re

from qwen3vl_bridge.batch import token_index
from qwen3vl_bridge.planning.hardware import GIB, GPUS

import pytest

pytest.importorskip("matplotlib")

from scripts import draw_architecture as architecture
from scripts import draw_benchmarks as benchmarks
from scripts.drawing import IMAGES, differing, names_of

TOKEN = re.compile(r"token-(row|slot(\d+))-(\d+)-cp(\d)-sp(\d)")


def test_pictures_of_the_architecture_are_those_of_the_code(tmp_path):
    for name, draw in architecture.PICTURES.items():
        draw(tmp_path / name)
    assert differing(IMAGES, tmp_path, architecture.PICTURES) == [], "run python -m scripts.draw_architecture"


def test_plots_and_their_sentences_are_those_of_the_results(tmp_path):
    page = benchmarks.PAGE.read_text("utf-8")
    assert benchmarks.with_figures(page) == page, "run python -m scripts.draw_benchmarks"
    files = benchmarks.draw_all(tmp_path)
    assert differing(IMAGES, tmp_path, files) == [], "run python -m scripts.draw_benchmarks"


def test_the_status_page_has_the_most_memory_of_the_conversions():
    most = max(float(row["MB"]) for row in benchmarks.rows_of("convert") if row["MB"])
    assert f"with {most:.0f} MB of memory at most" in (benchmarks.PAGE.parent / "status.md").read_text("utf-8")


def test_the_gallery_prints_the_rehearsal_that_it_draws():
    page, rows = (benchmarks.PAGE.parent / "gallery.md").read_text("utf-8"), benchmarks.rows_of("rehearsal_phases")
    steps = [row for row in rows if row["phase"].startswith("step")]
    allocated, reserved = (max(float(row[name]) for row in steps) for name in ("at most", "reserved"))
    recipe = [row for row in benchmarks.rows_of("rehearsal") if row["recipe"] == "qwen3_vl_8b_sft_config"]
    planned = next(row for row in reversed(recipe) if row["layers"] == "local")["planned GiB"]
    ratio = allocated / float(planned)
    assert f"planned {planned} GiB without reserve, allocated {allocated:.2f}: {ratio:.3f}\n" in page
    memory = GPUS["H100"].memory_bytes / GIB
    assert f"reserved at most {reserved:.2f} of {memory:.1f} GiB: {memory - reserved:.2f} are free\n" in page


def test_the_page_on_speed_has_the_latest_counts_of_launches_and_bytes():
    page = (benchmarks.PAGE.parent / "speed.md").read_text("utf-8")
    packed = [x for x in benchmarks.rows_of("kernel_accounting") if x["rows"] == "packed"]
    latest = {(x["size"], x["layers"], x["way"]): x for x in packed}
    counts = {key: [int(x[name]) for name in ("launches", "elementwise kB/token")] for key, x in latest.items()}
    lines = {"8B": "", "30B-A3B": "", "9B": ""}
    for (size, layers, way), x in latest.items():
        if size not in lines:
            continue
        launches, nbytes = counts[size, layers, way]
        of_layers = f"{int(x['launches of a text layer']):,}, {x['launches of a vision layer']}"
        least = f"{x['least us/token']}, {100 * float(x["products' share"]):.0f} %"
        lines[size] += (
            f"| {layers} | {way} | {launches:,} ({of_layers}) | {nbytes:,} | {x['GFLOP/token']} | {least} |\n"
        )
    for each in lines.values():
        assert f"|---|---|---|---|---|---|\n{each}\n" in page
    sentences = re.findall(r"^Ours launches .*?times\.", page, re.MULTILINE | re.DOTALL)
    (of_experts,) = re.findall(r"^Of the 35B-A3B .*?times\.", page, re.MULTILINE | re.DOTALL)
    for size, sentence in zip(("8B", "30B-A3B", "9B", "35B-A3B"), [*sentences, of_experts], strict=True):
        shares = [
            f"{ours / theirs:.2f}"
            for layers in ("local", "Transformer Engine")
            for ours, theirs in zip(counts[size, layers, "ours"], counts[size, layers, "Megatron-Bridge"], strict=True)
        ]
        assert re.findall(r"\d\.\d+", sentence) == shares, size


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
    assert {"table", "bridge", "presets"} <= named.keys() and set(named.values()) <= set(modules)
    assert [one for one in modules if one not in named.values() and not architecture.importers(one)] == []
