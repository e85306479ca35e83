"""Find recipes by name, with the GPUs that they are made for."""

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

_MODULES = ("qwen3_vl", "qwen35_vl", "qwen38_flash_next", "digits")


@dataclass(frozen=True)
class Recipe:
    """A function that returns a configuration, with the GPUs that the configuration is made for.

    Attributes:
        build: function without parameters.
        gpus: number of GPUs; 0 for a machine without GPUs.
        gpu: kind of GPU, a key of `qwen3vl_bridge.planning.hardware.GPUS`.
        summary: one line for `qwen3vl train --list`.
    """

    build: Callable[[], ConfigContainer]
    gpus: int
    gpu: str
    summary: str

    # Megatron-Bridge's launcher passes those of its options that a recipe's signature lists. This one lists none.
    __signature__: ClassVar[inspect.Signature] = inspect.Signature()

    def __call__(self, **options: Any) -> ConfigContainer:
        """Return a new configuration. Raise TypeError for options, which only Megatron-Bridge's recipes have."""
        if options:
            raise TypeError(
                f"recipes take no options, found {options}: change the configuration that a recipe returns. For DoRA, "
                "use a DoRA recipe such as qwen3_vl_8b_peft_dora_config"
            )
        return self.build()


def recipe(*, gpus: int, gpu: str = "H100") -> Callable[[Callable[[], ConfigContainer]], Recipe]:
    """Return a decorator that makes a function a recipe; the first line of its docstring is the summary."""
    return lambda build: Recipe(build, gpus, gpu, (build.__doc__ or "").partition("\n")[0])


def recipes() -> Mapping[str, Recipe]:
    """Return all recipes of this package by name, small models first."""
    modules = [importlib.import_module(f"{__package__}.{module}") for module in _MODULES]
    return {name: one for module in modules for name, one in vars(module).items() if isinstance(one, Recipe)}


def find(name: str) -> Recipe:
    """Return the recipe named `name`, or a recipe that calls a user's function.

    Args:
        name: name of a recipe, or of a user's function: `path/to/file.py:function` or `package.module:function`.

    Raises:
        ValueError: the recipe does not exist. The message lists similar names.
    """
    where, colon, function = name.rpartition(":")
    if colon:
        try:
            module = _module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        except ModuleNotFoundError as error:
            wrong = "expected a module, or a file with the suffix .py"
            if not error.name or not f"{where}.".startswith(f"{error.name}."):
                wrong = f"{where} imports this module: install it, or add its folder to PYTHONPATH"
            raise ValueError(f"{where}: {error}; {wrong}") from error
        found = getattr(module, function, None)
        if not callable(found):
            raise ValueError(f"{where} has no function {function!r}, expected one that returns a configuration")
        return found if isinstance(found, Recipe) else recipe(gpus=0)(found)
    known = recipes()
    if name.endswith(".py"):
        raise ValueError(f"--recipe is {name}, expected one of its functions: {name}:FUNCTION")
    if name not in known:
        import difflib

        # Names with all words of this name come first: 30b means 30b_a3b, not the more similar 32b.
        words = set(name.split("_"))
        more = sorted((one for one in known if words < set(one.split("_"))), key=len)
        close = (more or difflib.get_close_matches(name, known, n=3) or sorted(known))[:3]
        raise ValueError(f"there is no recipe {name!r}; did you mean {', '.join(close)}? --list shows all")
    return known[name]


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: found nothing, expected a Python file with a recipe")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as a Python module: check the name of the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
