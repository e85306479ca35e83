"""Convert checkpoints between Hugging Face safetensors and Megatron, without a GPU and without loading the model.

Checkpoints of a training run are saved by `training/checkpoint_manager.py`.
"""

from qwen3vl_bridge import lazy

_PUBLIC = {
    "CheckpointError": "qwen3vl_bridge.core.files",
    "ConversionReport": "qwen3vl_bridge.checkpoint.conversion",
    "Ranks": "qwen3vl_bridge.checkpoint.formats.output_files",
    "Topology": "qwen3vl_bridge.checkpoint.formats.layouts",
    "VerifyReport": "qwen3vl_bridge.checkpoint.verification",
    "copy_side_files": "qwen3vl_bridge.checkpoint.formats.huggingface",
    "export_adapters": "qwen3vl_bridge.peft.checkpoint_export",
    "export_checkpoint": "qwen3vl_bridge.checkpoint.commands",
    "import_checkpoint": "qwen3vl_bridge.checkpoint.commands",
    "inspect_checkpoint": "qwen3vl_bridge.checkpoint.verification",
    "merge_adapters": "qwen3vl_bridge.peft.checkpoint_export",
    "reformat_checkpoint": "qwen3vl_bridge.checkpoint.commands",
    "verify_checkpoint": "qwen3vl_bridge.checkpoint.verification",
    "verify_checksums": "qwen3vl_bridge.checkpoint.verification",
    "verify_reformatted": "qwen3vl_bridge.checkpoint.verification",
}

__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy.attributes(__name__, _PUBLIC)
