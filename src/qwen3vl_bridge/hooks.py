"""What happens when Megatron is imported: our bridges register, and what this machine lacks is seen to.

What lives here: one import hook and the things it does. What may not: anything that imports torch or Megatron
when this module is loaded, and the redirections for a machine without CUDA themselves (`cpu.py`).

A hook instead of an import, for two reasons. Megatron-Bridge takes about ten seconds to import, which commands that
don't need it should not pay. And without Transformer Engine one of its modules cannot be imported at all, so
something has to be in place before `import megatron.bridge` runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

_BRIDGE_MODELS = "megatron.bridge.models"
# The one module of Megatron-Bridge that needs Transformer Engine to be imported, for names in annotations and for
# classes it uses only where Transformer Engine layers are there.
_NEEDS_TRANSFORMER_ENGINE = "megatron.bridge.peft.lora_layers"
# And two that ask megatron-core for Transformer Engine's layers and take the empty names they get for classes.
_MISTAKE_NAMES_FOR_CLASSES = ("megatron.bridge.peft.utils", "megatron.bridge.peft.module_matcher")
# Where Megatron-Bridge finds the class that a saved configuration names. It has no registry to enter another one in.
_FINDS_SAVED_CLASSES = "megatron.bridge.utils.instantiate_utils"


def install() -> None:
    """Install the hook; register at once where Megatron-Bridge is imported already. Repeated calls do nothing."""
    if any(isinstance(finder, _Imports) for finder in sys.meta_path):
        return
    imports = _Imports()
    sys.meta_path.insert(0, imports)
    for name, module in list(sys.modules.items()):
        if _is_part_of(name, "megatron"):
            imports.after(module)


def _is_part_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


class _Imports(MetaPathFinder):
    """Finds Megatron's modules and ours as the finders behind it do, and adds a step before and after execution.

    Attributes:
        ours_running: how many modules of ours are being executed. One of them may be the reason why Megatron-Bridge
            is imported, and would be needed half finished by the registration, which therefore waits for it.
        register_later: whether a registration waits.
    """

    def __init__(self) -> None:
        self.ours_running = 0
        self.register_later = False

    def find_spec(self, fullname: str, path=None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not (_is_part_of(fullname, "megatron") or _is_part_of(fullname, __package__)):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._wrap_execution(spec)
                return spec
        return None

    def _wrap_execution(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):  # a namespace package executes nothing
            return
        execute = loader.exec_module
        ours = _is_part_of(spec.name, __package__)

        def exec_module(module: ModuleType) -> None:
            self.ours_running += ours
            try:
                with self._prepared(spec.name):
                    execute(module)
            finally:
                self.ours_running -= ours
            self.after(module)

        loader.exec_module = exec_module

    def _prepared(self, name: str) -> contextlib.AbstractContextManager:
        return _transformer_engine_stand_in() if name == _NEEDS_TRANSFORMER_ENGINE else contextlib.nullcontext()

    def after(self, module: ModuleType) -> None:
        """What follows the execution of a module of Megatron's or ours."""
        if _is_part_of(module.__name__, "megatron"):
            from qwen3vl_bridge import cpu

            cpu.adopt(module)
        if module.__name__ in _MISTAKE_NAMES_FOR_CLASSES and not _has_transformer_engine():
            vars(module).update({name: False for name in vars(module) if name.startswith("HAVE_TE")})
        if module.__name__ == _FINDS_SAVED_CLASSES:
            _give_ours(module)
        # When its models are there, Megatron-Bridge has registered its own Qwen3-VL; the later registration wins.
        self.register_later |= module.__name__ == _BRIDGE_MODELS
        if self.register_later and not self.ours_running:
            self.register_later = False
            importlib.import_module("qwen3vl_bridge.bridge")


def _give_ours(module: Any) -> None:
    """A saved configuration that names Megatron-Bridge's Qwen3-VL gives ours. The classes themselves stay its own."""
    theirs = module._resolve_target

    @functools.wraps(theirs)
    def resolve(target: Any, full_key: Any, check_callable: bool = True) -> Any:
        found = theirs(target, full_key, check_callable)
        if not check_callable:  # named to be referred to, not to be built
            return found
        from qwen3vl_bridge.saved_providers import ours_for

        return ours_for(found)

    module._resolve_target = module._mcore_instantiate_utils._resolve_target = resolve


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


class _StandIn(ModuleType):
    """A module whose every attribute is an empty class: enough to be imported, of no use to be called."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInClass(name, (), {})


class _StandInClass(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInClass(name, (), {})

    def __call__(cls, *args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError(f"{cls.__name__} is Transformer Engine's, which is not installed")


@contextlib.contextmanager
def _transformer_engine_stand_in() -> Iterator[None]:
    """Where Transformer Engine is missing, something by its name to import, for the time of the context only.

    Left in `sys.modules` it would make megatron-core, peft and others believe Transformer Engine is installed.
    """
    if _has_transformer_engine():
        yield
        return
    package, pytorch = _StandIn("transformer_engine"), _StandIn("transformer_engine.pytorch")
    package.pytorch = pytorch  # type: ignore[attr-defined]
    sys.modules.update({"transformer_engine": package, "transformer_engine.pytorch": pytorch})
    try:
        yield
    finally:
        del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]
