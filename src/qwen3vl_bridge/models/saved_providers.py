"""Providers of saved configurations: a `run_config.yaml` that names Megatron-Bridge's class of a family, or ours.

Megatron-Bridge rebuilds a checkpoint's model from the class that the file names. Its own models and ours have the same
parameters under the same names, so a checkpoint of one can be loaded by the other.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from qwen3vl_bridge.models.refusals import UNREAD
from qwen3vl_bridge.models.settings import VisionLanguageFields, default_transformer_impl

logger = logging.getLogger(__name__)

# Kernels: the choice of the machine that saved. They change results only by rounding.
_KERNELS = {
    *("transformer_impl", "gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("apply_rope_fusion", "masked_softmax_fusion", "persist_layer_norm"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "cp_comm_type"),
}
# Fields with another default in Megatron-Bridge's provider on which no weight depends: the loss, CUDA graphs; and those
# that would be ignored. Its layers are Transformer Engine's whatever `transformer_impl` is.
_EXCLUDED = {
    *(row.name for row in UNREAD),
    *("transformer_impl", "apply_rope_fusion", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    *("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules", "cuda_graph_warmup_steps"),
    *("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "enable_cuda_graph", "external_cuda_graph"),
    *("vision_cuda_graph_impl", "vision_cuda_graph_scope", "max_vision_cuda_graph_seq_length"),
}

_BUILDERS: dict[type, Callable[..., Any]] = {}


def register_replacement(
    theirs: type,
    ours: type[VisionLanguageFields],
    *,
    exclude: Collection[str] = (),
    elsewhere: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda saved: {},
) -> None:
    """Build our provider if a saved configuration names Megatron-Bridge's, and register it as a virtual subclass.

    Ours is registered with theirs (`abc`), because callers that use `isinstance` want to know whether a provider may be
    treated as one. None of its fields or defaults are inherited.

    Args:
        exclude: fields of this family that are not taken from the file, because no weight depends on them.
        elsewhere: (saved fields) -> fields of ours which Megatron-Bridge's provider has under other names.
    """
    theirs.register(ours)  # type: ignore[attr-defined]  # its metaclass is ABCMeta

    def of_theirs(**saved: Any) -> VisionLanguageFields:
        if saved.get("use_hf_vision_model"):
            raise ValueError(
                "the checkpoint was saved with use_hf_vision_model=True, expected False: its vision tower has "
                "parameters that this model lacks. Export it to Hugging Face without the plugin first"
            )
        excluded = {*_EXCLUDED, *exclude, *(() if saved.get("num_moe_experts") else ("moe_token_dispatcher_type",))}
        logger.info(
            "the checkpoint names Megatron-Bridge's %s, and qwen3vl_bridge's %s is used", theirs.__name__, ours.__name__
        )
        fields = {name: value for name, value in saved.items() if name not in excluded}
        return _on_this_machine(
            ours, {"transformer_impl": "transformer_engine", **fields, **elsewhere(saved)}, known=_names(theirs)
        )

    _BUILDERS[theirs] = of_theirs


def ours_for(target: Any) -> Any:
    """The builder of our object if a configuration names `target`; otherwise `target` itself."""
    if not isinstance(target, type):
        return target
    if issubclass(target, VisionLanguageFields):
        return lambda **saved: _on_this_machine(target, saved)
    return _BUILDERS.get(target, target)


def _on_this_machine(
    kind: type[VisionLanguageFields], saved: Mapping[str, Any], known: Collection[str] = ()
) -> VisionLanguageFields:
    """A provider from saved fields; without Transformer Engine on this machine, its kernels are turned off."""
    fields = dict(saved)
    if saved.get("transformer_impl") == "transformer_engine" != default_transformer_impl():
        logger.info(
            "saved with Transformer Engine's layers, which cannot run here: the local layer spec is used instead"
        )
        fields = {name: value for name, value in saved.items() if name not in _KERNELS}
    ours = _names(kind)
    if unknown := sorted(fields.keys() - ours - set(known)):
        logger.warning("%s has no %s: dropped from the saved configuration", kind.__name__, ", ".join(unknown))
    return kind(**{name: value for name, value in fields.items() if name in ours})


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind) if field.init}
