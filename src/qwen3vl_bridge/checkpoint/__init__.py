"""Checkpoint conversion between Hugging Face safetensors and Megatron, without a GPU and without holding the model in
memory.
"""

from qwen3vl_bridge import lazy

_PUBLIC = {
    "CheckpointError": "qwen3vl_bridge.io.errors",
    "ConversionReport": "qwen3vl_bridge.checkpoint.engine.reports",
    "Ranks": "qwen3vl_bridge.checkpoint.engine.ranks",
    "Topology": "qwen3vl_bridge.checkpoint.planning.topology",
    "VerifyReport": "qwen3vl_bridge.checkpoint.engine.reports",
    "copy_side_files": "qwen3vl_bridge.checkpoint.formats.safetensors.model_folder",
    "export_adapters": "qwen3vl_bridge.peft.hf_export",
    "export_checkpoint": "qwen3vl_bridge.checkpoint.commands.exporting",
    "import_checkpoint": "qwen3vl_bridge.checkpoint.commands.importing",
    "inspect_checkpoint": "qwen3vl_bridge.checkpoint.commands.inspection",
    "merge_adapters": "qwen3vl_bridge.peft.hf_export",
    "reformat_checkpoint": "qwen3vl_bridge.checkpoint.commands.reformatting",
    "verify_checkpoint": "qwen3vl_bridge.checkpoint.commands.verifying",
    "verify_checksums": "qwen3vl_bridge.checkpoint.commands.verifying",
    "verify_reformatted": "qwen3vl_bridge.checkpoint.commands.verifying",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    return lazy.load(__name__, _PUBLIC, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
