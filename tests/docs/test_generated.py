"""Generated tables and drawings are current."""

import dataclasses
import importlib
import itertools
import json
import re
import sys
from pathlib import Path

import qwen3vl_bridge
from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint
from qwen3vl_bridge.core.layout import token_index
from qwen3vl_bridge.planning.hardware import GIB, GPUS
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
from qwen3vl_recipes.dry_run import estimate_memory
from qwen3vl_recipes.registry import recipes
from qwen3vl_recipes.table import BEGIN, END, KINDS, SIMULATIONS, cell, latest_simulations, smallest
from torch.distributed.checkpoint import FileSystemReader

from scripts import compatibility
from scripts.docs_site import hooks, reference
from tests.docs.pages import PAGES, ROOT, read

# docs/settings.md and docs/api.md

GROUPS = [group for groups in reference.GROUPS.values() for group in groups]


def class_of(group: reference.Group) -> type:
    return getattr(importlib.import_module(group.module), group.name)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_settings_reference_matches_fields_of_configuration_class(group):
    found, kind = {one.name.removeprefix(group.prefix): one for one in reference.settings(group)}, class_of(group)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    own = {name for name in vars(kind).get("__annotations__", {}) if name in fields}
    assert own <= found.keys()
    assert {name for name, one in found.items() if one.type} == own
    assert found.keys() <= fields.keys() | {"moe_layer_freq"}, "a docstring names a field that does not exist"
    for name in own:
        assert found[name].type == fields[name].type
        default = fields[name].default
        if default is dataclasses.MISSING:
            given = fields[name].default_factory is not dataclasses.MISSING
            assert bool(found[name].default) == given
        elif isinstance(default, int | float | str | None):
            assert eval(found[name].default, vars(sys.modules[kind.__module__])) == default


def test_settings_page_documents_every_configuration_class():
    known = {class_of(group) for group in GROUPS}
    for group in GROUPS:
        for field in dataclasses.fields(class_of(group)):
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            if dataclasses.is_dataclass(made) and type(made).__module__.startswith("qwen3vl_bridge"):
                assert type(made) in known, f"{group.name}.{field.name} is a {type(made).__name__}"
    for name in qwen3vl_bridge.__all__:
        found = getattr(qwen3vl_bridge, name)
        ours = dataclasses.is_dataclass(found) and name.startswith("Qwen3VL")
        assert not ours or found in known or issubclass(found, class_of(GROUPS[-1])), f"{name} is not in the reference"


def test_settings_page_describes_every_field_not_of_megatron_bridge():
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.peft.lora import VLMLoRA
    from megatron.bridge.training.config import ConfigContainer

    theirs = {field.name for kind in (GPTModelProvider, VLMLoRA, ConfigContainer) for field in dataclasses.fields(kind)}
    for group in GROUPS:
        for one in reference.settings(group):
            name = one.name.removeprefix(group.prefix)
            assert one.meaning or name in theirs, f"{group.name}.{name} has no description in the docstring"


def test_settings_page_is_up_to_date():
    assert reference.PAGE.read_text() == reference.fill(reference.PAGE.read_text()), "out of date: run `make reference`"
    assert re.findall(r"<!-- generated: (\w+) -->", reference.PAGE.read_text()) == [*reference.GROUPS, "commands"]


def test_api_page_lists_every_public_package():
    assert re.findall(r"<!-- api: (\w+) -->", PAGES["docs/api.md"]) == list(hooks.PUBLIC)
    for file in hooks.PUBLIC.values():
        for name in hooks.public_names(ROOT / file):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute)


# benchmarks/results/recipes.md


def recipe_rows() -> dict[str, list[str]]:
    lines = read("benchmarks/results/recipes.md").split(BEGIN)[1].split(END)[0].splitlines()[2:]
    cells = ([part.strip() for part in line.strip("|").split("|")] for line in lines)
    return {name.strip("`"): rest for name, *rest in cells}


NAMES = list(recipe_rows())


