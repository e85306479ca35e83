"""A model's weights in megatron-core's own format, read by the model's own sharded state dict.

What lives here: whether a checkpoint has all of them, and reading them. What may not: other files; names and shapes,
which are megatron-core's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge.checkpoint.formats.dcp.metadata import read_metadata
from qwen3vl_bridge.parallel.collectives import gather_objects
from qwen3vl_bridge.training.checkpointing.all_or_none import all_or_none
from qwen3vl_bridge.training.checkpointing.fsdp_dtensor import missing_or_mismatched, raise_problems, unexpected

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    pass


def load(folder: Path, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Fill all weights of this rank.

    Args:
        folder: the checkpoint's.
        model: this rank's chunks, wrapped or not.
        groups: process groups.

    Raises:
        CheckpointError: a tensor is missing, extra or of another shape; all are listed.
    """
    with all_or_none():
        chunks = unwrap_model(list(model))
        metadata = (dist_checkpointing.load_content_metadata(str(folder)) or {}) | {"dp_cp_group": groups.dp_cp}
        wanted = {f"{stage}": chunk.sharded_state_dict(metadata=metadata) for stage, chunk in enumerate(chunks)}
        shapes = {e.key: None if e.allow_shape_mismatch else tuple(e.global_shape) for e in _tensors(wanted)}
    _check(folder, shapes)
    with all_or_none(), torch.no_grad():
        loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
        for stage, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"{stage}"], strict=True)


def _tensors(state: dict) -> list[ShardedTensor]:
    """All tensors of a state, which is not changed."""
    return [entry for entry in nested_values(load_preprocess(state)[0]) if isinstance(entry, ShardedTensor)]


def _check(folder: Path, mine: dict[str, tuple[int, ...] | None]) -> None:
    """Compare names and shapes of every rank with those of the checkpoint."""
    wanted: dict[str, tuple[int, ...] | None] = {}
    for shapes in gather_objects(mine):
        wanted |= shapes
    with all_or_none():
        found = {key: spec.shape for key, (spec, _) in read_metadata(folder).tensors.items()}
        ours = {key: shape for key, shape in found.items() if key.startswith(("language_model.", "vision_model."))}
        problems = missing_or_mismatched(found, wanted) + unexpected(ours, wanted)
    raise_problems(folder, problems)
