"""Check that private names of other packages appear only in `qwen3vl_bridge.upstream`.

    .venv/bin/python scripts/private_names.py            # exit status 1 and one line per finding

The check reads source code and imports nothing. A name with one leading underscore is reported outside `upstream/` if
it is

- imported from another package, or part of the path of an imported module,
- read from an object, or given to `getattr` and the like, in a file that does not define it,
- read from `self` or `cls` where no class of ours defines it, so that it is inherited from another package,
- defined in a class whose base class in another package has the same name, so that it overrides or overwrites it.

Files of the base classes are found in the environment of the interpreter that runs this script.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("src/qwen3vl_bridge", "recipes", "conversion")
ALLOWED = ROOT / "src/qwen3vl_bridge/upstream"
OURS = ("qwen3vl_bridge", "qwen3vl_recipes")
# Private in form only: documented methods of named tuples, and functions of the standard library.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe"}
REFLECTION = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"}


class Finding(NamedTuple):
    """A private name of another package in one of our files."""

    path: Path
    line: int
    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.name} {self.problem}"


def is_private(name: str) -> bool:
    """Return True for names such as `_x`, and False for `_`, `__x__` and `_0`."""
    marked = name.startswith("_") and not name.startswith("__") and name.strip("_0123456789") != ""
    return marked and name not in DOCUMENTED


def base_name(node: ast.expr) -> str:
    """Return the first name of an expression such as `a.b[0].c()`, or an empty string."""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                node = inner
            case _:
                return ""
    return node.id


def defined_names(tree: ast.AST) -> set[str]:
    """Return the private names that a file or class defines, as a variable, function, class or attribute of `self`."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
                found.add(name)
    return {name for name in found if is_private(name)}


def imported_from(tree: ast.Module, package: str) -> dict[str, tuple[str, str]]:
    """Return (module, name in that module) for each imported name of a file. For an imported module, the name is "".

    `package` is the package of the file, to which relative imports refer.
    """
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            # Store each `from MODULE import *` under its own key.
            found |= {
                f"* of {source}" if alias.name == "*" else alias.asname or alias.name: (source, alias.name)
                for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0]: (alias.name, "") for alias in node.names}
    return found


@cache
def parsed(module: str) -> tuple[ast.Module, str] | None:
    """Return the syntax tree of a module in the environment and the module's package; None without a source file."""
    parts = Path(*module.split("."))
    roots = [ROOT / "src", ROOT / "recipes", *map(Path, sys.path)]
    for root in roots:
        if (path := root / parts / "__init__.py").is_file():
            return ast.parse(path.read_text()), module
        if (path := root / parts.with_suffix(".py")).is_file():
            return ast.parse(path.read_text()), module.rpartition(".")[0]
    return None


@cache
def inherited_names(module: str, class_name: str) -> frozenset[str]:
    """Return the private names that a class inherits or defines, but only from classes of other packages."""
    source = parsed(module) if module else None
    if source is None:
        return frozenset()
    tree, package = source
    imports = imported_from(tree, package)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        module, original = imports.get(class_name, ("", ""))
        if original:
            return inherited_names(module, original)
        sources = [source for source, name in imports.values() if name == "*"]
        return frozenset().union(*(inherited_names(source, class_name) for source in sources))
    node = classes[class_name]
    names = set() if module.split(".")[0] in OURS else defined_in_class(node)
    for base in node.bases:
        names |= inherited_names(*resolved(base, module, imports))
    return frozenset(names)


def defined_in_class(node: ast.ClassDef) -> set[str]:
    """Return the private attributes and methods that a class defines, without local variables of its methods."""
    names = set()
    for one in ast.walk(node):
        match one:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    for one in node.body:
        match one:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if is_private(name)}


def resolved(base: ast.expr, module: str, imports: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Return (module, name) of the class that `base` refers to; the module is `module` if the class is not imported."""
    if isinstance(base, ast.Subscript):
        base = base.value
    if isinstance(base, ast.Attribute):
        words = ast.unparse(base).split(".")
        where, name = imports.get(words[0], ("", ""))
        return ".".join([*filter(None, (where, name)), *words[1:-1]]), words[-1]
    name = base_name(base)
    return imports.get(name, (module, name))


def check(path: Path, known: set[str]) -> Iterator[Finding]:
    """Yield the findings of one file. `known` are the private names that our classes define."""
    tree = ast.parse(path.read_text())
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
    defined, imports = defined_names(tree), imported_from(tree, module.rpartition(".")[0])
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] not in OURS:
                for name in (*module.split("."), *(alias.name for alias in names)):
                    if is_private(name):
                        yield Finding(path, node.lineno, name, f"is imported from {module}")
            case ast.Attribute(value=value, attr=name) if is_private(name):
                start = base_name(value)
                own = (isinstance(value, ast.Name) and start in ("self", "cls")) or start == "super"
                if name not in defined and not (own and name in known):
                    yield Finding(path, node.lineno, name, f"is read from {ast.unparse(value)[:60]}")
            case ast.Call(func=func, args=args) if ast.unparse(func).split(".")[-1] in REFLECTION:
                for text in (arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)):
                    if is_private(text) and text not in defined:
                        yield Finding(path, node.lineno, text, f"is given to {ast.unparse(func)}")
            case ast.ClassDef(bases=bases):
                for base in bases:
                    theirs = inherited_names(*resolved(base, module, imports))
                    for name in sorted(defined_in_class(node) & theirs):
                        yield Finding(path, node.lineno, name, f"in {node.name} replaces a name of {ast.unparse(base)}")


def main() -> int:
    """Print the findings of all files, and return 1 if there are any."""
    files = sorted(path for folder in CHECKED for path in (ROOT / folder).rglob("*.py"))
    known = {name for path in files for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.ClassDef) for name in defined_in_class(node)}  # fmt: skip
    findings = [one for path in files if ALLOWED not in path.parents for one in check(path, known)]
    print("".join(f"{one}\n" for one in findings), end="")
    return int(bool(findings))


if __name__ == "__main__":
    raise SystemExit(main())
