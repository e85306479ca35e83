"""What docs/architecture.md says of the packages holds in the code: their order, and no circle of imports."""

from __future__ import annotations

import ast
import graphlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TREES = {"qwen3vl_bridge": ROOT / "src", "qwen3vl_recipes": ROOT / "recipes"}


def modules_of(package: str) -> dict[str, Path]:
    top = TREES[package]
    names = {path: path.relative_to(top).with_suffix("").parts for path in (top / package).rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


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
    modules = modules_of(package)
    assert len(modules) > 10
    graph = {name: set(imports_in(path.read_text(), modules.keys())) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(modules)
    assert not circle_in(graph), " -> ".join(circle_in(graph))


def test_circles_are_found():
    known = {"p", "p.a", "p.b", "p.c"}
    sources = {
        "p.a": "from p import b",
        "p.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.c import C",
        "p.c": "import os\ndef f():\n    import p.a",
    }
    graph = {name: set(imports_in(source, known)) for name, source in sources.items()}
    assert circle_in(graph) in (
        ["p.a", "p.b", "p.c", "p.a"],
        ["p.b", "p.c", "p.a", "p.b"],
        ["p.c", "p.a", "p.b", "p.c"],
    )
    assert circle_in(graph | {"p.c": set()}) == []


def test_packages_are_listed_in_the_order_that_the_linter_enforces():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["name"] == "a package imports only packages below it")
    enforced = [set(layer.split(" | ")) for layer in reversed(layers) if layer != "__main__"]

    block = PAGE.split("## Packages", 1)[1].split("```")[1].split("\nrecipes/")[0]
    listed: list[set[str]] = []
    for line in block.strip().splitlines():
        if not line.startswith(" "):
            names = re.split(r"\s{2,}|(?<!,)\s", line)[0]
            packages = {name.removesuffix(".py").split("/")[0] for name in names.split(", ")}
            listed += [packages] if packages not in listed else []
    assert listed == enforced
