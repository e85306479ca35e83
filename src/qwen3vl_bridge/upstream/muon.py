"""Muon for layers with fused projections.

Muon orthogonalizes matrices. A fused projection contains several of them. megatron-core finds fused projections by
name, and splits them by the head sizes of the text model: a vision tower would be split at wrong rows or not at all,
and linear attention's projection would not be split (NVIDIA/Megatron-LM#4731, about gated attention, has the same
cause). It also treats the learned position embeddings of a vision tower as a matrix.

Replaced: `_get_megatron_emerging_optimizer` in `megatron.core.optimizer`, its only caller. The registry of emerging
optimizers has an entry per optimizer, not per model, and megatron-core sets the parameter attributes that Muon reads
right before it builds the optimizer. Delete this module when megatron-core keeps `is_qkv` and `qkv_split_shapes` of
parameters that have them, and leaves embeddings of every module to Adam.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace

_LAYER_WISE = "dist_"  # prefix of an optimizer's name
_MUON = ("muon", "adaptive_muon")  # other optimizers do not split, and leave all but matrices to Adam


def split_fused_projections(optimizer: ModuleType) -> None:
    """Make Muon split each fused projection into its matrices, and orthogonalize each of them.

    A layer with a fused projection has a method `fused_projection`, which returns the projection and the number of rows
    of each matrix. Models whose layers have no such method are not changed.

    Args:
        optimizer: `megatron.core.optimizer`.
    """
    theirs = optimizer._get_megatron_emerging_optimizer

    @functools.wraps(theirs)
    def build(config: Any, model_chunks: list, config_overrides: Any = None, pg_collection: Any = None) -> Any:
        rows: dict[Any, list[int]] = {}
        scalar = "adam"
        if config.optimizer.removeprefix(_LAYER_WISE) in _MUON:
            rows, scalar = fused_rows(config, model_chunks), config.muon_scalar_optimizer
        overrides = dict(config_overrides or {})
        if any(hasattr(layer, "fused_projection") for chunk in model_chunks for layer in chunk.modules()):
            overrides[optimizer.ParamKey(name="*vision_model.pos_embed.weight")] = {"optimizer": scalar}
        built = theirs(config, model_chunks, overrides, pg_collection)
        for weight, split in rows.items():
            # Muon reads the attributes when it steps, of the float32 copy if there is one.
            for trained in (weight, getattr(weight, "main_param", None)):
                if trained is not None:
                    trained.is_qkv, trained.qkv_split_shapes = True, split
        return built

    replace(optimizer, "_get_megatron_emerging_optimizer", build, When.ALWAYS)


def fused_rows(config: Any, model_chunks: list[Any]) -> dict[Any, list[int]]:
    """Return a dict from the weight of each fused projection in `model_chunks` to the number of rows of its matrices.

    Raises:
        ValueError: a rank has no full query group, or the optimizer is distributed.
    """
    found = {}
    for chunk in model_chunks:
        for name, layer in chunk.named_modules():
            if not hasattr(layer, "fused_projection"):
                continue
            layer_wise = config.optimizer.startswith(_LAYER_WISE) or config.use_layer_wise_distributed_optimizer
            if chunk.ddp_config.use_distributed_optimizer and not layer_wise:
                raise ValueError(
                    f"ddp.use_distributed_optimizer is True with optimizer {config.optimizer!r}, expected False: each "
                    "rank sums only a part of the gradients, and would step whole matrices"
                )
            projection, rows = layer.fused_projection()
            weight = getattr(projection, "weight", None)
            if weight is None or not config.muon_split_qkv:  # with adapters, only these are trained
                continue
            if len(weight) % sum(rows):
                raise ValueError(
                    f"{name} has {len(weight)} rows on this rank, expected a multiple of {sum(rows)}, the rows of one "
                    "query group with its keys and values, because Muon orthogonalizes each by itself: reduce "
                    "tensor_model_parallel_size to at most num_query_groups, or set optimizer.muon_split_qkv=False"
                )
            found[weight] = rows
    return found
