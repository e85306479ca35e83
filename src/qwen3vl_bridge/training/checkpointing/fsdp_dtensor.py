"""A model's weights in the fsdp_dtensor layout, read by torch.distributed.checkpoint.

What lives here: their keys on disk, and whether a checkpoint has them. What may not: which part of a parameter a rank
has (`stored_parameters.py`), other files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.dcp.metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron.folder import key_of
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.parallel.collectives import gather_objects
from qwen3vl_bridge.training.checkpointing.all_or_none import all_or_none
from qwen3vl_bridge.training.checkpointing.stored_parameters import StoredParameter, stored_parameters
from qwen3vl_bridge.weights.names import is_of_mtp, local_name

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.tensor import DTensor


def load(folder: Path, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Fill all weights of this rank.

    Args:
        folder: visible to all ranks.
        model: this rank's chunks, wrapped or not.
        groups: process groups.

    Raises:
        CheckpointError: a tensor is missing, extra or of another shape; all are listed.
    """
    with all_or_none():
        parameters = list(stored_parameters(model, groups))
        # Views: loading fills the model.
        tensors = {key_of(name): part for stored in parameters for name, part in stored.parts()}
        # Read by our own reader first: it unpickles only descriptions of tensors.
        stored = read_metadata(folder).tensors
        found = {key: spec.shape for key, (spec, _) in stored.items() if key.startswith(key_of(""))}
        # Without Transformer Engine, Megatron-FSDP saves a model under that model's own names.
        tensors = {
            key if key in found or local_name(key) not in found else local_name(key): t for key, t in tensors.items()
        }
        padded = _padded_otherwise(found, tensors, parameters, unwrap_model(list(model))[0].config.vocab_size)
        whole = {key: tensor for key, tensor in tensors.items() if key not in padded}
        problems = missing_or_mismatched(found, {key: tuple(tensor.shape) for key, tensor in whole.items()})
    wanted = set(tensors).union(*gather_objects(list(tensors)))
    raise_problems(folder, problems + unexpected(found, wanted))
    with all_or_none():
        dcp.load(whole, checkpoint_id=folder, no_dist=True)
        for key, part in padded.items():
            _load_rows(folder, key, part, torch.empty(found[key], dtype=part.dtype))


def _padded_otherwise(
    found: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], parameters: Sequence[StoredParameter], tokens: int
) -> dict[str, Tensor]:
    """Tensors with a row per token that were saved with another number of padding rows."""
    keys = {key_of(name) for stored in parameters if stored.row.of_vocabulary for name in stored.row.stored}
    return {
        key: tensors[key]
        for key in keys & found.keys() & tensors.keys()
        if found[key] != tuple(tensors[key].shape)
        and found[key][0] >= tokens
        and found[key][1:] == tensors[key].shape[1:]
    }


def _load_rows(folder: Path, key: str, part: Tensor, whole: Tensor) -> None:
    """Fill a part of a tensor from one with more or fewer rows; missing rows belong to no token, and are zeroed."""
    dcp.load({key: whole}, checkpoint_id=folder, no_dist=True)
    first = 0
    if isinstance(part, DTensor):
        first, part = part.device_mesh.get_local_rank() * len(part.to_local()), part.to_local()
    rows = whole[first : first + len(part)]
    part[: len(rows)] = rows
    part[len(rows) :] = 0


def missing_or_mismatched(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...] | None]
) -> list[str]:
    """Tensors that a checkpoint lacks, or has in another shape; None for any shape."""
    missing = [f"missing: {key} {list(shape or ())}" for key, shape in wanted.items() if key not in found]
    return missing + [
        f"misshapen: {key} is {list(found[key])}, expected {list(shape)}"
        for key, shape in wanted.items()
        if shape is not None and found.get(key, shape) != shape
    ]


def unexpected(found: Mapping[str, tuple[int, ...]], wanted: Collection[str]) -> list[str]:
    """Tensors of a checkpoint without a parameter; a model may lack multi-token prediction."""
    without_mtp = not any(is_of_mtp(key) for key in wanted)
    return [
        f"unexpected: {key} {list(shape)}"
        for key, shape in found.items()
        if key not in wanted and not (without_mtp and is_of_mtp(key))
    ]


def raise_problems(folder: Path, mine: Sequence[str]) -> None:
    """Raise the problems that any rank has found with a checkpoint, the same error on all.

    Args:
        folder: the checkpoint's.
        mine: problems that this rank has found.

    Raises:
        CheckpointError: a rank has found a problem.
    """
    if problems := sorted(set().union(*gather_objects(list(mine)))):
        raise CheckpointError("\n  ".join([f"{folder} does not fit the model:", *problems]))
