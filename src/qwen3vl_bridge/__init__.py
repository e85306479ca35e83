"""Qwen3-VL for Megatron-Bridge: importing this package registers its bridges, providers and model.

What lives here: the public names and the registration. The import itself is light (neither torch nor Megatron):
registration waits in `hooks.py` until Megatron-Bridge is imported, and the public names load on first use, so that a
converter's `--help` answers at once.
"""

from importlib import import_module

from qwen3vl_bridge import hooks

_PUBLIC = {
    "Qwen3VLBridge": "qwen3vl_bridge.bridge",
    "Qwen3VLModel": "qwen3vl_bridge.model.qwen3vl",
    "Qwen3VLModelProvider": "qwen3vl_bridge.provider",
    "Qwen3VLMoEBridge": "qwen3vl_bridge.bridge",
    "Qwen3VLMoEModelProvider": "qwen3vl_bridge.provider",
    "Qwen3VLLoRA": "qwen3vl_bridge.peft",
    "Qwen3VLDoRA": "qwen3vl_bridge.peft",
    "save_hf_adapter": "qwen3vl_bridge.peft_export",
    "Qwen3VLConversationProvider": "qwen3vl_bridge.data.provider",
    "forward_step": "qwen3vl_bridge.training.step",
    "generate": "qwen3vl_bridge.generation",
    "import_checkpoint": "qwen3vl_bridge.checkpoint",
    "export_checkpoint": "qwen3vl_bridge.checkpoint",
    "verify_checkpoint": "qwen3vl_bridge.checkpoint",
    "inspect_checkpoint": "qwen3vl_bridge.checkpoint",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


hooks.install()
