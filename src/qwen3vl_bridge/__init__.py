"""Qwen3-VL for Megatron-Bridge: importing this package registers its bridges, providers and model."""

from types import ModuleType as _ModuleType

from qwen3vl_bridge import lazy
from qwen3vl_bridge.upstream import import_hook

_PUBLIC = {
    "Qwen3VLBridge": "qwen3vl_bridge.models.qwen3_vl.bridge",
    "Qwen3VLModel": "qwen3vl_bridge.models.qwen3_vl.model",
    "Qwen3VLModelProvider": "qwen3vl_bridge.models.qwen3_vl.provider",
    "Qwen3VLMoEBridge": "qwen3vl_bridge.models.qwen3_vl.bridge",
    "Qwen3VLMoEModelProvider": "qwen3vl_bridge.models.qwen3_vl.provider",
    "Qwen3VLLoRA": "qwen3vl_bridge.peft.lora",
    "Qwen3VLDoRA": "qwen3vl_bridge.peft.lora",
    "save_hf_adapter": "qwen3vl_bridge.peft.running_model_export",
    "Qwen3VLConversationProvider": "qwen3vl_bridge.data.dataset_provider",
    "Qwen3VLEnergonProvider": "qwen3vl_bridge.data.webdataset",
    "Qwen3VLConfigContainer": "qwen3vl_bridge.training.config",
    "Family": "qwen3vl_bridge.registry",
    "register_family": "qwen3vl_bridge.registry",
    "Qwen3VLLearningRates": "qwen3vl_bridge.training.config",
    "forward_step": "qwen3vl_bridge.training.step",
    "training_callbacks": "qwen3vl_bridge.training.callbacks",
    "end_token_ids": "qwen3vl_bridge.inference.generation",
    "generate": "qwen3vl_bridge.inference.generation",
    "import_checkpoint": "qwen3vl_bridge.checkpoint",
    "export_checkpoint": "qwen3vl_bridge.checkpoint",
    "verify_checkpoint": "qwen3vl_bridge.checkpoint",
    "inspect_checkpoint": "qwen3vl_bridge.checkpoint",
}

__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy.attributes(__name__, _PUBLIC)


def _after_import(module: _ModuleType) -> None:
    # Imports torch, which `import qwen3vl_bridge` should not.
    from qwen3vl_bridge import registration

    registration.after_import(module)


def _register() -> None:
    from qwen3vl_bridge import registration

    registration.register()


import_hook.install(_after_import, _register)
