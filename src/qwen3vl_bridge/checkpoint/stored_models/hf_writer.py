"""A Hugging Face model to be: the files of its weights, and those around them.

What lives here: what an export and a merge have in common. What may not: what is read, how files are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.checkpoint.formats.safetensors.model_folder import HUGGINGFACE, copy_side_files
from qwen3vl_bridge.checkpoint.formats.safetensors.reader import HFWeights
from qwen3vl_bridge.checkpoint.formats.safetensors.writer import shard_files, write_index
from qwen3vl_bridge.checkpoint.planning.plan import Plan
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.weights.expert_layout import ExpertLayout


@dataclass(frozen=True)
class HFTarget:
    """A Hugging Face model to be.

    Attributes:
        config: its configuration.
        experts: how it holds its experts.
        made_from: format of the checkpoint that it is made of.
        max_shard_bytes: how large a file of weights may be.
    """

    config: ModelConfig
    experts: ExpertLayout
    made_from: str
    max_shard_bytes: int

    @property
    def layout(self) -> HuggingFace:
        """How it lays out the weights."""
        return HuggingFace(self.config.dimensions)

    def output(self, plan: Plan) -> HFOutput:
        """Its files."""
        moe = bool(self.config.dimensions.indices["moe_layers"])
        said = {"from": self.made_from, "expert_layout": self.experts.name if moe else None}
        return HFOutput(plan, self.config, said, self.max_shard_bytes)


class HFOutput:
    """A Hugging Face model to be."""

    inner = "."

    def __init__(self, plan: Plan, config: ModelConfig, said: dict[str, Any], max_shard_bytes: int) -> None:
        """A model to be.

        Args:
            plan: its tensors.
            config: its configuration.
            said: what its manifest says of it.
            max_shard_bytes: how large a file of weights may be.

        Raises:
            CheckpointError: files have no size.
        """
        if max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}, expected 1 or more")
        self._plan, self._config, self._max_shard_bytes = plan, config, max_shard_bytes
        self.files = shard_files(plan.tasks, max_shard_bytes)
        self.settings = {"format": HUGGINGFACE} | said

    def finish(self, root: Path, digest: str) -> None:
        """Write what a model's folder has beside its weights."""
        write_index(root, self._plan.tasks, self._max_shard_bytes)
        copy_side_files(self._config.folder, root)
        self._config.write(root, self._plan.dtypes[0] if len(self._plan.dtypes) == 1 else None)

    def open(self, root: Path) -> HFWeights:
        """The weights as found."""
        return HFWeights(root)
