"""The registry of recipes, and the machines that each is meant for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

_MODULES = ("qwen3_vl", "qwen35_vl", "digits")


@dataclass(frozen=True)
class Recipe:
    """A function without parameters that returns a configuration, and the machine that it is meant for.

    Attributes:
        build: the function.
        gpus: number of GPUs; 0 for a machine without any.
        gpu: their kind, a key of `qwen3vl_bridge.planning.hardware.GPUS`.
        summary: one line.
    """

    build: Callable[[], ConfigContainer]
    gpus: int
    gpu: str
    summary: str

    # Megatron-Bridge's launcher passes its options to recipes whose signature has them.
    __signature__: ClassVar[inspect.Signature] = inspect.Signature()

    def __call__(self, **options: Any) -> ConfigContainer:
        """A new configuration; raises TypeError for options, which Megatron-Bridge's recipes have."""
        if options:
            raise TypeError(
                f"a recipe has no options, and was given {options}: change the configuration that it returns; DoRA has "
                "recipes of its own, such as qwen3_vl_8b_peft_dora_config"
            )
        return self.build()


def recipe(*, gpus: int, gpu: str = "H100") -> Callable[[Callable[[], ConfigContainer]], Recipe]:
    """Make the function below a recipe for this number and kind of GPUs; its summary is the docstring's first line."""
    return lambda build: Recipe(build, gpus, gpu, (build.__doc__ or "").partition("\n")[0])


def recipes() -> Mapping[str, Recipe]:
    """All recipes of this package by name, small models first."""
    modules = [importlib.import_module(f"{__package__}.{module}") for module in _MODULES]
    return {name: one for module in modules for name, one in vars(module).items() if isinstance(one, Recipe)}


def find(name: str) -> Recipe:
    """A recipe by its name, or a user's function as `path/to/file.py:function` or `package.module:function`.

    Raises:
        ValueError: it does not exist; the message lists similar names.
    """
    where, colon, function = name.rpartition(":")
    if colon:
        try:
            module = _module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        except ModuleNotFoundError as error:
            wrong = "expected a module, or a file with the suffix .py"
            if not error.name or not f"{where}.".startswith(f"{error.name}."):
                wrong = "it imports that, and it is not installed or not on PYTHONPATH"
            raise ValueError(f"{where}: {error}; {wrong}") from error
        found = getattr(module, function, None)
        if not callable(found):
            raise ValueError(f"{where} has no function {function!r}")
        return found if isinstance(found, Recipe) else recipe(gpus=0)(found)
    known = recipes()
    if name.endswith(".py"):
        raise ValueError(f"--recipe is {name}, expected one of its functions: {name}:FUNCTION")
    if name not in known:
        import difflib

        close = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
        raise ValueError(f"there is no recipe {name!r}; did you mean {', '.join(close)}? --list shows all")
    return known[name]


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: found nothing, expected a Python file with a recipe")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: Python cannot read it as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
