"""Providers of saved configurations: a `run_config.yaml` that names Megatron-Bridge's Qwen3-VL classes, or ours.

What lives here: which classes ours take the place of, and which saved fields don't travel. What may not: defaults and
checks of fields (`provider.py`), where Megatron-Bridge asks (`compat/import_hook.py`), what a converted checkpoint's
file holds (`checkpoint/formats/megatron/run_config.py`).

Megatron-Bridge rebuilds a checkpoint's model from the class that the file names. Its own Qwen3-VL and ours have the
same parameters under the same names, so a checkpoint of either is a checkpoint of both.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from qwen3vl_bridge.models.common.settings.encoder_parallel import DistTrainConfig
from qwen3vl_bridge.models.common.settings.fields import default_transformer_impl
from qwen3vl_bridge.models.qwen3_vl.config_checks import rope_parameters
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider

from megatron.bridge.models.qwen_vl import qwen3_vl_provider as stock

logger = logging.getLogger(__name__)

# Which kernels compute: the choice of the machine that saved. It changes no result but by rounding.
_KERNELS = frozenset(
    [
        "transformer_impl",
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_fusion",
        "cp_comm_type",
    ]
)
# What Megatron-Bridge's provider decides otherwise, and no weight depends on: how a loss is computed, what
# a graph replays. Its layers are Transformer Engine's whatever `transformer_impl` says.
_DECIDED_ANEW = frozenset(
    [
        "transformer_impl",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "cuda_graph_modules",
        "enable_cuda_graph",
        "external_cuda_graph",
        "vision_cuda_graph_impl",
        "vision_cuda_graph_scope",
        "max_vision_cuda_graph_seq_length",
    ]
)
_WITHOUT_EXPERTS = frozenset({"moe_token_dispatcher_type"})
# The only value under which Megatron-Bridge's model has the parameters that ours has.
_SAME_PARAMETERS = {"use_hf_vision_model": False}


def ours_for(target: Any) -> Any:
    """What builds our object where a configuration names `target`; `target` itself where that is something else."""
    return _OURS.get(target, target) if isinstance(target, type) else target


def _dense_of_stock(**saved: Any) -> Qwen3VLModelProvider:
    return _of_stock(Qwen3VLModelProvider, saved)


def _moe_of_stock(**saved: Any) -> Qwen3VLModelProvider:
    return _of_stock(Qwen3VLMoEModelProvider, saved)


def _dense(**saved: Any) -> Qwen3VLModelProvider:
    return _on_this_machine(Qwen3VLModelProvider, saved)


def _moe(**saved: Any) -> Qwen3VLModelProvider:
    return _on_this_machine(Qwen3VLMoEModelProvider, saved)


def _dist_train_of_stock(**saved: Any) -> DistTrainConfig:
    """Fields that Megatron-Bridge leaves to be worked out are None there; here they have a default."""
    return DistTrainConfig(**{name: value for name, value in saved.items() if value is not None})


_OURS: Mapping[type, Callable[..., Any]] = {
    stock.Qwen3VLModelProvider: _dense_of_stock,
    stock.Qwen3VLMoEModelProvider: _moe_of_stock,
    stock.DistTrainConfig: _dist_train_of_stock,
    Qwen3VLModelProvider: _dense,
    Qwen3VLMoEModelProvider: _moe,
}


def _of_stock(kind: type[Qwen3VLModelProvider], saved: Mapping[str, Any]) -> Qwen3VLModelProvider:
    """Our provider of the fields of Megatron-Bridge's.

    Raises:
        ValueError: fields that make other parameters than ours.
    """
    for name, only in _SAME_PARAMETERS.items():
        if saved.get(name, only) != only:
            raise ValueError(
                f"the checkpoint was saved with {name}={saved[name]!r}, expected {only!r}: its vision tower has "
                "parameters that this model lacks. Export it to Hugging Face without the plugin first"
            )
    anew = _DECIDED_ANEW if saved.get("num_moe_experts") else _DECIDED_ANEW | _WITHOUT_EXPERTS
    fields = {name: value for name, value in saved.items() if name not in anew}
    if (text := saved.get("hf_text_config")) is not None:
        rope = rope_parameters(text.to_dict())
        fields["rope_parameters"] = None if rope["rope_type"] == "default" else rope
    saved_with = {"transformer_impl": "transformer_engine"}
    logger.info(
        "the checkpoint names Megatron-Bridge's %s, and qwen3vl_bridge's %s is used", kind.__name__, kind.__name__
    )
    return _on_this_machine(kind, saved_with | fields)


def _on_this_machine(kind: type[Qwen3VLModelProvider], saved: Mapping[str, Any]) -> Qwen3VLModelProvider:
    """A provider of saved fields; without Transformer Engine here, its kernels are not asked for."""
    fields = dict(saved)
    if saved.get("transformer_impl") == "transformer_engine" != default_transformer_impl():
        logger.info(
            "saved with Transformer Engine's layers, which cannot run here: the local layer spec is used instead"
        )
        fields = {name: value for name, value in saved.items() if name not in _KERNELS}
    known, of_stock = _names(kind), _names(stock.Qwen3VLModelProvider) | _names(stock.Qwen3VLMoEModelProvider)
    if unknown := sorted(fields.keys() - known - of_stock):
        logger.warning("%s has no %s: dropped from the saved configuration", kind.__name__, ", ".join(unknown))
    return kind(**{name: value for name, value in fields.items() if name in known})


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind) if field.init}
