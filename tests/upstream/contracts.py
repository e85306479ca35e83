"""Checks of names that `qwen3vl_bridge.upstream` borrows from other packages.

Each module of `upstream/` has a test module with one `Contract`. A check that fails names the mechanism, the object and
the installed release of the package, so that a failure after an upgrade says what to repair.
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_RELEASES = {"megatron.core": "megatron-core", "megatron.bridge": "megatron-bridge"}


class Contract:
    """Expectations of one module of `qwen3vl_bridge/upstream`.

    Objects are given by their module and a dotted path in it: `find("megatron.core.utils", "unwrap_model")`.
    """

    def __init__(self, mechanism: str) -> None:
        self.mechanism = mechanism

    def fail(self, module: str, problem: str) -> None:
        package = ".".join(module.split(".")[:2])
        name = _RELEASES.get(package) or (packages_distributions().get(module.split(".")[0]) or [module])[0]
        try:
            release = f"{name} {version(name)}"
        except PackageNotFoundError:
            release = name
        pytest.fail(f"upstream/{self.mechanism}.py: {problem} ({release})", pytrace=False)

    def find(self, module: str, path: str, kind: type | tuple[type, ...] | None = None) -> Any:
        """Return an object, or fail if it does not exist or is not an instance of `kind`."""
        try:
            found = import_module(module)
        except ImportError as error:
            self.fail(module, f"{module} cannot be imported: {error}")
        for name in path.split("."):
            if name not in dir(found) and not hasattr(found, name):
                self.fail(module, f"{module} has no {path}")
            found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
        if kind is not None and not isinstance(found, kind):
            self.fail(module, f"{module}.{path} is {type(found).__name__}, expected {kind}")
        return found.__func__ if isinstance(found, staticmethod | classmethod) else found

    def takes(self, module: str, path: str, *parameters: str) -> None:
        """Fail if a function does not have exactly these parameters; `*a` and `**k` are written as in source code."""
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        signature = inspect.signature(inspect.unwrap(self.find(module, path)))
        found = [stars.get(one.kind, "") + one.name for one in signature.parameters.values()]
        if found != list(parameters):
            self.fail(module, f"{module}.{path} takes ({', '.join(found)}), expected ({', '.join(parameters)})")

    def declares(self, module: str, path: str, *parameters: str) -> None:
        """Fail if the source file does not define a function with exactly these parameters.

        For functions that are replaced in this process, where `takes` would see the replacement.
        """
        found: ast.AST = ast.parse(self.source(module))
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for name in path.split("."):
            inner = (node for node in ast.walk(found) if isinstance(node, kinds) and node.name == name)
            if (found := next(inner, None)) is None:
                self.fail(module, f"{module} does not define {path}")
        arguments = found.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
        names += [one.arg for one in arguments.kwonlyargs]
        names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
        if names != list(parameters):
            self.fail(module, f"{module}.{path} takes ({', '.join(names)}), expected ({', '.join(parameters)})")

    def source(self, module: str) -> str:
        """Return the source text of a module without importing it."""
        try:
            spec = find_spec(module)
        except ImportError as error:
            self.fail(module, f"{module} cannot be found: {error}")
        if spec is None or spec.origin is None:
            self.fail(module, f"{module} does not exist")
        return Path(spec.origin).read_text()

    def has_parameter(self, module: str, path: str, name: str) -> bool:
        """Return True if a function has a parameter, such as one that only newer releases have."""
        return name in inspect.signature(inspect.unwrap(self.find(module, path))).parameters

    def mentions(self, module: str, path: str, *names: str) -> None:
        """Fail if the source of a class or function does not contain these names, such as attributes that it sets."""
        source = inspect.getsource(inspect.unwrap(self.find(module, path)))
        for name in names:
            if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source):
                self.fail(module, f"{module}.{path} does not mention {name}")
