"""Checkpoint conversion between Hugging Face safetensors and Megatron, without a GPU and without the model in memory.

What lives here: the public names, loaded on first use so that importing the package stays cheap. What may not: code.
The layers, lowest first: `tensors` and `pieces` (what all speak), readers and layouts of each format (`hf_*`, `dcp_*`),
the planner (`sides`, `plan`, `proof`), writing (`files`, `copying`, `journal`, `staging`, `ranks`), the course of every
conversion (`conversion`), and the commands on top (`importing`, `exporting`, `reformatting`, `verifying`, `inspection`,
`cli`). Adapters take the same course (`stored_adapters`, `adapter_exporting`, `merging`, `adapters_cli`); merging is
the only arithmetic (`merged_tensors`).
"""

from qwen3vl_bridge import lazy

_PUBLIC = {
    "CheckpointError": "errors",
    "ConversionReport": "reports",
    "Ranks": "ranks",
    "Topology": "topology",
    "VerifyReport": "reports",
    "copy_side_files": "hf_files",
    "export_adapters": "adapter_exporting",
    "export_checkpoint": "exporting",
    "import_checkpoint": "importing",
    "inspect_checkpoint": "inspection",
    "merge_adapters": "merging",
    "reformat_checkpoint": "reformatting",
    "verify_checkpoint": "verifying",
    "verify_checksums": "verifying",
    "verify_reformatted": "verifying",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    return lazy.load(__name__, _PUBLIC, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