def test_recipes_table_has_every_recipe():
    assert set(NAMES) == {name for name in recipes() if "_digits_" not in name}


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("name", NAMES)
def test_recipes_table_matches_planner_and_simulations(name):
    recipe = recipes()[name]
    found = estimate_memory(recipe(), recipe.gpus).peak.total
    assert recipe_rows()[name][1] == f"{recipe.gpus} {recipe.gpu}: {found / GIB:.0f} GiB"
    assert recipe_rows()[name][2] == cell(latest_simulations(ROOT / SIMULATIONS).get(name, []))


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("name", ["qwen3_vl_8b_pretrain_config", "qwen3_vl_235b_a22b_sft_fsdp_config"])
def test_fewest_gpus_in_recipes_table_match_planner(name):
    assert recipe_rows()[name][3] == "/".join(str(smallest(recipes()[name], kind)[0]) for kind in KINDS)


def test_scaling_page_states_range_of_simulated_to_planned_memory():
    ratios = [
        float(row["ratio"]) for rows in latest_simulations(ROOT / SIMULATIONS).values() for row in rows if row["ratio"]
    ]
    assert f"are {min(ratios):.2f} to {max(ratios):.2f} times the plan" in " ".join(PAGES["docs/scaling.md"].split())


# docs/compatibility.md


