"""Qwen3-VL for Megatron-Bridge: importing this package registers its bridges, providers and model.

What lives here: the public names and the registration. The import itself is light (neither torch nor Megatron):
registration waits in `hooks.py` until Megatron-Bridge is imported, and the public names load on first use, so that a
converter's `--help` answers at once.
"""

from qwen3vl_bridge import hooks, lazy

_PUBLIC = {
    "Qwen3VLBridge": "bridge",
    "Qwen3VLModel": "model.qwen3vl",
    "Qwen3VLModelProvider": "provider",
    "Qwen3VLMoEBridge": "bridge",
    "Qwen3VLMoEModelProvider": "provider",
    "Qwen3VLLoRA": "peft",
    "Qwen3VLDoRA": "peft",
    "save_hf_adapter": "peft_export",
    "Qwen3VLConversationProvider": "data.provider",
    "Qwen3VLEnergonProvider": "data.energon_provider",
    "Qwen3VLConfigContainer": "training.config",
    "Qwen3VLTowers": "training.towers",
    "forward_step": "training.step",
    "training_callbacks": "training.callbacks",
    "generate": "generation",
    "import_checkpoint": "checkpoint",
    "export_checkpoint": "checkpoint",
    "verify_checkpoint": "checkpoint",
    "inspect_checkpoint": "checkpoint",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    return lazy.load(__name__, _PUBLIC, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


hooks.install()
