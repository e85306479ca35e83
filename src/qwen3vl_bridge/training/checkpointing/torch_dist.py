"""A run's tensors in megatron-core's own format, by its models' and optimizers' own descriptions of themselves.

What lives here: between what they say and torch.distributed.checkpoint. What may not: files around the tensors; names
and shapes, which are megatron-core's.

megatron-core's own `save` starts another process, which imports the program anew, and waits for ranks where one may
have failed. So its pieces are put together here: what it writes, by torch's writer. Its optimizers read their state
only into groups of parameters that are as they were; here their tensors are read, and nothing else is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.checkpoint.formats.dcp.metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron.folder import TORCH_DIST
from qwen3vl_bridge.parallel.collectives import hear_all
from qwen3vl_bridge.training.checkpointing.all_or_none import is_first, together
from qwen3vl_bridge.training.checkpointing.fsdp_dtensor import misfits, raise_problems, strangers
from qwen3vl_bridge.training.checkpointing.optimizer_state import adam_states
from qwen3vl_bridge.weights.adapter_rows import plain_name

import torch
import torch.distributed.checkpoint as dcp
from megatron.bridge.training.checkpointing import (
    apply_peft_adapter_filter_to_state_dict,
    generate_state_dict,
    get_rng_state,
)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    from qwen3vl_bridge.peft.lora import Qwen3VLParts
    from qwen3vl_bridge.training.small_loop.setup import Run

# How tensors are sharded, as Megatron-Bridge says it of an optimizer that is not distributed.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def save(folder: Path, run: Run) -> None:
    """Write the tensors of all ranks, and with them the states that Megatron-Bridge's loop looks for.

    Args:
        folder: that all ranks see.
        run: as it stands.
    """
    with together():
        grouped = _by_key(_whole_state(run))
        state = mcore_to_pyt_state_dict(grouped)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=planner)
    with together():
        if is_first():
            save_config(CheckpointingConfig(TORCH_DIST, 1), str(folder))


def _whole_state(run: Run) -> dict[str, Any]:
    """What Megatron-Bridge would save of the run."""
    settings, groups = run.cfg.checkpoint, run.groups
    if settings.save_optim:
        adam_states(run.optimizer)  # complete where it has not stepped yet
    peft = run.cfg.peft
    # Tensors of layers that differ cannot be stacked: some would have no part in the stack.
    content = _CONTENT | ({"non_homogeneous_layers": True} if peft is not None and peft.layers_differ else {})
    metadata = content | {"dp_cp_group": groups.dp_cp}
    state = generate_state_dict(
        settings,
        unwrap_model(run.model),
        run.optimizer,
        run.scheduler,
        get_rng_state(run.cfg.rng.data_parallel_random_init, TORCH_DIST, pg_collection=groups),
        iteration=run.progress.step,
        optim_sd_kwargs={"metadata": metadata},
        model_sd_kwargs={"metadata": metadata},
        pg_collection=groups,
    )
    if peft is not None:
        state = apply_peft_adapter_filter_to_state_dict(state, peft)
    return state | {"content_metadata": content}


def _by_key(state: dict[str, Any]) -> dict[str, list[ShardedBase]]:
    """What this rank is to write: of copies, one rank has the main one."""
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), torch.distributed.get_rank())
    grouped: dict[str, list[ShardedBase]] = defaultdict(list)
    for entry in nested_values(sharded):
        if is_main_replica(entry.replica_id):
            grouped[entry.unique_key if isinstance(entry, ShardedObject) else entry.key].append(entry)
    return grouped


def load(
    folder: Path,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    groups: ProcessGroupCollection,
    peft: Qwen3VLParts | None = None,
) -> None:
    """Fill this rank's tensors, all of them.

    Args:
        folder: the checkpoint's.
        model: this rank's chunks.
        optimizer: whose moments, and copies of weights in float32, are read too; None for none.
        groups: process groups.
        peft: that put adapters in, where these and what else is trained are filled alone.

    Raises:
        CheckpointError: a tensor is missing, extra or of another shape; all are listed.
    """
    with together():
        chunks = unwrap_model(list(model))
        content = dist_checkpointing.load_content_metadata(str(folder)) or {}
        metadata = content | {"dp_cp_group": groups.dp_cp}
        weights = {f"{stage}": chunk.sharded_state_dict(metadata=metadata) for stage, chunk in enumerate(chunks)}
        moments = {} if optimizer is None else _optimizer_entries(optimizer, weights, metadata)
        if peft is not None:
            weights = {stage: _trained(state, peft) for stage, state in weights.items()}
        places = {number: entry.data for number, entry in moments.items()}
        wanted = {"weights": weights, "moments": moments}
        shapes = {e.key: None if e.allow_shape_mismatch else tuple(e.global_shape) for e in _tensors(wanted)}
    _check(folder, shapes, optimizer)
    with together(), torch.no_grad():
        loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
        for stage, chunk in enumerate(chunks):
            _fill(chunk, loaded["weights"][f"{stage}"], strict=peft is None)
        for number, place in places.items():
            place.copy_(loaded["moments"][number])


def _trained(state: dict[str, Any], peft: Qwen3VLParts) -> dict[str, Any]:
    """Of a chunk's state what Megatron-Bridge's filter leaves."""
    return apply_peft_adapter_filter_to_state_dict({"model": state}, peft)["model"]


def _fill(chunk: torch.nn.Module, state: dict[str, Any], *, strict: bool) -> None:
    """Load a chunk's state. In it an adapted layer's own parameters have their plain names."""
    if not strict:
        names = {plain_name(name): name for name, _ in chunk.named_parameters()}
        state = {names[name]: value for name, value in state.items()}
    chunk.load_state_dict(state, strict=strict)


def _optimizer_entries(optimizer: MegatronOptimizer, weights: dict, metadata: dict) -> dict[str, ShardedBase]:
    """Every tensor that the optimizer keeps, by a number: its groups of parameters may be others than were saved."""
    adam_states(optimizer)
    state = optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)
    entries = (entry for entry in nested_values(state) if isinstance(entry, ShardedBase))
    return {f"{number}": entry for number, entry in enumerate(entries)}


def _tensors(state: dict) -> list[ShardedTensor]:
    """All tensors of a state, which stays as it is."""
    return [entry for entry in nested_values(load_preprocess(state)[0]) if isinstance(entry, ShardedTensor)]


def _check(folder: Path, mine: dict[str, tuple[int, ...] | None], optimizer: MegatronOptimizer | None) -> None:
    """Compare all names and shapes, those of every rank with those of the checkpoint."""
    wanted: dict[str, tuple[int, ...] | None] = {}
    for shapes in hear_all(mine):
        wanted |= shapes
    with together():
        found = {key: spec.shape for key, (spec, _) in read_metadata(folder).tensors.items()}
        ours = ("language_model.", "vision_model.") + (() if optimizer is None else ("optimizer.",))
        problems = misfits(found, wanted)
        problems += strangers({key: shape for key, shape in found.items() if key.startswith(ours)}, wanted)
    raise_problems(folder, problems)