def names_in(pattern: str) -> list[str]:
    """Expand a pattern such as `a{b,c}{,-d}`."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def test_released_models_table_has_every_preset():
    section = PAGES["docs/compatibility.md"].partition("## Released models\n")[2].partition("| chat template of |")[0]
    found = [name for pattern in re.findall(r"`(Qwen/.*?)`", section) for name in names_in(pattern)]
    presets = [family(name).presets for name in ("qwen3_vl", "qwen3_5", "qwen4_exp")]
    assert sorted(found) == sorted({name for one in presets for size in one.PRESETS for name in one.hub_ids(size)})


def test_versions_table_rows_are_rows_of_compatibility_script():
    table = re.search(r"^\| row \| .*\n\|-.*\n((?:\|.*\n)+)", compatibility.TABLE.read_text(), re.MULTILINE)
    assert table
    names = [line.split("|")[1].strip() for line in table[1].splitlines()]
    assert set(names) <= {*compatibility.ROWS, "chosen"}
    assert all(names.count(name) == 1 for name in names if name != "chosen")


# The formats in docs/convert.md

FORMATS = ("fsdp_dtensor", "torch_dist")
MODELS = {"dense": {}, "moe": {"moe": True}, "qwen3_5": {"family": "qwen3_5"}}
CONVERT = PAGES["docs/convert.md"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    for name, kind in MODELS.items():
        make_checkpoint(root / name, **kind)
        for ckpt_format in FORMATS:
            import_checkpoint(root / name, root / f"{name}.{ckpt_format}", ckpt_format=ckpt_format, progress=False)
    export_checkpoint(root / "dense.torch_dist", root / "dense.huggingface", progress=False)
    return root


def after(mark: str) -> str:
    return CONVERT.split(f"<!-- {mark} -->\n")[1].split("\n\n")[0]


@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_convert_page_tensors_match_converted_checkpoints(folders, model, ckpt_format):
    iteration = folders / f"{model}.{ckpt_format}" / "iter_0000000"
    found = FileSystemReader(iteration).read_metadata().state_dict_metadata
    if (mark := f"tensors: {model}, {ckpt_format}") in CONVERT:
        rows = re.findall(r"^\| `([^`]+)` \| (\[[^]]*\]) \|$", after(mark), re.MULTILINE)
        assert len(rows) >= 3
        assert {name: str(list(found[name].size)) for name, _ in rows} == dict(rows)
    others = {name for name, entry in found.items() if not hasattr(entry, "size")}
    if ckpt_format == "fsdp_dtensor":
        assert others == {"checkpoint_version", "iteration", "args"}
        assert all(name.startswith("model.module.") for name in found.keys() - others)
    else:
        assert {name for name in others if "_extra_state" not in name} == {"common_state/shard_0_1"}
        assert model != "dense" or "language_model.decoder.layers.mlp.linear_fc1._extra_state/shard_0_4" in others


@pytest.mark.parametrize("ckpt_format", [*FORMATS, "huggingface"])
def test_convert_page_files_match_converted_checkpoints(folders, ckpt_format):
    root = folders / f"dense.{ckpt_format}"
    text = re.sub(r"or model-0.*|a copy of .*|\{.*", "", after(f"files: {ckpt_format}"))
    named = {word for line in text.splitlines() for word in line.split() if re.search(r"\.\w+$|/hf$", word)}
    inner = root / "iter_0000000" if ckpt_format in FORMATS else root
    there = {path.relative_to(root).as_posix() for folder in {root, inner} for path in folder.iterdir()}
    assert named == there - {"iter_0000000"}


def test_convert_page_manifest_fields_match_converted_checkpoints(folders):
    fields = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*) \|", after("manifest"), re.MULTILINE))))
    found = set()
    for ckpt_format, inner in (("torch_dist", "iter_0000000"), ("huggingface", ".")):
        found |= json.loads((folders / f"dense.{ckpt_format}" / inner / "qwen3vl_bridge.json").read_text()).keys()
    assert fields - {"sha256"} == found


def test_convert_page_lists_every_expert_layout():
    assert re.findall(r"^\| `([A-Z_]+)` \|", CONVERT, re.MULTILINE) == [layout.name for layout in ExpertLayout]


# Drawings, and the figures of benchmarks/results

pytest.importorskip("matplotlib")

from scripts import draw_architecture as architecture  # noqa: E402
from scripts import draw_benchmarks as benchmarks  # noqa: E402
from scripts.drawing import IMAGES, differing, names_of  # noqa: E402

TOKEN = re.compile(r"token-(row|slot(\d+))-(\d+)-cp(\d)-sp(\d)")


def test_architecture_drawings_are_up_to_date(tmp_path):
    for name, draw in architecture.PICTURES.items():
        draw(tmp_path / name)
    assert differing(IMAGES, tmp_path, architecture.PICTURES) == [], "run python -m scripts.draw_architecture"


def test_benchmark_plots_and_sentences_are_up_to_date(tmp_path):
    page = benchmarks.PAGE.read_text("utf-8")
    assert benchmarks.with_figures(page) == page, "run python -m scripts.draw_benchmarks"
    files = benchmarks.draw_all(tmp_path)
    assert differing(IMAGES, tmp_path, files) == [], "run python -m scripts.draw_benchmarks"


def test_status_page_states_largest_memory_of_conversion_benchmark():
    most = max(float(row["MB"]) for row in benchmarks.rows_of("convert") if row["MB"])
    assert f"with {most:.0f} MB of memory at most" in PAGES["docs/status.md"]


def test_scaling_page_numbers_match_plotted_simulation():
    page, rows = PAGES["docs/scaling.md"], benchmarks.rows_of("simulation_phases")
    steps = [row for row in rows if row["phase"].startswith("step")]
    allocated, reserved = (max(float(row[name]) for row in steps) for name in ("at most", "reserved"))
    recipe = [row for row in benchmarks.rows_of("simulation") if row["recipe"] == "qwen3_vl_8b_sft_config"]
    planned = next(row for row in reversed(recipe) if row["layers"] == "local")["planned GiB"]
    ratio = allocated / float(planned)
    assert f"planned {planned} GiB without reserve, allocated {allocated:.2f}: {ratio:.3f}\n" in page
    memory = GPUS["H100"].memory_bytes / GIB
    assert f"reserved at most {reserved:.2f} of {memory:.1f} GiB: {memory - reserved:.2f} are free\n" in page


def test_results_page_numbers_match_latest_kernel_counts():
    page = benchmarks.PAGE.read_text("utf-8")
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


def test_packed_row_drawing_matches_token_index():
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


def test_data_flow_drawing_lists_only_existing_files():
    for step in architecture.DATA_FLOW:
        assert not step.file or (architecture.PACKAGE / step.file).is_file(), step


def test_model_family_drawing_shows_every_module():
    named, modules = architecture.family_fields(), architecture.family_modules()
    assert {"table", "bridge", "presets"} <= named.keys() and set(named.values()) <= set(modules)
    assert [one for one in modules if one not in named.values() and not architecture.importers(one)] == []
