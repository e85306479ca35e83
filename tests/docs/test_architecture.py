"""Laws of docs/architecture.md that the linter does not check.

No import cycles, the order of packages, the replaced functions, and the number of files that a reader enters.
"""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from qwen3vl_bridge.testing.digits import make_dataset
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint
from qwen3vl_bridge.upstream.replacements import replaced

import pytest

from tests.data.conftest import picture, write
from tests.upstream.documented import documented

ROOT = Path(__file__).resolve().parents[2]
REPLACED = (ROOT / "docs" / "compatibility.md").read_text().split("## Replaced functions", 1)[1]
TREES = {"qwen3vl_bridge": ROOT / "src", "qwen3vl_recipes": ROOT / "recipes"}


def imports_in(source: str, known: set[str]) -> Iterator[str]:
    """The known modules that a source imports: at its top, in functions, or for annotations."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"expected absolute imports, found one in line {node.lineno}"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from {name if name in known else str(node.module)} & known


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The names of a circle in the order in which they are imported; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


@pytest.mark.parametrize("package", TREES)
def test_imports_have_no_cycle(package):
    top = TREES[package]
    names = {path: path.relative_to(top).with_suffix("").parts for path in (top / package).rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}
    assert len(modules) > 10
    graph = {name: set(imports_in(path.read_text(), modules.keys())) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(modules)
    assert not cycle_in(graph), " -> ".join(cycle_in(graph))


def test_packages_table_order_matches_import_layers_of_pyproject():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["qwen3vl_bridge"])
    order = [set(layer.split(" | ")) for layer in reversed(layers) if layer != "__main__"]
    table = (ROOT / "docs" / "architecture.md").read_text().split("| package | contents |")[1].split("\n\n")[0]
    rows = [re.findall(r"`([^`]*)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    found = [{name.removesuffix(".py").strip("/") for name in row} for row in rows]
    assert [row for row in found if not any("/" in name for name in row) and row != {"recipes"}] == order


# Attributes that are set to a name and are no functions of others: settings, flags, specs, a module's own name.
NOT_REPLACED = {
    "data/webdataset.py": {"global_error_handler"}, "data/hub.py": {"_part"},
    "inference/generation.py": {"training"}, "models/common/layer_specs.py": {"module", "mlp"},
    "models/common/bridge.py": {"source"},  # the reader of one model's files, which Megatron-Bridge makes replaceable
    "config/fields.py": {"activation_func", "attention_backend", "dist_train"},
    "models/qwen3_vl/model.py": {"module"}, "simulation/one_rank.py": {"step"}, "training/resuming.py": {"load_rng"},
}  # fmt: skip


def root_of(node: ast.AST | None) -> str:
    """The name with which an expression such as `name.of.something()` begins."""
    while node is not None and not isinstance(node, ast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
    return node.id if node is not None else ""


def assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value


def replaced_in(source: str) -> set[str]:
    """Attributes of objects other than `self` that are given a function or class of this file, or what it imports from
    others; and all attributes of what is called `module`.
    """
    tree = ast.parse(source)
    code = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    imported = {alias.asname or alias.name for node in imports for alias in node.names}

    def is_code(value: ast.expr) -> bool:
        match value:
            case ast.Lambda():
                return True
            case ast.Call():
                return root_of(value.func) in code | {"functools"}
            case ast.Attribute(value=ast.Name("self")):
                return value.attr in code
            case _:
                return root_of(value) in code | imported

    assigned = {
        target.attr
        for target, value in assignments(tree)
        if isinstance(target, ast.Attribute)
        and (root := root_of(target)) not in ("self", "cls", "ctx")
        and (root == "module" or is_code(value))
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in calls:
        match call.args if root_of(call.func) in ("temporarily_set", "replace") else []:
            case [_, ast.Constant(str() as name), _, ast.Attribute(value=ast.Name("When"))]:
                assigned.add(name)
            case [_, ast.Constant(str() as name), value] if is_code(value):
                assigned.add(name)
    for node in ast.walk(tree):  # by upstream/replacements.py
        match node:
            case ast.Call(args=[_, ast.Constant(str() as name), _, ast.Attribute(value=ast.Name("When"))]):
                assigned.add(name)
    return assigned


def test_functions_replaced_outside_upstream_are_listed_in_compatibility_page():
    """Of objects of one run; those of modules and classes are replaced by `upstream/`, and recorded."""
    listed: dict[str, str] = {}
    file = ""
    for line in REPLACED.splitlines():
        if line.startswith("| ") and not line.startswith("| file") and line.count("|") == 4:
            first, names = line.split("|")[1:3]
            file = first.strip(" `") or file
            listed[file] = listed.get(file, "") + names
    package = ROOT / "src" / "qwen3vl_bridge"
    replacing = {"data/webdataset.py"}  # by objects, not by functions
    for path in sorted(package.rglob("*.py")):
        if (package / "upstream") in path.parents:
            continue
        name = path.relative_to(package).as_posix()
        found = replaced_in(path.read_text()) - NOT_REPLACED.get(name, set())
        assert {one for one in found if f"`{one}`" not in listed.get(name, "")} == set(), name
        replacing |= {name} if found else set()
    assert listed.keys() == replacing


def test_functions_replaced_in_this_process_are_listed_in_compatibility_page():
    from megatron.bridge.training import finetune  # noqa: F401  the modules of a run

    rows = documented()
    for one in replaced():
        assert any(row.when.startswith(one.when) and fnmatch(one.name, row.name) for row in rows), one


# The number of our files that four journeys through the code enter. Lower a limit when a journey gets shorter.
# A file counts if one of its functions is called; executing a module does not count.

COUNT = """
import inspect, sys, threading
from pathlib import Path

