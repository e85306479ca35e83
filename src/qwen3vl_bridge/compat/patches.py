"""Replaced functions of Megatron-Bridge and megatron-core, each with the reason.

None of these functions has an extension point: neither a registry to add a class to, nor a method of ours that it
calls. In all other cases, each replacement behaves like the original.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_DATASETS = "megatron.core.datasets"


def apply(module: ModuleType) -> None:
    """Replace functions in a module that has just been executed."""
    # Matched by the function, not by the module: each module that imports it has its own reference to replace,
    # whenever the hook was installed.
    if getattr(vars(module).get("compile_helpers"), "__module__", None) == f"{_DATASETS}.utils":
        module.compile_helpers = _unless_compiled(module.compile_helpers)  # type: ignore[attr-defined]
    if (patch := _PATCHES.get(module.__name__)) is not None:
        patch(module)


def _unless_compiled(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """megatron-core's function that compiles the index helpers of its GPT data sets, called by Megatron-Bridge's setup.

    A wheel contains the compiled helpers but no Makefile, and without the Makefile that function exits the process.
    """

    def compile_where_possible() -> None:
        compiled = importlib.util.find_spec(f"{_DATASETS}.helpers_cpp")
        if compiled is None or Path(str(compiled.origin)).with_name("Makefile").exists():
            compile_helpers()

    return compile_where_possible


def _give_ours(module: Any) -> None:
    """Build our provider from a saved configuration that names Megatron-Bridge's; its classes are not changed."""
    theirs = module._resolve_target

    @functools.wraps(theirs)
    def resolve(target: Any, full_key: Any, check_callable: bool = True) -> Any:
        found = theirs(target, full_key, check_callable)
        if not check_callable:  # the class is only referenced, not built
            return found
        from qwen3vl_bridge.models.saved_providers import ours_for

        return ours_for(found)

    module._resolve_target = module._mcore_instantiate_utils._resolve_target = resolve


def _around(name: str, ours: str) -> Callable[[ModuleType], None]:
    """Replace a function by ours, a "module:function" that gets the original as its first argument."""

    def patch(module: ModuleType) -> None:
        theirs = getattr(module, name)

        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            return pkgutil.resolve_name(ours)(theirs, *args, **kwargs)

        setattr(module, name, call)

    return patch


def _save_models_of_ours(module: Any) -> None:
    """Make `AutoBridge` write our models' adapters with our function, and a `config.json` that fits the weights.

    Its `save_hf_adapter` supports neither DoRA's magnitudes, nor `peft`'s format for adapters of experts, nor different
    alphas, and has no hook for bridges; Megatron-Bridge's training and RL frameworks call it at every checkpoint.
    `export_adapter_ckpt` treats the adapters of any run as LoRA. `save_hf_pretrained` writes the configuration of the
    model that was loaded, also where the saved weights lack a part of it or have another dtype.
    """
    auto_bridge = module.AutoBridge
    save, export = auto_bridge.save_hf_adapter, auto_bridge.export_adapter_ckpt
    save_model = auto_bridge.save_hf_pretrained

    @functools.wraps(save)
    def save_hf_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        from qwen3vl_bridge.peft import model_adapters

        ours = isinstance(self._model_bridge, model_adapters.AdapterConversion)
        (model_adapters.save_hf_adapter if ours else save)(self, *args, **kwargs)

    @functools.wraps(export)
    def export_adapter_ckpt(self: Any, peft_checkpoint: str | Path, *args: Any, **kwargs: Any) -> None:
        from qwen3vl_bridge.peft import model_adapters

        if isinstance(self._model_bridge, model_adapters.AdapterConversion):
            model_adapters.refuse_run_of_dora(peft_checkpoint)
        export(self, peft_checkpoint, *args, **kwargs)

    @functools.wraps(save_model)
    def save_hf_pretrained(self: Any, model: list[Any], path: str | Path, *args: Any, **kwargs: Any) -> None:
        from qwen3vl_bridge.checkpoint.stored_models import write_config_of_weights
        from qwen3vl_bridge.models.provider import VisionLanguageProvider

        import torch.distributed as dist
        from megatron.core.utils import get_model_config

        save_model(self, model, path, *args, **kwargs)
        is_ours = isinstance(get_model_config(model[0]), VisionLanguageProvider)
        if is_ours and not (dist.is_initialized() and dist.get_rank()):
            write_config_of_weights(path)

    auto_bridge.save_hf_adapter, auto_bridge.export_adapter_ckpt = save_hf_adapter, export_adapter_ckpt
    auto_bridge.save_hf_pretrained = save_hf_pretrained


def _optimizers(name: str) -> Callable[[ModuleType], None]:
    return lambda module: pkgutil.resolve_name(f"qwen3vl_bridge.compat.optimizers:{name}")(module)


_PATCHES: Mapping[str, Callable[[Any], None]] = {
    "megatron.bridge.utils.instantiate_utils": _give_ours,
    # Megatron-Bridge skips weights that it does not find; for our models, a missing weight is an error.
    "megatron.bridge.training.checkpointing": _around(
        "load_fsdp_dtensor_checkpoint", "qwen3vl_bridge.training.weight_loading:load_every_weight"
    ),
    # A vision tower and a language model on separate ranks (`dist_train`) are evaluated together.
    "megatron.bridge.training.eval": _around("evaluate", "qwen3vl_bridge.dist_train.joint_run:evaluate_both_modules"),
    "megatron.bridge.models.conversion.auto_bridge": _save_models_of_ours,
    "megatron.core.optimizer": _optimizers("patch_optimizers"),
    "megatron.core.optimizer.distrib_optimizer": _optimizers("patch_distributed_optimizer"),
    "megatron.core.optimizer.optimizer": _optimizers("patch_replicated_optimizer"),
    "megatron.core.optimizer.emerging_optimizers": _optimizers("patch_emerging_optimizers"),
    "megatron.core.optimizer.clip_grads": _optimizers("patch_clipping"),
}
