"""Functions of Megatron-Bridge and megatron-core that are replaced, each with the reason.

What lives here: what each of them does instead, and in which module it is found. What may not: when modules are
imported (`import_hook.py`), CUDA that is missing (`cpu.py`), anything that imports torch or Megatron when this module
is loaded.

None of them has a seam of its own: no registry to enter a class in, no method of ours that is asked. Each does for
everything else what it did.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from qwen3vl_bridge.compat.linear_attention_kernels import PATCHES as KERNELS

_DATASETS = "megatron.core.datasets"


def apply(module: ModuleType) -> None:
    """Replace what a module holds that has just been executed."""
    # By its function, not by its module: whoever imports it has it too, wherever the hook was installed.
    if getattr(vars(module).get("compile_helpers"), "__module__", None) == f"{_DATASETS}.utils":
        module.compile_helpers = _unless_compiled(module.compile_helpers)  # type: ignore[attr-defined]
    if (patch := _PATCHES.get(module.__name__)) is not None:
        patch(module)


def _unless_compiled(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """megatron-core's function that compiles the indices of its GPT data sets, which Megatron-Bridge's set-up calls.

    A wheel has them compiled, and no Makefile, for want of which that function would end the process.
    """

    def compile_where_possible() -> None:
        compiled = importlib.util.find_spec(f"{_DATASETS}.helpers_cpp")
        if compiled is None or Path(str(compiled.origin)).with_name("Makefile").exists():
            compile_helpers()

    return compile_where_possible


def _give_ours(module: Any) -> None:
    """A saved configuration that names Megatron-Bridge's provider gives ours. The classes themselves stay its own."""
    theirs = module._resolve_target

    @functools.wraps(theirs)
    def resolve(target: Any, full_key: Any, check_callable: bool = True) -> Any:
        found = theirs(target, full_key, check_callable)
        if not check_callable:  # named to be referred to, not to be built
            return found
        from qwen3vl_bridge.models.common.settings.saved_providers import ours_for

        return ours_for(found)

    module._resolve_target = module._mcore_instantiate_utils._resolve_target = resolve


def _read_every_weight(module: Any) -> None:
    """Megatron-Bridge passes over weights that it does not find; of our models it has to find all."""
    theirs = module.load_fsdp_dtensor_checkpoint

    @functools.wraps(theirs)
    def load(*args: Any, **kwargs: Any) -> Any:
        from qwen3vl_bridge.training.checkpointing.fsdp_loader import load_every_weight

        return load_every_weight(theirs, *args, **kwargs)

    module.load_fsdp_dtensor_checkpoint = load


def _evaluate_modules_together(module: Any) -> None:
    """Megatron-Bridge's loop calls its `evaluate` without the communicator between modules on ranks of their own.

    In training it takes the provider's (`dist_train`); `evaluate` takes one as an argument alone, which neither of the
    two places that evaluate gives, and would run each rank's module by itself.
    """
    theirs = module.evaluate

    @functools.wraps(theirs)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        from qwen3vl_bridge.encoder_parallel.evaluation import evaluate_modules_together

        return evaluate_modules_together(theirs, *args, **kwargs)

    module.evaluate = evaluate


def _save_adapters_of_ours(module: Any) -> None:
    """Have `AutoBridge.save_hf_adapter` write our models' adapters by our function.

    Its own knows neither DoRA's magnitudes nor how `peft` packs experts', nor alphas that differ, and asks no bridge;
    Megatron-Bridge's training and RL frameworks call it at every checkpoint. `export_adapter_ckpt` takes any run's
    adapters for LoRA.
    """
    auto_bridge = module.AutoBridge
    save, export = auto_bridge.save_hf_adapter, auto_bridge.export_adapter_ckpt

    @functools.wraps(save)
    def save_hf_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        from qwen3vl_bridge.models.common.adapters.conversion import AdapterConversion
        from qwen3vl_bridge.peft import hf_export

        ours = isinstance(self._model_bridge, AdapterConversion)
        (hf_export.save_hf_adapter if ours else save)(self, *args, **kwargs)

    @functools.wraps(export)
    def export_adapter_ckpt(self: Any, peft_checkpoint: str | Path, *args: Any, **kwargs: Any) -> None:
        from qwen3vl_bridge.models.common.adapters.conversion import AdapterConversion
        from qwen3vl_bridge.peft import hf_export

        if isinstance(self._model_bridge, AdapterConversion):
            hf_export.refuse_run_of_dora(peft_checkpoint)
        export(self, peft_checkpoint, *args, **kwargs)

    auto_bridge.save_hf_adapter, auto_bridge.export_adapter_ckpt = save_hf_adapter, export_adapter_ckpt


def _build_adam_of_ours(module: Any) -> None:
    from qwen3vl_bridge.compat import adam

    adam.replace_in_optimizers(module)


def _save_adam_of_ours(module: Any) -> None:
    from qwen3vl_bridge.compat import adam

    adam.replace_in_distributed_optimizer(module)


# By module: where a saved configuration's classes are found, where the one format of checkpoint is read whose names
# depend on what a model is made of, where runs are evaluated, where adapters are written, and which Adam there is where
# no fused one is.
_PATCHES: Mapping[str, Callable[[Any], None]] = {
    **KERNELS,
    "megatron.bridge.utils.instantiate_utils": _give_ours,
    "megatron.bridge.training.checkpointing": _read_every_weight,
    "megatron.bridge.training.eval": _evaluate_modules_together,
    "megatron.bridge.models.conversion.auto_bridge": _save_adapters_of_ours,
    "megatron.core.optimizer": _build_adam_of_ours,
    "megatron.core.optimizer.distrib_optimizer": _save_adam_of_ours,
}
