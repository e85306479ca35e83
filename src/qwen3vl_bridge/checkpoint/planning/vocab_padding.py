"""Rows of a Megatron checkpoint's vocabulary beyond the model's.

A Megatron model may have them so that tensor-parallel ranks have equal parts (`should_pad_vocab`). An import writes
zeros. Training changes them: megatron-core's cross entropy sums over all rows of the output layer, without a mask for
padding (`tensor_parallel/cross_entropy.py`), and a tied embedding is that layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.byte_streams import SegmentReader
from qwen3vl_bridge.checkpoint.formats.layouts import TensorLayout
from qwen3vl_bridge.checkpoint.formats.slices import Slice
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, TensorSource, TensorSpec
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.weights.rows import Row

import numpy as np


def check_vocab_padding(
    source: TensorSource, rows: Iterable[Row], layout: TensorLayout, vocabulary: int, *, where: Path, drop: bool
) -> list[str]:
    """Check that rows beyond a vocabulary are zero, by reading them.

    Args:
        source: tensors, of the shapes that `make_plan` expects.
        rows: rows of the weight table that are converted.
        layout: the tensors' format.
        vocabulary: number of rows that are kept.
        where: the tensors' folder, for the error.
        drop: whether rows that are not zero may be left out too.

    Returns:
        A line of text for each tensor that has such rows.

    Raises:
        CheckpointError: a row that is not zero would be lost.
    """
    notes = []
    names = [name for row in rows if row.of_vocabulary for name in layout.tensors(row)]
    for spec in (source.specs[name] for name in names):
        count = spec.shape[0] - vocabulary
        if count <= 0:
            continue
        moved = _rows_not_zero(source, spec, vocabulary)
        beyond = f"{spec.name} has {count} rows beyond the vocabulary"
        if moved and not drop:
            raise CheckpointError(
                f"{where}: {beyond} of {vocabulary}, of which {len(moved)} are not zero, the first is row {moved[0]}; "
                "expected zeros. If they pad the vocabulary (should_pad_vocab), training changed them because the "
                "softmax includes them: drop them with --drop-vocab-padding. If they are tokens, "
                "text_config.vocab_size in config.json is too small"
            )
        dropped = f"{len(moved)} of them not zero, dropped by --drop-vocab-padding"
        said = dropped if moved else "they are padding and were dropped"
        notes.append(f"{beyond}; {said}")
    return notes


def _rows_not_zero(source: TensorSource, spec: TensorSpec, first: int) -> list[int]:
    """Rows, from a given one on, that contain anything other than zeros."""
    width, size = spec.numel // spec.shape[0], ITEMSIZE[spec.dtype]
    found: set[int] = set()
    position = first * width
    with SegmentReader(source) as reader:
        for block in reader.blocks([Slice(spec.name, position, spec.numel - position)], spec.dtype):
            values = np.frombuffer(block, f"<u{size}") & np.array(2 ** (8 * size - 1) - 1, f"<u{size}")  # no sign
            found.update(np.unique((position + np.flatnonzero(values)) // width).tolist())
            position += len(values)
    return sorted(found)
