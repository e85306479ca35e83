"""Checks the `config.json` of a Hugging Face model.

What lives here: the check that it is of a family we convert, and the dimensions the weight table needs. What may not:
weights, names of parameters and fields of a family (`registry.py` finds them).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.tensor_specs import Shape
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.files.json_files import read_object, write_object
from qwen3vl_bridge.registry import family_of
from qwen3vl_bridge.weights.expert_layout import ExpertLayout, expert_layout_of
from qwen3vl_bridge.weights.rows import Row, expand


class ModelConfig:
    """A model's configuration.

    Attributes:
        folder: where its `config.json` is.
        raw: the whole of it.
        family: what reads it, and has the weight table.
        dimensions: what the weight table's symbols stand for.
        vocabulary: tokens, however many rows `dimensions` counts.
        tied: whether the output layer is the embedding.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read `folder/config.json`.

        Raises:
            CheckpointError: it is missing, another model's, or lacks a field.
        """
        self.folder = folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} is not a Hugging Face model: it has no config.json")
        self.raw = read_object(path)
        try:
            self.family = family_of(self.raw)
        except ValueError as error:
            raise CheckpointError(f"{path} {error}") from error
        try:
            self.family.check_settings(self.raw)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self.dimensions = self.family.dimensions_of(self.raw)
        self.vocabulary = self.dimensions["vocab"]
        self.tied = not self.dimensions["untied"]

    def expert_layout(self, shapes: Mapping[str, Shape]) -> ExpertLayout:
        """How tensors of these shapes hold the model's experts; for a dense model, anyhow.

        Raises:
            CheckpointError: in none of the known ways.
        """
        if not self.dimensions.indices["moe_layers"]:
            return self.family.released_experts
        try:
            return expert_layout_of(self.family.rows, shapes, self.dimensions)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error

    def having(self, names: Collection[str]) -> ModelConfig:
        """The same of a checkpoint with tensors of these names, which may lack optional parts of the model."""
        changed = copy(self)
        changed.raw = dict(self.family.config_of(self.raw, names))
        changed.dimensions = self.family.dimensions_of(changed.raw).with_vocab(self.dimensions["vocab"])
        return changed

    def write(self, folder: Path, dtype: str | None = None) -> None:
        """Write what differs from the `config.json` that lies in a folder already.

        Args:
            folder: of a model.
            dtype: what to say that the weights are; None to leave what is said.
        """
        raw, path = self.raw if dtype is None else with_dtype(self.raw, dtype), folder / "config.json"
        if raw != read_object(path):
            write_object(path, raw)

    def with_vocab(self, rows: int) -> ModelConfig:
        """The same with a vocabulary of so many rows."""
        changed = copy(self)
        changed.dimensions = self.dimensions.with_vocab(rows)
        return changed

    @property
    def table(self) -> tuple[Row, ...]:
        """The weight table of the model's family."""
        return self.family.rows()

    def rows(self, experts: ExpertLayout | None = None) -> list[Row]:
        """The weight table, expanded for this model."""
        return list(expand(self.family.rows(experts), self.dimensions))


def with_dtype(raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration that says the weights are `dtype`, wherever it says anything about their dtype.

    from_pretrained loads in the dtype that the configuration names, so it has to name the one that was written.
    """
    changed = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            value = with_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value is not None:
            value = dtype
        changed[key] = value
    return changed
