"""Muon, and megatron-core's other emerging optimizers: rows of fused projections that are one matrix, and settings.

Muon orthogonalises matrices. A fused projection holds several, so megatron-core splits `linear_qkv.weight` by the head
sizes of the model's configuration. These are the text model's: the vision tower would be split at wrong rows if their
number is a multiple of the text model's, else not at all, and neither would be linear attention's projection.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.rules import Row, Rule, When, any_of, check, under

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS
from torch import nn


def tag_projections(config: OptimizerConfig, model_chunks: list[nn.Module]) -> None:
    """Tell Muon how to split each fused projection of our models, called right before it is built.

    Args:
        config: the optimizer's.
        model_chunks: this rank's, wrapped for training; models of others are left as they are.

    Raises:
        ValueError: a rank has no whole query group, or only its own part of the gradients.
    """
    for chunk in model_chunks:
        for name, layer in chunk.named_modules():
            if not hasattr(layer, "fused_projection"):
                continue
            if chunk.ddp_config.use_distributed_optimizer and not _is_layer_wise(config):
                found = f"ddp.use_distributed_optimizer is True with optimizer {config.optimizer!r}"
                raise ValueError(f"{found}, expected False: {_PARTS}")
            projection, rows = layer.fused_projection()
            weight = getattr(projection, "weight", None)
            if weight is None or not config.muon_split_qkv:  # with adapters, only these are trained
                continue
            if len(weight) % sum(rows):
                raise ValueError(
                    f"{name} has {len(weight)} rows on this rank, expected a multiple of {sum(rows)}, those of a query "
                    "group with its keys and values, to orthogonalise each by itself: reduce "
                    "tensor_model_parallel_size to at most num_query_groups, or set optimizer.muon_split_qkv=False"
                )
            weight.is_qkv, weight.qkv_split_shapes = True, rows


def check_optimizer(cfg: Any) -> None:
    """Refuse an optimizer that megatron-core could not build, step or save, or that would step wrong gradients.

    Args:
        cfg: a run's configuration.

    Raises:
        ValueError: such a setting.
        ModuleNotFoundError: the optimizer's package is missing.
    """
    check(_RULES, cfg)
    if _EMERGING.holds(cfg) and not HAVE_EMERGING_OPTIMIZERS:
        raise ModuleNotFoundError(
            f"optimizer.optimizer is {cfg.optimizer.optimizer!r}, which needs a package that is not installed: "
            "pip install emerging-optimizers"
        )


def _is_layer_wise(config: OptimizerConfig) -> bool:
    return config.optimizer.startswith("dist_") or config.use_layer_wise_distributed_optimizer


_EMERGING = When("optimizer.optimizer", lambda cfg: cfg.optimizer.optimizer not in ("adam", "sgd"))
_LAYER_WISE = When("optimizer.optimizer", lambda cfg: _EMERGING.holds(cfg) and _is_layer_wise(cfg.optimizer))
_PARTS = "each rank sums only a part of the gradients, and would step whole matrices"
_SHARDS = "it needs whole matrices"

_RULES: tuple[Rule, ...] = (
    Row(
        "optimizer.optimizer",
        any_of("adam", "sgd", "lion", "muon", "dist_muon"),
        "megatron-core 0.19 cannot build, step or save others with emerging-optimizers 0.3",
    ),
    *under(
        _EMERGING,
        Row("ddp.use_megatron_fsdp", False, _SHARDS),
        Row("dist.use_megatron_fsdp", False, _SHARDS),
        Row("dist.use_torch_fsdp2", False, _SHARDS),
        Row("ddp.use_distributed_optimizer", False, _PARTS),
        Row("optimizer.use_distributed_optimizer", False, _PARTS),
        Row("optimizer.optimizer_cpu_offload", False, "it would be ignored"),
        Row("optimizer.fp16", False, "megatron-core has no loss scaling for it"),
    ),
    *under(_LAYER_WISE, Row("optimizer.bf16", True, "megatron-core 0.19 wraps it only for bfloat16")),
)
