"""Megatron-Bridge's own loader of `fsdp_dtensor` checkpoints, for our models: a missing weight is an error.

What lives here: which tensors a checkpoint has under the other layer spec's names, and reading those. What may not:
reading the others, which is Megatron-Bridge's; how it is called (`compat/import_hook.py`); our own loaders
(`weight_loading.py`).

Under Megatron-FSDP a model asks for its own parameter names, which follow its layer spec: norms are parts of linear
layers or separate modules, experts are grouped or not. Unless `checkpoint.strict_fsdp_dtensor_load` is set,
Megatron-Bridge's loader skips a name that a checkpoint lacks, and the parameter keeps its initial value.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.parallel.collectives import gather_objects
from qwen3vl_bridge.training.checkpointing.all_or_none import all_or_none
from qwen3vl_bridge.training.checkpointing.fsdp_dtensor import raise_problems
from qwen3vl_bridge.training.checkpointing.stored_parameters import rows_by_name
from qwen3vl_bridge.weights.names import local_name

import torch.distributed.checkpoint as dcp
from megatron.bridge.training import checkpointing
from megatron.core.utils import get_model_config
from torch import Tensor

logger = logging.getLogger(__name__)

_SECTION, _OPTIMIZER, _WRAPPER = "model.", "optimizer.", "module."
# Megatron-FSDP stores gate and up projection separately, and the sections of linear attention's projection.
_PARTS = ("_w", "_v", ".query", ".key", ".value", ".z", ".beta", ".alpha")


def load_every_weight(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Like Megatron-Bridge's `load_fsdp_dtensor_checkpoint`, which returns after skipping what it does not find.

    Args:
        theirs: that function.
        args, kwargs: its arguments.

    Raises:
        CheckpointError: weights of one of our models are in the checkpoint under neither name; all are listed. Or
            optimizer state is requested, which is under names that this model's optimizer does not have.
    """
    given = inspect.signature(theirs).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    state = asked["sharded_state_dict"]
    if state and state.get("rng_state", state) is None:
        del state["rng_state"]  # finetuning, or load_rng=False: a strict loader would look for the missing state
    chunks = None if asked["rank0"] or state is None or "model" not in state else state.get("_model")
    if not chunks or not isinstance(provider := get_model_config(chunks[0]), VisionLanguageProvider):
        return theirs(*args, **kwargs)
    folder = asked["checkpoint_path_override"] or checkpointing.get_checkpoint_name(
        asked["load_dir"], asked["iteration"], asked["release"]
    )
    weights = checkpointing.preprocess_fsdp_dtensor_state_dict(asked["cfg"], {"model": dict(state["model"])}, chunks[0])
    with all_or_none():
        found = checkpointing._get_filesystem_reader(folder).read_metadata().state_dict_metadata
        renamed, problems = other_names(weights["model"], found, provider)
        if renamed and "optimizer" in state and any(key.startswith(_OPTIMIZER) for key in found):
            raise CheckpointError(
                f"{folder} was saved with another layer spec than this model's, and its optimizer state uses that "
                "spec's names: expected checkpoint.load_optim=False, or the transformer_impl and moe_grouped_gemm "
                "that it was saved with"
            )
    raise_problems(folder, problems)
    loaded = theirs(*args, **kwargs)
    if any(gather_objects(bool(renamed))):
        logger.info("%d weights of %s are loaded under the parameter names of another layer spec", len(renamed), folder)
        dcp.load({"model": renamed}, storage_reader=checkpointing._get_filesystem_reader(folder))
    return loaded


def other_names(
    weights: Mapping[str, Any], found: Mapping[str, Any], provider: VisionLanguageProvider
) -> tuple[dict[str, Tensor], list[str]]:
    """Which weights a checkpoint has under the other layer spec's name, and which under none.

    Args:
        weights: the model's, with Megatron-FSDP's names.
        found: names in the checkpoint.
        provider: of the model.

    Returns:
        The first by the name in the checkpoint, and a line on each of the others.
    """
    rows, renamed, problems = rows_by_name(provider), {}, []
    for key, tensor in weights.items():
        if not isinstance(tensor, Tensor) or key.endswith("_extra_state") or _SECTION + key in found:
            continue
        name = key[key.rfind(_WRAPPER) + len(_WRAPPER) :] if _WRAPPER in key else key
        part = next((part for part in _PARTS if name.endswith(part)), "")
        row = rows.get(name.removesuffix(part))
        spellings = [] if row is None else [row.megatron, local_name(row.megatron)]
        prefix = key[: len(key) - len(name)]
        there = [spelt for one in spellings if _SECTION + (spelt := f"{prefix}{one}{part}") in found]
        if there:
            renamed[there[0]] = tensor
        else:
            problems.append(f"missing: {_SECTION}{key} {list(tensor.shape)}")
    return renamed, problems
