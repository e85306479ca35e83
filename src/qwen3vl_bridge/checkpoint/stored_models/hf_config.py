"""The `config.json` of a Hugging Face model, judged.

What lives here: the check that it is a Qwen3-VL we convert, and the dimensions the weight table needs.
What may not: weights, and names of parameters (`models/qwen3_vl/table.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.tensor_specs import Shape
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.files.json_files import read_object
from qwen3vl_bridge.models.qwen3_vl.config_checks import check_settings
from qwen3vl_bridge.models.qwen3_vl.table import expert_layout_of, table
from qwen3vl_bridge.weights.dimensions import Dimensions, dimensions_of
from qwen3vl_bridge.weights.names import ExpertLayout
from qwen3vl_bridge.weights.rows import Row, expand

# model_type -> (architecture, whether it has experts)
_MODELS: dict[str, tuple[str, bool]] = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", False),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", True),
}


class ModelConfig:
    """A model's configuration.

    Attributes:
        folder: where its `config.json` is.
        raw: the whole of it.
        dimensions: what the weight table's symbols stand for.
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
        with_experts = _has_experts(self.raw, path)
        self.dimensions = _dimensions(self.raw, path, with_experts=with_experts)
        self.tied = not self.dimensions["untied"]

    def expert_layout(self, shapes: Mapping[str, Shape]) -> ExpertLayout:
        """How tensors of these shapes hold the model's experts; for a dense model, anyhow.

        Raises:
            CheckpointError: in none of the known ways.
        """
        if not self.dimensions.indices["moe_layers"]:
            return ExpertLayout.INPUT_MAJOR
        try:
            return expert_layout_of(shapes, self.dimensions)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error

    def with_vocab(self, rows: int) -> ModelConfig:
        """The same with a vocabulary of so many rows."""
        changed = copy(self)
        changed.dimensions = self.dimensions.with_vocab(rows)
        return changed

    @property
    def table(self) -> tuple[Row, ...]:
        """The weight table of the model's family."""
        return table()

    def rows(self, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> list[Row]:
        """The weight table, expanded for this model."""
        return list(expand(table(experts), self.dimensions))


def _has_experts(raw: dict[str, Any], path: Path) -> bool:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    known = _MODELS.get(model_type) if isinstance(model_type, str) else None
    if known is None or architectures not in (None, [known[0]]):
        expected = " or ".join(f"{arch} (model_type {kind})" for kind, (arch, _) in _MODELS.items())
        raise CheckpointError(f"{path} describes {architectures} (model_type {model_type}), expected {expected}")
    return known[1]


def _dimensions(raw: dict[str, Any], path: Path, *, with_experts: bool) -> Dimensions:
    try:
        check_settings(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    dimensions = dimensions_of(raw)
    found = len(dimensions.indices["moe_layers"])
    if bool(found) != with_experts:
        raise CheckpointError(
            f"{path}: {found} layers have experts, which model_type {raw['model_type']} does not allow"
        )
    return dimensions


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
