"""LoRA and DoRA, and export of adapters to the format of Hugging Face's `peft`.

Saved configurations name the classes of this package: `_target_: qwen3vl_bridge.peft.Qwen3VLLoRA`.
"""

from qwen3vl_bridge import lazy

_PUBLIC = {"Qwen3VLDoRA": "qwen3vl_bridge.peft.lora", "Qwen3VLLoRA": "qwen3vl_bridge.peft.lora"}
__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy.attributes(__name__, _PUBLIC)
