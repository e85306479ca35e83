"""A Hugging Face model on disk: folder, configuration and weights together.

What lives here: opening one, and what becomes of an output layer stored beside the embedding it is tied to. What may
not: Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qwen3vl_bridge.checkpoint.compare import difference
from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.hf_config import ModelConfig
from qwen3vl_bridge.checkpoint.hf_files import find_model
from qwen3vl_bridge.checkpoint.hf_reader import HFWeights
from qwen3vl_bridge.checkpoint.streams import RunReader
from qwen3vl_bridge.checkpoint.tensors import Run
from qwen3vl_bridge.mappings import Row


@dataclass(frozen=True)
class HFModel:
    """A model's folder, configuration and weights, and what was noticed on opening it."""

    folder: Path
    config: ModelConfig
    weights: HFWeights
    notes: list[str] = field(default_factory=list)


def open_model(hf_model: str | Path) -> HFModel:
    """Open a model.

    Args:
        hf_model: a folder or a hub id.

    Raises:
        CheckpointError: it is not there, not a Qwen3-VL, or its files are damaged.
    """
    folder = find_model(hf_model)
    model = HFModel(folder, ModelConfig(folder), HFWeights(folder))
    if model.config.tied:
        for copy, original in _tied_pairs(model.config.rows):
            if copy in model.weights.specs and original in model.weights.specs:
                _drop_copy(model, copy, original)
    return model


def _tied_pairs(rows: tuple[Row, ...]) -> list[tuple[str, str]]:
    """Tensors that a tied model has only under the second name."""
    embedding = next(row for row in rows if row.shapes[0][0] == "vocab" and row.condition is None)
    return [(row.hf[0], embedding.hf[0]) for row in rows if row.condition == "untied"]


def _drop_copy(model: HFModel, copy: str, original: str) -> None:
    weights = model.weights
    one, other = weights.specs[copy], weights.specs[original]
    if one.describe() != other.describe():
        found = f"{one.describe()}, not {other.describe()}"
    else:
        with RunReader(weights) as left, RunReader(weights) as right:
            streams = (
                reader.blocks([Run(spec.name, 0, spec.numel)], spec.dtype)
                for reader, spec in ((left, one), (right, other))
            )
            found = difference(copy, one.numel, one.dtype, *streams)
    if found is not None:
        raise CheckpointError(
            f"{model.folder}: config.json has tie_word_embeddings true, but {copy} is not {original}: {found}; "
            f"expected the same bytes, or no {copy}, or tie_word_embeddings false"
        )
    weights.drop(copy)
    model.notes.append(f"{copy} is a copy of {original}, to which config.json ties it; it was left out")
