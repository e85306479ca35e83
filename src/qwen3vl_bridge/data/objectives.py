"""The kind of records that each objective of a run trains on."""

from __future__ import annotations

from qwen3vl_bridge.data.conversations import Columns
from qwen3vl_bridge.data.pairs import LabeledColumns, PairColumns
from qwen3vl_bridge.data.retrieval import EmbeddingColumns, RerankerColumns

# By `objective.kind`.
RECORDS: dict[str, type[Columns]] = {
    "sft": Columns,
    "dpo": PairColumns,
    "kto": LabeledColumns,
    "embedding": EmbeddingColumns,
    "reranker": RerankerColumns,
}


def columns_for(objective: str, columns: Columns) -> Columns:
    """Return `columns` as an instance of the class for an objective, such as `PairColumns` for "dpo"."""
    return columns if objective == "sft" else RECORDS[objective].of(columns)
