"""Import hook for Megatron: registers our bridges, and handles missing packages and hardware.

There are two reasons for a hook instead of an import. Importing Megatron-Bridge takes about ten seconds, which commands
that do not need it should not spend. And two of its modules cannot be imported without packages that may not be
installed, so substitutes have to be in place before `import megatron.bridge` runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

from qwen3vl_bridge.compat import patches

_BRIDGE_MODELS = "megatron.bridge.models"
# Modules of Megatron-Bridge that cannot be imported without a package although they need only names from it, and the
# modules of that package that they import. `lora_layers` refers to classes that it uses only with layers of Transformer
# Engine. `pretrain`, which all training uses, annotates an argument with a class of the package for in-process
# restarts; the code that uses it is imported if `cfg.inprocess_restart` is set, and then fails as usual. The package
# itself is not listed, so other code that looks for it (asynchronous saving) finds it missing.
_NEEDED_FOR_NAMES = {
    "megatron.bridge.peft.lora_layers": ("transformer_engine", "transformer_engine.pytorch"),
    "megatron.bridge.training.pretrain": ("nvidia_resiliency_ext.inprocess",),
}
# ModelOpt's modules that call CUDA for Megatron's models: without it, on the CPU.
_OF_MODELOPT = frozenset(
    f"modelopt.torch.{name}"
    for name in ("opt.plugins.megatron", "export.unified_export_megatron", "utils.plugins.mbridge")
)
# Modules that import Transformer Engine's layers from megatron-core and treat the empty names as classes.
_MISTAKE_NAMES_FOR_CLASSES = ("megatron.bridge.peft.utils", "megatron.bridge.peft.module_matcher")


def install() -> None:
    """Install the hook; if Megatron-Bridge is already imported, register immediately. Repeated calls do nothing."""
    if any(isinstance(finder, _Imports) for finder in sys.meta_path):
        return
    imports = _Imports()
    sys.meta_path.insert(0, imports)
    for name, module in list(sys.modules.items()):
        if _runs_megatron(name):
            imports.after(module)


def _is_part_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _runs_megatron(name: str) -> bool:
    return _is_part_of(name, "megatron") or name in _OF_MODELOPT


class _Imports(MetaPathFinder):
    """Finds Megatron's modules and ours with the other finders, and adds a step before and after execution."""

    def __init__(self) -> None:
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
        """Run the steps that follow the execution of one of Megatron's or our modules."""
        of_megatron = _runs_megatron(module.__name__)
        if of_megatron:
            from qwen3vl_bridge.compat import cpu

            cpu.adopt(module)
        if module.__name__ in _MISTAKE_NAMES_FOR_CLASSES and not _is_installed("transformer_engine"):
            vars(module).update({name: False for name in vars(module) if name.startswith("HAVE_TE")})
        patches.apply(module)
        if of_megatron:
            from qwen3vl_bridge import registry

            registry.replace_functions(module)
        # Importing its models registers Megatron-Bridge's own Qwen3-VL; ours has to follow, because the last one wins.
        self.register_later |= module.__name__ == _BRIDGE_MODELS
        if self.register_later and not self.ours_running:
            self.register_later = False
            from qwen3vl_bridge import registry

            registry.import_bridges()


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, unless it is: also for another thread, which then has it back too early.

    Megatron's import creates 800,000 permanent objects. Traversing them repeatedly takes 1.9 of its 10.4 seconds, once
    at the end 0.7 (docs/benchmarks.md).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class _StandIn(ModuleType):
    """A module whose attributes are all empty classes: they can be imported; calling them raises an error."""

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
    """If a package is missing, provide importable substitutes for its modules within the context only.

    If they stayed in `sys.modules`, megatron-core, peft and others would treat the package as installed.
    """
    if not names or _is_installed(names[0].partition(".")[0]):
        yield
        return
    modules = {name: _StandIn(name) for name in names}
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
