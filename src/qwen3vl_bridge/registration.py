"""Register our bridges when Megatron-Bridge is imported, and replace a few functions in modules of Megatron.

The import hook calls `after_import` for each module of Megatron, and `register` when Megatron-Bridge has registered its
own models. `docs/compatibility.md` lists the replaced functions, and `qwen3vl doctor` shows them. The replacements
import our own code only when they are called, because Megatron is not fully imported when this module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from qwen3vl_bridge import registry
from qwen3vl_bridge.upstream import (
    adam,
    auto_bridge_saves,
    cpu,
    dataset_helpers,
    fsdp_checkpoints,
    l2_norm,
    missing_transformer_engine,
    mixed_precision_optimizers,
    modelopt_export,
    muon,
    saved_configs,
)


def after_import(module: ModuleType) -> None:
    """Replace functions in a module of Megatron or ModelOpt that has just been imported.

    Raises:
        ImportError: The module does not define a function that we replace: its release is not supported.
    """
    for step in (cpu.adopt, *_STEPS.get(module.__name__, ())):
        try:
            step(module)
        except AttributeError as error:
            function = step.func if isinstance(step, partial) else step
            raise ImportError(
                f"{error}, which {function.__module__} replaces. The installed release of this library is not "
                "supported: docs/compatibility.md lists the supported releases"
            ) from error


def register() -> None:
    """Register the bridges of all families. Megatron-Bridge must be imported."""
    registry.import_bridges()


def _builder_for(target: Any) -> Any:
    from qwen3vl_bridge.models.common.provider import provider_builder

    return provider_builder(target)


def _load_fsdp_weights(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from qwen3vl_bridge.training.weight_loading import load_fsdp_weights

    return load_fsdp_weights(theirs, *args, **kwargs)


def _is_our_bridge(bridge: Any) -> bool:
    from qwen3vl_bridge.peft.running_model_export import AdapterConversion

    return isinstance(bridge, AdapterConversion)


def _save_hf_adapter(*args: Any, **kwargs: Any) -> None:
    from qwen3vl_bridge.peft.running_model_export import save_hf_adapter

    save_hf_adapter(*args, **kwargs)


def _check_adapter_checkpoint(folder: str | Path) -> None:
    from qwen3vl_bridge.peft.running_model_export import check_no_dora_run

    check_no_dora_run(folder)


def _is_our_model(model: Any) -> bool:
    from qwen3vl_bridge.models.common.model import VisionLanguageModel

    return isinstance(model, VisionLanguageModel)


# For each module of Megatron or ModelOpt, the functions that change it after its import.
_STEPS: Mapping[str, tuple[Callable[[ModuleType], None], ...]] = {
    "megatron.bridge.training.initialize": (dataset_helpers.keep_compiled_helpers,),
    "megatron.bridge.utils.instantiate_utils": (partial(saved_configs.build_instead, builder_for=_builder_for),),
    "megatron.bridge.training.checkpointing": (partial(fsdp_checkpoints.load_with, load=_load_fsdp_weights),),
    "megatron.bridge.models.conversion.auto_bridge": (
        partial(
            auto_bridge_saves.save_adapters_with,
            is_ours=_is_our_bridge,
            save=_save_hf_adapter,
            check=_check_adapter_checkpoint,
        ),
    ),
    "megatron.bridge.training.eval_context_parallel_rebinding": (missing_transformer_engine.note_missing_attention,),
    "megatron.bridge.peft.utils": (missing_transformer_engine.note_missing_layers,),
    "megatron.bridge.peft.module_matcher": (missing_transformer_engine.note_missing_layers,),
    "megatron.core.optimizer": (adam.use_adam, muon.split_fused_projections),
    "megatron.core.optimizer.clip_grads": (l2_norm.stay_on_device,),
    "megatron.core.optimizer.distrib_optimizer": (adam.save_state_of_adam,),
    "megatron.core.optimizer.optimizer": (mixed_precision_optimizers.save_all_dtypes,),
    "modelopt.torch.export.unified_export_megatron": (partial(modelopt_export.export_towers, is_ours=_is_our_model),),
}
