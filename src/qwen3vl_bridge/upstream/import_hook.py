"""Steps before and after the import of Megatron's modules.

There are two reasons for a hook instead of an import. Importing Megatron-Bridge takes about ten seconds, which commands
that do not need it should not spend. And two of its modules cannot be imported without packages that may not be
installed, so substitutes have to be in place before `import megatron.bridge` runs.

Wrapped: `exec_module` of the loaders of these modules. Delete the substitutes when Megatron-Bridge
imports without the packages, and the rest when it finds plugins by itself (entry points).
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

from qwen3vl_bridge.lazy import is_installed

_BRIDGE_MODELS = "megatron.bridge.models"
# Keys: modules of Megatron-Bridge that cannot be imported without a package although they need only names from it.
# Values: the modules of that package that they import. `lora_layers` refers to classes that it uses only with layers of
# Transformer Engine. `pretrain`, which all training uses, annotates an argument with a class of the package for
# in-process restarts; the code that uses it is imported if `cfg.inprocess_restart` is set, and then fails as usual. The
# package itself is not listed, so other code that looks for it (asynchronous saving) finds it missing.
_NEEDED_FOR_NAMES = {
    "megatron.bridge.peft.lora_layers": ("transformer_engine", "transformer_engine.pytorch"),
    "megatron.bridge.training.pretrain": ("nvidia_resiliency_ext.inprocess",),
}
# ModelOpt's modules that call CUDA for Megatron's models. Without CUDA `upstream/cpu.py` makes them use the CPU.
_OF_MODELOPT = frozenset(
    f"modelopt.torch.{name}"
    for name in ("opt.plugins.megatron", "export.unified_export_megatron", "utils.plugins.mbridge")
)


def install(after_import: Callable[[ModuleType], None], register: Callable[[], None]) -> None:
    """Install the import hook. It also handles modules that are imported already. Repeated calls do nothing.

    Args:
        after_import: called with each module of Megatron, and some of ModelOpt's, right after its execution.
        register: called when Megatron-Bridge has registered its own models, and no module of ours is being executed.
    """
    if any(isinstance(finder, _Imports) for finder in sys.meta_path):
        return
    imports = _Imports(after_import, register)
    sys.meta_path.insert(0, imports)
    for name, module in list(sys.modules.items()):
        if _runs_megatron(name):
            imports.after(module)


def _is_part_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _runs_megatron(name: str) -> bool:
    return _is_part_of(name, "megatron") or name in _OF_MODELOPT


class _Imports(MetaPathFinder):
    """Import finder for modules of Megatron and of this package. It calls other finders, and wraps the execution."""

    def __init__(self, after_import: Callable[[ModuleType], None], register: Callable[[], None]) -> None:
        self.after_import, self.register = after_import, register
        self.ours_running = 0
        self.register_later = False

    def find_spec(self, fullname: str, path=None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not (_runs_megatron(fullname) or _is_part_of(fullname, "qwen3vl_bridge")):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):  # a namespace package executes nothing
                    self._wrap_execution(spec, spec.loader)
                return spec
        return None

    def _wrap_execution(self, spec: ModuleSpec, loader: Any) -> None:
        execute = loader.exec_module
        ours = _is_part_of(spec.name, "qwen3vl_bridge")

        def exec_module(module: ModuleType) -> None:
            self.ours_running += ours
            try:
                with _collector_paused(), _stand_ins(*_NEEDED_FOR_NAMES.get(spec.name, ())):
                    execute(module)
            finally:
                self.ours_running -= ours
            self.after(module)

        loader.exec_module = exec_module

    def after(self, module: ModuleType) -> None:
        """Call `after_import` for an executed module of Megatron, and `register` once the models are imported."""
        if _runs_megatron(module.__name__):
            self.after_import(module)
        # Importing its models registers Megatron-Bridge's own Qwen3-VL; ours has to follow, because the last one wins.
        self.register_later |= module.__name__ == _BRIDGE_MODELS
        if self.register_later and not self.ours_running:
            self.register_later = False
            self.register()


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector inside the `with` block, unless it is paused already.

    All threads share the collector: if another thread has paused it, it may run again too early. Megatron's import
    creates 800,000 permanent objects. Traversing them repeatedly takes 1.9 of the import's 10.4 seconds, traversing
    them once at the end 0.7 (benchmarks/results/README.md).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _StandIn(ModuleType):
    """A module in which every attribute is an empty class. These can be imported, but calling one raises an error."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInClass(name, (), {"__module__": self.__name__})


class _StandInClass(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInClass(name, (), {"__module__": cls.__module__})

    def __call__(cls, *args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError(f"{cls.__name__} belongs to {cls.__module__}, which is not installed")


@contextlib.contextmanager
def _stand_ins(*names: str) -> Iterator[None]:
    """If the package of the modules `names` is missing, make substitutes importable inside the `with` block.

    If the substitutes stayed in `sys.modules`, megatron-core, peft and others would treat the package as installed.
    """
    if not names or is_installed(names[0].partition(".")[0]):
        yield
        return
    modules, before = {name: _StandIn(name) for name in names}, dict(sys.modules)
    for name, module in modules.items():
        package, _, child = name.rpartition(".")
        if package in modules:
            setattr(modules[package], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
            if name in before:  # a stub that another framework had put there
                sys.modules[name] = before[name]
