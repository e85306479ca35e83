"""Providers of saved configurations: a `run_config.yaml` that names Megatron-Bridge's class of a family, or ours.

What lives here: which classes ours take the place of, as families register them, and which saved fields don't travel.
What may not: a family (`models/*/bridge.py` registers it), where Megatron-Bridge asks (`compat/patches.py`), what a
converted checkpoint's file holds (`checkpoint/formats/megatron/run_config.py`).

Megatron-Bridge rebuilds a checkpoint's model from the class that the file names. Its own models and ours have the same
parameters under the same names, so a checkpoint of either is a checkpoint of both.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from qwen3vl_bridge.models.common.settings.fields import VisionLanguageFields, default_transformer_impl

logger = logging.getLogger(__name__)

# Which kernels compute: the choice of the machine that saved. It changes no result but by rounding.
_KERNELS = frozenset(
    [
        "transformer_impl",
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
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
        "apply_rope_fusion",
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

_INSTEAD: dict[type, Callable[..., Any]] = {}


def take_place_of(
    theirs: type,
    ours: type[VisionLanguageFields],
    *,
    anew: Collection[str] = (),
    elsewhere: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda saved: {},
) -> None:
    """Give our provider where a saved configuration names Megatron-Bridge's, and let it pass for one.

    Args:
        theirs: Megatron-Bridge's provider. Who asks with `isinstance` whether a provider is one, asks whether it may be
            treated as one; so ours is registered with it (`abc`). None of its fields or defaults come along.
        ours: our provider of the same parameters.
        anew: fields of this family that don't travel, for no weight depends on them.
        elsewhere: (saved fields) -> fields of ours which Megatron-Bridge's provider has under other names.
    """
    theirs.register(ours)  # type: ignore[attr-defined]  # its metaclass is ABCMeta

    def of_theirs(**saved: Any) -> VisionLanguageFields:
        return _of_theirs(theirs, ours, saved, {*_DECIDED_ANEW, *anew}, elsewhere(saved))

    build_instead(theirs, of_theirs)


def build_instead(theirs: type, build: Callable[..., Any]) -> None:
    """Call `build` with the saved fields where a configuration names `theirs`.

    Args:
        theirs: a class of Megatron-Bridge.
        build: a function with a name, which Megatron-Bridge shows in errors.
    """
    _INSTEAD[theirs] = build


def ours_for(target: Any) -> Any:
    """What builds our object where a configuration names `target`; `target` itself where that is something else."""
    if not isinstance(target, type):
        return target
    if issubclass(target, VisionLanguageFields):

        def of_ours(**saved: Any) -> VisionLanguageFields:
            return _on_this_machine(target, saved, set())

        return of_ours
    return _INSTEAD.get(target, target)


def _of_theirs(
    theirs: type,
    ours: type[VisionLanguageFields],
    saved: Mapping[str, Any],
    anew: Collection[str],
    elsewhere: Mapping[str, Any],
) -> VisionLanguageFields:
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
    left = set(anew) if saved.get("num_moe_experts") else {*anew, *_WITHOUT_EXPERTS}
    fields = {name: value for name, value in saved.items() if name not in left}
    logger.info(
        "the checkpoint names Megatron-Bridge's %s, and qwen3vl_bridge's %s is used", theirs.__name__, ours.__name__
    )
    return _on_this_machine(ours, {"transformer_impl": "transformer_engine", **fields, **elsewhere}, _names(theirs))


def _on_this_machine(
    kind: type[VisionLanguageFields], saved: Mapping[str, Any], of_theirs: Collection[str]
) -> VisionLanguageFields:
    """A provider of saved fields; without Transformer Engine here, its kernels are not asked for.

    Args:
        kind: our provider.
        saved: fields by name.
        of_theirs: fields of Megatron-Bridge's, of which those that ours lacks are left out without a word.
    """
    fields = dict(saved)
    if saved.get("transformer_impl") == "transformer_engine" != default_transformer_impl():
        logger.info(
            "saved with Transformer Engine's layers, which cannot run here: the local layer spec is used instead"
        )
        fields = {name: value for name, value in saved.items() if name not in _KERNELS}
    known = _names(kind)
    if unknown := sorted(fields.keys() - known - set(of_theirs)):
        logger.warning("%s has no %s: dropped from the saved configuration", kind.__name__, ", ".join(unknown))
    return kind(**{name: value for name, value in fields.items() if name in known})


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind) if field.init}
