"""Draw the plots of benchmarks/results/README.md, and write the sentences about them.

python -m scripts.draw_benchmarks    # plots into docs/images, sentences into the page
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.drawing import FOUR, IMAGES, INK, MUTED, ROOT, figure, save

RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "README.md"
Rows = list[dict[str, str]]


def rows_of(name: str) -> Rows:
    """Return all rows of a CSV file in benchmarks/results."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def origin(rows: Rows) -> str:
    """Return a text with the machines and dates on which rows were measured."""
    dates = sorted({row["date"] for row in rows})
    machines = " and ".join(sorted({row["machine"] for row in rows}))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{machines}, {when}"


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Return median, minimum and maximum."""
    found = list(values)
    return statistics.median(found), min(found), max(found)


# --- conversion -------------------------------------------------------------------------------------------------------

_STEPS = ("import", "export", "import torch_dist", "verify")


def _conversion() -> dict[str, dict[str, list[float]]]:
    """Return model -> step -> times of all runs, relative to `cp`."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows_of("convert"):
        if row["step"] in _STEPS:
            model = {"qwen3_vl": "", "qwen3_5": "Qwen3.5 "}[row["family"]] + row["size"]
            found.setdefault(model, {}).setdefault(row["step"], []).append(float(row["of cp"]))
    return found


def draw_conversion(file: Path) -> None:
    """Draw the times of conversions relative to `cp`."""
    found = _conversion()
    drawn, axes = figure(7.2, 3.3)
    width = 0.8 / len(_STEPS)
    for number, (step, colour) in enumerate(zip(_STEPS, FOUR, strict=True)):
        places = [place + (number - (len(_STEPS) - 1) / 2) * width for place in range(len(found))]
        middle, least, most = zip(*(spread(times[step]) for times in found.values()), strict=True)
        axes.bar(places, middle, width * 0.9, color=colour, label=step)
        axes.vlines(places, least, most, color=INK, linewidth=0.9)
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
    axes.text(-0.48, 1.03, "cp", color=MUTED, fontsize=8)
    labels = [f"{model}\n(runs: {len(times['import'])})" for model, times in found.items()]
    axes.set_xticks(range(len(found)), labels)
    axes.set(ylabel="time relative to cp", title="Conversion: median, minimum and maximum of all runs")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    drawn.subplots_adjust(left=0.09, right=0.97, top=0.9, bottom=0.27)
    save(drawn, file, "Times of conversion, relative to cp")


