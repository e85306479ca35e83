"""Laws of docs/architecture.md that the linter does not check: no circle of imports, and which functions of other
libraries are replaced.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The names of a circle in the order in which they are imported; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


@pytest.mark.parametrize("package", TREES)
def test_no_module_imports_itself_by_way_of_others(package):
    top = TREES[package]
    names = {path: path.relative_to(top).with_suffix("").parts for path in (top / package).rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}
    assert len(modules) > 10
    graph = {name: set(imports_in(path.read_text(), modules.keys())) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(modules)
    assert not circle_in(graph), " -> ".join(circle_in(graph))


# Attributes that are set to a name and are no functions of others: settings, flags, specs, a module's own name.
NOT_REPLACED = {
    "data/webdatasets.py": {"global_error_handler"}, "data/sources/hub.py": {"_part"},
    "inference/generation.py": {"training"}, "models/layer_specs.py": {"module", "mlp"},
    "models/bridge.py": {"source"},  # the reader of one model's files, which Megatron-Bridge makes replaceable
    "models/settings.py": {"activation_func", "attention_backend", "dist_train"},
    "models/qwen3_vl/model.py": {"module"}, "rehearsal/one_rank.py": {"step"}, "training/resuming.py": {"load_rng"},
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
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and root_of(node.func) == "changed")
    for call in calls:
        match call.args:
            case [_, ast.Constant(str() as name), value] if is_code(value):
                assigned.add(name)
    return assigned


def test_replaced_functions_are_those_of_the_page():
    listed: dict[str, str] = {}
    file = ""
    for line in REPLACED.splitlines():
        if line.startswith("| ") and not line.startswith("| file"):
            first, names = line.split("|")[1:3]
            file = first.strip(" `") or file
            listed[file] = listed.get(file, "") + names
    listed["compat/import_hook.py"] += "`exec_module`"
    package = ROOT / "src" / "qwen3vl_bridge"
    replacing = {"data/webdatasets.py"}  # by objects, not by functions
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        found = replaced_in(path.read_text()) - NOT_REPLACED.get(name, set())
        assert {one for one in found if f"`{one}`" not in listed.get(name, "")} == set(), name
        replacing |= {name} if found else set()
    assert listed.keys() == replacing
