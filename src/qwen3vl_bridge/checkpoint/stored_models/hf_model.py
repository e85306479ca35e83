"""Opens a Hugging Face model on disk."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.checkpoint.engine.comparison import difference
from qwen3vl_bridge.checkpoint.formats.byte_streams import SegmentReader
from qwen3vl_bridge.checkpoint.formats.safetensors.model_folder import HUGGINGFACE, find_model
from qwen3vl_bridge.checkpoint.formats.safetensors.reader import HFWeights
from qwen3vl_bridge.checkpoint.formats.slices import Slice
from qwen3vl_bridge.checkpoint.formats.tensor_specs import main_dtype
from qwen3vl_bridge.checkpoint.planning.plan import leave_unexpected
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.checkpoint.stored_models.stored_model import StoredModel
from qwen3vl_bridge.io.errors import CheckpointError


def open_model(hf_model: str | Path, *, strict: bool = True, trust_remote_code: bool = False) -> StoredModel:
    """Open a Hugging Face model.

    Args:
        hf_model: a folder or a hub id.
        strict: whether tensors that the model does not have are kept, so that they become errors; otherwise they are
            ignored.
        trust_remote_code: whether the model may contain code.

    Raises:
        CheckpointError: it does not exist, is of no supported family, or its files are damaged.
    """
    folder = find_model(hf_model, trust_remote_code=trust_remote_code)
    config, weights, notes = ModelConfig(folder), HFWeights(folder), []
    config = config.having(weights.specs)
    if config.tied:
        for copy, original in _tied_pairs(config):
            if copy in weights.specs and original in weights.specs:
                _check_copy(weights, folder, copy, original)
                weights.drop(copy)
                notes.append(f"{copy} is a copy of {original}, to which config.json ties it; it was not converted")
    experts = config.expert_layout({name: spec.shape for name, spec in weights.specs.items()})
    model = StoredModel(folder, HUGGINGFACE, weights, config, experts, notes=notes)
    if not strict:
        notes.extend(leave_unexpected(weights, model.rows, model.layout))
    return model


def write_config_of_weights(hf_model: str | Path) -> None:
    """Correct a folder's `config.json` to its weights: whether optional parts are there, and their dtype.

    Args:
        hf_model: a folder with both.

    Raises:
        CheckpointError: it is of no supported family, or its files are damaged.
    """
    config, found = ModelConfig(hf_model), HFWeights(Path(hf_model)).specs
    config.having(found).write(config.folder, main_dtype(found.values()))


def _tied_pairs(config: ModelConfig) -> list[tuple[str, str]]:
    """Tensors that a tied model has only under the second name."""
    embedding = next(row for row in config.table if row.of_vocabulary and row.condition is None)
    return [(row.hf[0], embedding.hf[0]) for row in config.table if row.condition == "untied"]


def _check_copy(weights: HFWeights, folder: Path, copy: str, original: str) -> None:
    one, other = weights.specs[copy], weights.specs[original]
    if one.describe() != other.describe():
        found = f"{one.describe()}, not {other.describe()}"
    else:
        with SegmentReader(weights) as left, SegmentReader(weights) as right:
            streams = (
                reader.blocks([Slice(spec.name, 0, spec.numel)], spec.dtype)
                for reader, spec in ((left, one), (right, other))
            )
            found = difference(copy, one.numel, one.dtype, *streams)
    if found is not None:
        raise CheckpointError(
            f"{folder}: config.json has tie_word_embeddings true, but {copy} is not {original}: {found}; "
            f"expected the same bytes, or no {copy}, or tie_word_embeddings false"
        )
