"""Checkpoint conversion between Hugging Face safetensors and Megatron, without a GPU and without the model in memory.

What lives here: the public names, loaded on first use so that importing the package stays cheap. What may not: code.
The layers, lowest first: `tensors` (what both sides speak), readers and writers of each format (`hf_*`, `dcp_*`), the
planner (`spans`, `plan`, `proof`), and the commands on top (`importing`, `exporting`, `verifying`, `inspection`,
`cli`).
"""

from importlib import import_module

_PUBLIC = {
    "CheckpointError": "errors",
    "ConversionReport": "reports",
    "Topology": "topology",
    "VerifyReport": "reports",
    "copy_side_files": "hf_files",
    "export_checkpoint": "exporting",
    "import_checkpoint": "importing",
    "inspect_checkpoint": "inspection",
    "verify_checkpoint": "verifying",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
