"""A Hugging Face model on disk: folder, configuration and weights together.

What lives here: opening one, and what becomes of an output layer stored beside the embedding it is tied to. What may
not: Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qwen3vl_bridge.checkpoint.comparing import difference
from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.hf_config import ModelConfig
from qwen3vl_bridge.checkpoint.hf_files import find_model
from qwen3vl_bridge.checkpoint.hf_reader import HFWeights
from qwen3vl_bridge.checkpoint.pieces import Run
from qwen3vl_bridge.checkpoint.plan import leave_unexpected
from qwen3vl_bridge.checkpoint.sides import HuggingFace
from qwen3vl_bridge.checkpoint.streams import PieceReader
from qwen3vl_bridge.mappings import TABLE, ExpertLayout
from qwen3vl_bridge.weight_rows import Row


@dataclass(frozen=True)
class HFModel:
    """A model's folder, configuration and weights, and what was noticed on opening it."""

    folder: Path
    config: ModelConfig
    weights: HFWeights
    notes: list[str] = field(default_factory=list)

    @property
    def experts(self) -> ExpertLayout:
        """How it holds its experts.

        Raises:
            CheckpointError: in none of the known ways.
        """
        return self.config.expert_layout({name: spec.shape for name, spec in self.weights.specs.items()})

    @property
    def rows(self) -> list[Row]:
        """The weight table, expanded for this model."""
        return self.config.rows(self.experts)

    @property
    def side(self) -> HuggingFace:
        """Its side of a conversion."""
        return HuggingFace(self.config.dimensions)


def open_model(hf_model: str | Path, *, strict: bool = True, trust_remote_code: bool = False) -> HFModel:
    """Open a model.

    Args:
        hf_model: a folder or a hub id.
        strict: whether tensors that the model does not call for stay, to be found out; otherwise they are left aside.
        trust_remote_code: whether the model may bring code.

    Raises:
        CheckpointError: it is not there, not a Qwen3-VL, or its files are damaged.
    """
    folder = find_model(hf_model, trust_remote_code=trust_remote_code)
    model = HFModel(folder, ModelConfig(folder), HFWeights(folder))
    if model.config.tied:
        for copy, original in _tied_pairs():
            if copy in model.weights.specs and original in model.weights.specs:
                _drop_copy(model, copy, original)
    if not strict:
        model.notes.extend(leave_unexpected(model.weights, model.rows, model.side))
    return model


def _tied_pairs() -> list[tuple[str, str]]:
    """Tensors that a tied model has only under the second name."""
    embedding = next(row for row in TABLE if row.of_vocabulary and row.condition is None)
    return [(row.hf[0], embedding.hf[0]) for row in TABLE if row.condition == "untied"]


def _drop_copy(model: HFModel, copy: str, original: str) -> None:
    weights = model.weights
    one, other = weights.specs[copy], weights.specs[original]
    if one.describe() != other.describe():
        found = f"{one.describe()}, not {other.describe()}"
    else:
        with PieceReader(weights) as left, PieceReader(weights) as right:
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
