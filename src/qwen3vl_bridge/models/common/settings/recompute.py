"""Settings of activation recomputation that would lose something or fail in the middle of a step.

What lives here: their check. What may not: fields (`fields.py`); megatron-core does the recomputing.
"""

from __future__ import annotations

from qwen3vl_bridge.models.common.settings.fields import VisionLanguageFields

_MEGATRONS_OWN = ["core_attn"]  # what finalize() writes into recompute_modules where nobody has
# Not "mlp": megatron-core 0.19 hands a recomputed MLP's bias, which the tower's have, out of its autograd function,
# and the backward pass then calls itself without end. The rest is for experts or another kind of attention.
_OF_VISION = {"core_attn", "layernorm"}
# What each granularity has no use for.
_IDLE = {None: ("method", "num_layers", "modules"), "full": ("modules",), "selective": ("method", "num_layers")}


def check_recompute(provider: VisionLanguageFields) -> None:
    """Check the text model's and the vision tower's settings.

    Raises:
        ValueError: DeepStack features would be lost, Transformer Engine is needed and not used, or the backward pass
            would not end.
    """
    for prefix in ("", "vision_"):
        _check_tower(provider, prefix)
    if unknown := set(provider.vision_recompute_modules or ()) - _OF_VISION:
        raise ValueError(f"vision_recompute_modules has {sorted(unknown)}, expected some of {sorted(_OF_VISION)}")
    # megatron-core keeps a tapped layer's output only at the end of a recomputed chunk, and is silent otherwise.
    if provider.vision_recompute_granularity == "full" and provider.vision_recompute_method == "uniform":
        chunk = provider.vision_recompute_num_layers
        lost = [tap for tap in provider.tapped_layers if (tap + 1) % chunk]
        if lost:
            raise ValueError(
                f"vision_recompute_num_layers is {chunk}; DeepStack taps {lost} don't end a chunk of {chunk} "
                "layers and would be lost. Use 1"
            )


def _check_tower(provider: VisionLanguageFields, prefix: str) -> None:
    names = ("granularity", "method", "num_layers", "modules")
    found = {name: getattr(provider, f"{prefix}recompute_{name}") for name in names}
    granularity, modules = found["granularity"], found["modules"] or ()
    if granularity not in (None, "full", "selective"):
        raise ValueError(f"{prefix}recompute_granularity is {granularity!r}, expected None, 'full' or 'selective'")
    if granularity == "full" and (found["method"] not in ("uniform", "block") or not found["num_layers"]):
        raise ValueError(
            f"{prefix}recompute_method is {found['method']!r} and {prefix}recompute_num_layers {found['num_layers']}, "
            f"expected 'uniform' or 'block' and 1 or more, as {prefix}recompute_granularity is 'full'"
        )
    for name in _IDLE[granularity]:
        if found[name] and found[name] != _MEGATRONS_OWN:
            raise ValueError(
                f"{prefix}recompute_{name} is {found[name]!r}, which {prefix}recompute_granularity {granularity!r} "
                "would ignore"
            )
    # megatron-core's recomputation of a norm takes its default for 8-bit training, and asks Transformer Engine.
    if "layernorm" in modules and provider.transformer_impl == "local":
        raise ValueError(
            f"{prefix}recompute_modules is {modules}: 'layernorm' needs Transformer Engine, and transformer_impl "
            "is 'local'. Leave it out"
        )
