"""The `config.json` of a Hugging Face model, judged.

What lives here: the check that it is a Qwen3-VL we convert, and the dimensions the weight table needs.
What may not: weights, and names of parameters (`mappings.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.json_files import read_object
from qwen3vl_bridge.dimensions import Dimensions, dimensions_of
from qwen3vl_bridge.hf_settings import check_settings
from qwen3vl_bridge.mappings import TABLE
from qwen3vl_bridge.weight_rows import Row

# model_type -> (architecture, weight table)
_MODELS: dict[str, tuple[str, tuple[Row, ...]]] = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", TABLE),
}
# What a dense or a tied model has none of.
_MAY_BE_ZERO = ("untied", "experts", "moe_ffn", "moe_gate_up")


class ModelConfig:
    """A model's configuration.

    Attributes:
        folder: where its `config.json` is.
        raw: the whole of it.
        dimensions: what the weight table's symbols stand for.
        rows: the weight table of this architecture.
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
        self.rows = _rows(self.raw, path)
        self.dimensions = _dimensions(self.raw, path)
        self.tied = not self.dimensions["untied"]


def _rows(raw: dict[str, Any], path: Path) -> tuple[Row, ...]:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    known = _MODELS.get(model_type) if isinstance(model_type, str) else None
    if known is None or architectures not in (None, [known[0]]):
        expected = " or ".join(f"{arch} (model_type {kind})" for kind, (arch, _) in _MODELS.items())
        raise CheckpointError(f"{path} describes {architectures} (model_type {model_type}), expected {expected}")
    return known[1]


def _dimensions(raw: dict[str, Any], path: Path) -> Dimensions:
    try:
        dimensions = dimensions_of(raw)
        check_settings(raw)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks the field {error}") from error
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} has a field of the wrong kind: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name, value in dimensions.sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < (name not in _MAY_BE_ZERO):
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a positive whole number")
    for whole, part in (("heads", "kv_heads"), ("v_hidden", "v_heads")):
        if dimensions[whole] % dimensions[part]:
            raise CheckpointError(f"{path}: {whole} is {dimensions[whole]}, no multiple of {part} {dimensions[part]}")
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
