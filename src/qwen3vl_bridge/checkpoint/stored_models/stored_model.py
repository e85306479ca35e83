"""A model on disk: folder, format, configuration and weights together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.engine.manifest import MANIFEST
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, HuggingFace, TensorLayout, TorchDist
from qwen3vl_bridge.checkpoint.formats.megatron import folder as megatron
from qwen3vl_bridge.checkpoint.formats.safetensors.model_folder import HUGGINGFACE
from qwen3vl_bridge.checkpoint.formats.tensor_specs import TensorSource
from qwen3vl_bridge.checkpoint.planning.plan import naming_of
from qwen3vl_bridge.checkpoint.planning.vocab_padding import check_vocab_padding
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.weights.rows import ExpertLayout, Row


@dataclass(frozen=True)
class StoredModel:
    """A model's folder, format, configuration and weights, and what was noticed on opening it.

    Attributes:
        folder: the model's, or an iteration's.
        ckpt_format: "huggingface", "fsdp_dtensor" or "torch_dist".
        tensors: the weights, by the format's names.
        config: the model's configuration.
        experts: how it holds its experts, or, in Megatron's formats, how the model it comes from did.
        manifest: of the conversion that wrote it; empty where something else did.
        notes: what the user should know.
    """

    folder: Path
    ckpt_format: str
    tensors: TensorSource
    config: ModelConfig
    experts: ExpertLayout
    manifest: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """The weight table, expanded for this model."""
        return self.config.rows(self.experts)

    @property
    def layout(self) -> TensorLayout:
        """How its format lays out the weights."""
        dimensions, names = self.config.dimensions, self.tensors.specs
        if self.ckpt_format == megatron.TORCH_DIST:
            return TorchDist.found(self.rows, dimensions, names)
        if self.ckpt_format == megatron.FSDP_DTENSOR:
            return FsdpDtensor(dimensions, naming_of(self.rows, names))
        return HuggingFace(dimensions)

    @property
    def float32_as(self) -> str | None:
        """Dtype in the Hugging Face model of the parameters that its model keeps in float32; None if it is unknown."""
        if self.ckpt_format != HUGGINGFACE:
            return self.manifest.get("float32_as")
        names = (name for row in self.rows if row.float32 for name in row.hf if name in self.tensors.specs)
        return next((self.tensors.specs[name].dtype for name in names), None)

    def float32_in_export(self, torch_dtype: str | None) -> str | None:
        """The same in a Hugging Face model that is made from this one.

        Args:
            torch_dtype: to which weights are cast; None to keep their dtypes.
        """
        if torch_dtype is None:
            return self.float32_as
        return "float32" if self.float32_as in (None, "float32") else torch_dtype

    @property
    def vocab_divisor(self) -> int | None:
        """What its vocabulary was padded to a multiple of, for each tensor-parallel rank; None where it was not.

        Raises:
            CheckpointError: its manifest names no number.
        """
        found = self.manifest.get("vocab_divisor")
        if found is not None and type(found) is not int:
            raise CheckpointError(f"{self.folder / MANIFEST}: vocab_divisor is {found!r}, expected a number")
        return found

    def with_padding(self) -> StoredModel:
        """The same, with a configuration whose vocabulary counts all rows that are there.

        Where one of its tensors has fewer than another, planning refuses it.
        """
        names = [row.megatron for row in self.config.table if row.of_vocabulary]
        shapes = [self.tensors.specs[name].shape for name in names if name in self.tensors.specs]
        rows = max((shape[0] for shape in shapes if shape), default=0)
        config = self.config if rows <= self.config.dimensions["vocab"] else self.config.with_vocab(rows)
        return replace(self, config=config)

    def check_padding(self, vocabulary: int, *, drop: bool) -> list[str]:
        """As `check_vocab_padding`, of all rows beyond a vocabulary."""
        return check_vocab_padding(self.tensors, self.rows, self.layout, vocabulary, where=self.folder, drop=drop)
