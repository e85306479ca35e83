"""Planned Hugging Face models: the files of their weights, and the other files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.checkpoint.formats.safetensors.model_folder import HUGGINGFACE, copy_side_files
from qwen3vl_bridge.checkpoint.formats.safetensors.reader import HFWeights
from qwen3vl_bridge.checkpoint.formats.safetensors.writer import shard_files, write_index
from qwen3vl_bridge.checkpoint.formats.tensor_specs import main_dtype
from qwen3vl_bridge.checkpoint.planning.plan import Plan
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.weights.rows import ExpertLayout


@dataclass(frozen=True)
class HFTarget:
    """A Hugging Face model to be written.

    Attributes:
        config: its configuration.
        experts: format of its experts.
        made_from: format of the source checkpoint.
        max_shard_bytes: maximum size of a weight file.
        float32_as: dtype of the parameters that the model keeps in float32; None for the same as of others.
    """

    config: ModelConfig
    experts: ExpertLayout
    made_from: str
    max_shard_bytes: int
    float32_as: str | None

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
    """The files of a Hugging Face model to be written."""

    inner = "."

    def __init__(self, plan: Plan, config: ModelConfig, said: dict[str, Any], max_shard_bytes: int) -> None:
        """Lay out a model.

        Args:
            plan: its tensors.
            config: its configuration.
            said: values for its manifest.
            max_shard_bytes: maximum size of a weight file.

        Raises:
            CheckpointError: a maximum size that is not positive.
        """
        if max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}, expected 1 or more")
        self._plan, self._config, self._max_shard_bytes = plan, config, max_shard_bytes
        self.files = shard_files(plan.tasks, max_shard_bytes)
        self.settings = {"format": HUGGINGFACE} | said

    def finish(self, root: Path, digest: str) -> None:
        """Write the files of a model's folder other than weights."""
        write_index(root, self._plan.tasks, self._max_shard_bytes)
        copy_side_files(self._config.folder, root)
        self._config.write(root, main_dtype(self._plan.specs.values()))

    def open(self, root: Path) -> HFWeights:
        """The written weights, read again."""
        return HFWeights(root)