entered = set()

def count(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    # Only functions are optimized. Type parameters are a function's that Python calls where it executes a `def`.
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<generic parameters")
    if event == "call" and is_function and "/qwen3vl_bridge/" in name:
        entered.add(name.rpartition("/qwen3vl_bridge/")[2])

def enter(way, others=()):
    threading.setprofile(count)
    sys.setprofile(count)
    way()
    sys.setprofile(None)
    # Modules of upstream/ are adapters, read when a release changes a name, and by no reader on the way. Python calls
    # the import hook, and so the first two, for each module that a library imports late.
    ways = entered.difference(others, ["__init__.py", "registration.py"])
    print("entered", *sorted(name for name in ways if not name.startswith("upstream/")))

hf, target = sys.argv[1:]
"""

# From a Hugging Face folder to the end of the first forward pass, of a padded row with an image.
MODEL = """
import torch
import qwen3vl_bridge
from megatron.bridge import AutoBridge
from transformers import AutoProcessor
from PIL import Image
from qwen3vl_bridge.training.process_groups import initialize

asked = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (64, 64))}]}]
processor = AutoProcessor.from_pretrained(hf)
inputs = processor.apply_chat_template(asked, tokenize=True, return_dict=True, return_tensors="pt")
inputs.pop("mm_token_type_ids", None)

def way():
    bridge = AutoBridge.from_hf_pretrained(hf)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.finalize()
    initialize(provider, seed=0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    model(**inputs)

enter(way)
"""

IMPORT = """
from qwen3vl_bridge.checkpoint import import_checkpoint
enter(lambda: import_checkpoint(hf, target, progress=False))
"""

# From a data file to a batch with the pixels of its image.
DATA = """
from qwen3vl_bridge.data import Collator, Encoder, SampleFilter, Samples, read_vision_settings
from qwen3vl_bridge.data import load_processor, open_source, pad_token_id

def way():
    processor = load_processor(hf)
    samples = Samples(open_source(target), SampleFilter(Encoder(processor), limit=256))
    vision = read_vision_settings(hf, processor)
    collator = Collator(vision, pad_token_id(processor.tokenizer), seq_length=256)
    assert len(collator.collate_packed([samples.encode(0)]).vision.pixel_values)

enter(way)
"""

# A run's save, and the same save by Megatron-Bridge's own manager, which calls our model and callbacks too: the files
# that it enters are no part of ours.
SAVE = """
import qwen3vl_bridge
from megatron.bridge.training.checkpointing import DefaultCheckpointManager
from megatron.bridge.training.finetune import finetune
from qwen3vl_bridge.training.checkpoint_manager import Qwen3VLCheckpointManager
from tests.training.running import Inputs
from tests.training.running import replicated

save = Qwen3VLCheckpointManager.save

def saves(manager, ctx, callbacks):
    settings, run = ctx.state.cfg.checkpoint, ctx.state.cfg.checkpoint.save
    settings.save = run + "_of_megatron_bridge"
    sys.setprofile(count)
    DefaultCheckpointManager.save(manager, ctx, callbacks)
    sys.setprofile(None)
    theirs, settings.save = set(entered), run
    entered.clear()
    enter(lambda: save(manager, ctx, callbacks), theirs)
    assert (Path(run) / "iter_0000001" / "hf" / "config.json").is_file()

Qwen3VLCheckpointManager.save = saves
settings = dict(train__train_iters=1, scheduler__lr_warmup_iters=0, validation__eval_iters=0)
cfg = replicated(Inputs(Path(hf), Path(target), None), Path(target) / "run", **settings)
finetune(cfg, qwen3vl_bridge.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))
"""


def files_entered(program: str, *paths: Path) -> list[str]:
    words = [sys.executable, "-c", COUNT + program, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("entered ")]
    return line.split()[1:]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return folder


@pytest.fixture
def train_file(tmp_path) -> Path:
    picture(tmp_path / "1.png", 64, 64)
    asked = {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": "Which digit?"}]}
    return write(tmp_path / "train.jsonl", [{"messages": [asked, {"role": "assistant", "content": "Seven."}]}])


def test_forward_pass_calls_functions_of_few_source_files(model, tmp_path):
    files = files_entered(MODEL, model, tmp_path)
    assert len(files) <= 30, files


@pytest.mark.slow
def test_checkpoint_import_calls_functions_of_few_source_files(model, tmp_path):
    files = files_entered(IMPORT, model, tmp_path / "megatron")
    assert len(files) <= 18, files


def test_encoding_an_image_calls_functions_of_few_source_files(model, train_file):
    files = files_entered(DATA, model, train_file)
    assert len(files) <= 12, files


@pytest.mark.slow
def test_checkpoint_save_calls_functions_of_few_source_files(model, tmp_path):
    make_dataset(tmp_path)
    files = files_entered(SAVE, model, tmp_path)
    assert len(files) <= 4, files
