"""Checks the `config.json` of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.folder_contents import contents_of
from qwen3vl_bridge.checkpoint.formats.tensor_specs import Shape
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.io.json_files import read_object, write_object
from qwen3vl_bridge.registry import family_of
from qwen3vl_bridge.weights.rows import ExpertLayout, Row, expand, expert_layout_of


class ModelConfig:
    """A model's configuration.

    Attributes:
        folder: folder of its `config.json`.
        raw: its contents.
        family: the family, which reads it and has the weight table.
        dimensions: values of the weight table's symbols.
        vocabulary: number of tokens, independent of the rows in `dimensions`.
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
            raise CheckpointError(f"{folder} is not a Hugging Face model: it has no config.json; {contents_of(folder)}")
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
        """Format of the model's experts for tensors of these shapes; any for a dense model.

        Raises:
            CheckpointError: an unknown format.
        """
        if not self.dimensions.indices["moe_layers"]:
            return self.family.released_experts
        try:
            return expert_layout_of(self.family.rows, shapes, self.dimensions)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error

    def having(self, names: Collection[str]) -> ModelConfig:
        """The configuration of a checkpoint with tensors of these names, which may lack optional parts of the model."""
        changed = copy(self)
        changed.raw = dict(self.family.config_of(self.raw, names))
        changed.dimensions = self.family.dimensions_of(changed.raw).with_vocab(self.dimensions["vocab"])
        return changed

    def write(self, folder: Path, dtype: str | None = None) -> None:
        """Write what differs from an existing `config.json` in a folder.

        Args:
            folder: of a model.
            dtype: dtype of the weights to write into it; None to keep the present value.
        """
        raw, path = self.raw if dtype is None else with_dtype(self.raw, dtype), folder / "config.json"
        if raw != read_object(path):
            write_object(path, raw)

    def with_vocab(self, rows: int) -> ModelConfig:
        """The same with a vocabulary of this many rows."""
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
    """A configuration with `dtype` in all places that state the weights' dtype.

    from_pretrained loads in the dtype of the configuration, so it has to be that of most of the written weights.
    """
    changed = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            value = with_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value is not None:
            value = dtype
        changed[key] = value
    return changed