def say_conversion() -> str:
    """Return the sentence about conversion."""
    rows = [row for row in rows_of("convert") if row["step"] in _STEPS]
    memory = max(float(row["MB"]) for row in rows if row["MB"])
    parts = []
    for model, times in _conversion().items():
        middle, least, most = spread(times["import"])
        runs = f"{least:.2f} to {most:.2f}" if least < most else "one run"
        parts.append(f"{model}: import takes {middle:.2f} times as long as `cp` ({runs})")
    return (
        f"{'; '.join(parts)}. Anonymous memory rose by at most {memory:.0f} MB in any step shown. "
        f"30B-A3B is 8 of its 48 layers. {origin(rows)}; `benchmarks/convert.py`."
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def draw_reading(file: Path) -> None:
    """Draw the ratio of the bytes that a rank reads to the bytes of its weights."""
    rows = rows_of("reading")
    kinds = list(dict.fromkeys((row["size"], row["format"], row["ranks"]) for row in rows))
    drawn, axes = figure(7.2, 3.3)
    for number, (stated, colour, name) in enumerate((("no", FOUR[2], "sizes not stated"), ("yes", FOUR[1], "stated"))):
        chosen = {(row["size"], row["format"], row["ranks"]): row for row in rows if row["stated"] == stated}
        values = [_read(chosen[kind]) for kind in kinds]
        places = [place + (number - 0.5) * 0.38 for place in range(len(kinds))]
        axes.bar(places, values, 0.34, color=colour, label=name)
        for place, value in zip(places, values, strict=True):
            axes.text(place, value * 1.03, f"{value:.2f}", ha="center", va="bottom", fontsize=6.5)
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_ylim(0.9, 30)
    axes.set_xticks(range(len(kinds)), [f"{size}\n{form}\n{ranks} ranks" for size, form, ranks in kinds], fontsize=7)
    axes.set(ylabel="bytes read, of those held", title="What a rank reads of a converted checkpoint, in the mean")
    axes.legend(loc="upper right", ncols=2)
    drawn.subplots_adjust(left=0.09, right=0.98, top=0.9, bottom=0.21)
    save(drawn, file, "What a rank reads of a converted checkpoint")


def _read(row: dict[str, str]) -> float:
    return float(row["GB read, mean"]) / float(row["GB held, mean"])


def say_reading() -> str:
    """Return the sentence about reading."""
    rows = rows_of("reading")
    anyhow, stated = ([_read(row) for row in rows if row["stated"] == said] for said in ("no", "yes"))
    return (
        f"A rank reads {min(stated):.2f} to {max(stated):.2f} times what it holds where `import` was told the parallel "
        f"sizes, {min(anyhow):.2f} to {max(anyhow):.2f} times where it was not. Counted from file layouts, "
        f"{origin(rows)}; `benchmarks/reading.py`."
    )


# --- the host ---------------------------------------------------------------------------------------------------------

_SUBJECTS = ("positions", "interpolation, 354 sizes", "patch positions, 354 sizes")


def _host() -> dict[str, dict[str, tuple[float, float, float]]]:
    rows = rows_of("host")
    return {
        subject: {
            way: spread(float(row["ms"]) for row in rows if (row["subject"], row["way"]) == (subject, way))
            for way in dict.fromkeys(row["way"] for row in rows if row["subject"] == subject)
        }
        for subject in _SUBJECTS
    }


def draw_host(file: Path) -> None:
    """Draw the milliseconds that the host takes for the positions and indices of a batch."""
    found = _host()
    ways = list(dict.fromkeys(way for one in found.values() for way in one))
    drawn, axes = figure(7.2, 3.3)
    colours = dict(zip(ways, (FOUR[1], FOUR[3], FOUR[2], FOUR[0]), strict=True))
    for number, way in enumerate(ways):
        for place, subject in enumerate(_SUBJECTS):
            if way in found[subject]:
                middle = found[subject][way][0]
                x = place + (number - (len(ways) - 1) / 2) * 0.2
                axes.bar(x, middle, 0.18, color=colours[way], label=way if place == 1 else None)
                axes.text(x, middle * 1.08, f"{middle:.1f}", ha="center", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylim(0.1, 1500)
    axes.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    axes.minorticks_off()
    axes.set_xlim(-0.5, len(_SUBJECTS) - 0.5)
    axes.set_xticks(range(len(_SUBJECTS)), _SUBJECTS)
    axes.set(ylabel="ms, one core", title="Positions and indices of 64 samples with 470 images: median of all runs")
    axes.legend(ncols=4, loc="upper left")
    drawn.subplots_adjust(left=0.1, right=0.98, top=0.9, bottom=0.1)
    save(drawn, file, "How long the host takes for positions and indices of a batch")


def say_host() -> str:
    """Return the sentence about host work."""
    found, rows = _host(), rows_of("host")
    own, theirs = found["positions"]["ours"][0], found["positions"]
    collate = spread(float(row["ms"]) for row in rows if row["subject"] == "collate with pictures")[0]
    return (
        f"Positions take {own:.1f} ms, transformers' {theirs['transformers'][0]:.0f}, Megatron-Bridge's "
        f"{theirs['Megatron-Bridge'][0]:.0f}; collating 16 samples with images takes {collate:.0f} ms. "
        f"{origin(rows)}; `benchmarks/host.py`."
    )


# --- packing ----------------------------------------------------------------------------------------------------------

_WAYS = ("one a row", "as they come", "best fit")


def _packing() -> Rows:
    return [row for row in rows_of("packing") if row["what"] == "fill" and not row["most_patches"]]


def draw_packing(file: Path) -> None:
    """Draw the fraction of tokens in rows that are not padding, by packing method."""
    rows = _packing()
    lengths = list(dict.fromkeys(row["row"] for row in rows))
    drawn, axes = figure(7.2, 3.0)
    for number, (way, colour) in enumerate(zip(_WAYS, (FOUR[2], FOUR[0], FOUR[1]), strict=True)):
        for place, length in enumerate(lengths):
            (row,) = (row for row in rows if (row["row"], row["how"]) == (length, way))
            share, x = 100 * float(row["tokens"]), place + (number - 1) * 0.27
            axes.bar(x, share, 0.24, color=colour, label=way if not place else None)
            axes.text(x, share + 1.5, f"{share:.2f}" if share > 99 else f"{share:.1f}", ha="center", fontsize=7)
    axes.set_xticks(range(len(lengths)), [f"{int(length):,} tokens" for length in lengths])
    axes.set(ylabel="real tokens, %", ylim=(0, 122), title="How full rows get")
    axes.legend(ncols=3, loc="upper center")
    drawn.subplots_adjust(left=0.08, right=0.98, top=0.9, bottom=0.1)
    save(drawn, file, "How full rows get")


def say_packing() -> str:
    """Return the sentence about packing."""
    rows = _packing()
    shares = {way: [100 * float(row["tokens"]) for row in rows if row["how"] == way] for way in _WAYS}
    theirs = [100 * float(row["tokens"]) for row in rows if row["how"].startswith("Megatron-Bridge")]
    best, come = shares["best fit"], shares["as they come"]
    return (
        f"Best fit fills rows to {min(best):.2f} % at least, taking samples as they come {min(come):.1f} to "
        f"{max(come):.1f} %, one sample a row {max(shares['one a row']):.1f} % at most; Megatron-Bridge's first fit "
        f"decreasing, over all samples at once, {min(theirs):.2f} %. Counted on 50,000 synthetic sample sizes, "
        f"{origin(rows)}; `benchmarks/packing.py`."
    )


# --- a training step --------------------------------------------------------------------------------------------------


def _quiet() -> Rows:
    """Return the latest run of `training_step.py`."""
    rows = rows_of("training_step")
    return rows[-len({row["way"] for row in rows}) :]


def draw_step(file: Path) -> None:
    """Draw the seconds of a training step with our model and with transformers."""
    rows = _quiet()[::-1]
    drawn, axes = figure(7.2, 2.3)
    colours = [FOUR[1] if row["way"].startswith("ours") else FOUR[3] for row in rows]
    seconds = [float(row["seconds"]) for row in rows]
    axes.barh(range(len(rows)), seconds, 0.62, color=colours)
    for place, value in enumerate(seconds):
        axes.text(value + 0.08, place, f"{value:.1f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row["way"] for row in rows])
    axes.set(xlabel="seconds", title="A training step of 83 million parameters on two cores")
    axes.grid(axis="y", visible=False)
    drawn.subplots_adjust(left=0.22, right=0.96, top=0.87, bottom=0.2)
    save(drawn, file, "A training step, compared with transformers")


def say_step() -> str:
    """Return the sentence about a training step."""
    rows = {row["way"]: row for row in _quiet()}
    one = rows["ours, packed"]
    parts = []
    for way, row in rows.items():
        least, most = row["least of a round"], row["most of a round"]
        ranged = f" ({least} to {most} in a round)" if least else ""
        if row is not one:
            parts.append(f"{way} {float(row['of ours packed']):.2f} times{ranged}")
    return (
        f"{one['samples']} samples, {one['tokens']} tokens, float32: ours packed takes {float(one['seconds']):.1f} s; "
        f"{', '.join(parts)} that. Median of {one['rounds']} rounds, {origin([one])}; `benchmarks/training_step.py`."
    )


# --- growth -----------------------------------------------------------------------------------------------------------

# Series -> label of its axis.
_SERIES = {
    "row": "tokens, documents of 1,024",
    "document": "tokens of one document",
    "pictures": "images",
    "segments": "segments of 8,192 tokens",
    "experts": "experts",
}
_KEYS = {"CPU seconds": ("CPU seconds", FOUR[1]), "MiB": ("MiB of tensors", FOUR[3])}


def _grown(series: str, key: str) -> list[tuple[int, float]]:
    """Return (position on the axis, value) of a series, for the column `key`. Omit runs in which glibc kept memory."""
    rows = (row for row in rows_of("growth") if row["series"] == series and row[key] and not row["mmap threshold"])
    return [(int(row["number"]), float(row[key])) for row in rows]


def draw_growth(file: Path) -> None:
    """Draw time and memory of a step over row length, images, segments and experts."""
    drawn, axes = figure(10.5, 0.8 + 2.2 * len(_KEYS), nrows=len(_KEYS), ncols=len(_SERIES), squeeze=False)
    for column, (series, counted) in zip(axes.T, _SERIES.items(), strict=True):
        for plot, (key, (_, colour)) in zip(column, _KEYS.items(), strict=True):
            values = _grown(series, key)
            numbers = sorted({number for number, _ in values if number})
            middle, least, most = zip(*(spread(v for n, v in values if n == number) for number in numbers), strict=True)
            plot.plot(numbers, middle, color=colour, marker="o", ms=4)
            plot.vlines(numbers, least, most, color=colour, linewidth=2)
            linear = [middle[0] * number / numbers[0] for number in numbers]
            plot.plot(numbers, linear, color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
            plot.set(xscale="log", yscale="log", ylim=(min(least) / 1.6, max(most) * 1.6))
            ends = [middle[0], middle[-1]]
            plot.set_yticks(ends, [f"{end:,.0f}" if end >= 100 else f"{end:.3g}" for end in ends])
            plot.set_xticks(numbers, [f"{number:,}" for number in numbers], rotation=60, fontsize=7)
            plot.tick_params(axis="x", labelbottom=plot is column[-1])
            plot.tick_params(axis="y", labelsize=7)
            plot.minorticks_off()
        column[-1].set_xlabel(counted, fontsize=8)
    for plot, (label, _) in zip(axes[:, 0], _KEYS.values(), strict=True):
        plot.set_ylabel(label)
    drawn.suptitle("A training step of a small model on one core; dashed: linear", fontsize=10)
    drawn.subplots_adjust(left=0.08, right=0.985, top=0.94 - 0.06 / len(_KEYS), bottom=0.31 / len(_KEYS), wspace=0.42)
    save(drawn, file, "How time and memory of a training step grow")


def _growths(series: str, key: str) -> str:
    """Return by which factor a column grows from 1,024 to 16,384 tokens: median, minimum and maximum over runs."""
    values = _grown(series, key)
    ends = ([value for number, value in values if number == end] for end in (1024, 16384))
    middle, least, most = spread(last / first for first, last in zip(*ends, strict=True))
    return f"{middle:.1f} times" + (f" ({least:.1f} to {most:.1f})" if least < most else "")


def say_growth() -> str:
    """Return the sentence about growth."""
    grown = ", ".join(
        f"{label} grow {_growths('row', key)} in documents of 1,024 and {_growths('document', key)} in one"
        for key, (label, _) in _KEYS.items()
    )
    return (
        f"From 1,024 to 16,384 tokens, {grown}: the median of the runs' ratios, with minimum and maximum. "
        f"{origin(rows_of('growth'))}; `benchmarks/growth.py`."
    )


# Name in the page's marks and of the image file -> functions that draw the image and return its sentence.
PLOTS: dict[str, tuple[Callable[[Path], None], Callable[[], str]]] = {
    "conversion": (draw_conversion, say_conversion),
    "reading": (draw_reading, say_reading),
    "host": (draw_host, say_host),
    "packing": (draw_packing, say_packing),
    "step": (draw_step, say_step),
    "growth": (draw_growth, say_growth),
}


def draw_phases(file: Path) -> None:
    """Draw the memory of one rank in each phase of a simulation, for docs/scaling.md."""
    found = rows_of("simulation_phases")
    drawn, axes = figure(7.2, 3.0)
    for number, (name, colour) in enumerate(zip(("allocated", "at most", "reserved"), FOUR, strict=False)):
        label = {"allocated": "allocated after it", "at most": "at most", "reserved": "reserved at most"}[name]
        places = [place + (number - 1) * 0.27 for place in range(len(found))]
        axes.bar(places, [float(row[name]) for row in found], 0.25, color=colour, label=label)
    axes.axhline(79.1, color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xticks(range(len(found)), [row["phase"].replace(", ", "\n") for row in found])
    axes.set(ylabel="GiB", title="qwen3_vl_8b_sft_config, one of eight ranks; dashed: an H100", ylim=(0, 90))
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    drawn.subplots_adjust(left=0.08, right=0.98, top=0.9, bottom=0.28)
    save(drawn, file, "Memory of a simulated rank in each phase")


def draw_all(folder: Path) -> list[str]:
    """Draw every plot and return the file names."""
    drawings = {f"bench_{name}.svg": draw for name, (draw, _) in PLOTS.items()} | {"simulation.svg": draw_phases}
    for name, draw in drawings.items():
        draw(folder / name)
    return list(drawings)


def with_figures(page: str) -> str:
    """Return the page with plots and sentences inserted between their marks."""
    for name, (_, say) in PLOTS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{PAGE} contains {begin} ... {end} {page.count(begin)} times, expected once")
        before, rest = page.split(begin)
        text = f"![{name.capitalize()}](../../docs/images/bench_{name}.svg)\n\n{say()}"
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Write the plots to docs/images and the sentences to the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(with_figures(PAGE.read_text("utf-8")), "utf-8")
    draw_all(IMAGES)


if __name__ == "__main__":
    main()
