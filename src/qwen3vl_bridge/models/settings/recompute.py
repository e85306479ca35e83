"""Settings of activation recomputation that would lose something or fail in the middle of a step."""

from __future__ import annotations

from qwen3vl_bridge.models.settings.fields import VisionLanguageFields
from qwen3vl_bridge.models.settings.rules import Row, Rule, When, any_of, at_least

_BY_FINALIZE = ["core_attn"]  # megatron-core's default for recompute_modules
# Fields that each granularity does not use.
_UNUSED = {None: ("method", "num_layers", "modules"), "full": ("modules",), "selective": ("method", "num_layers")}


def _of_tower(prefix: str) -> tuple[Rule, ...]:
    """Rules of the text model ("") or the vision tower ("vision_")."""
    granularity, modules = f"{prefix}recompute_granularity", f"{prefix}recompute_modules"

    def at(wanted: str | None) -> When:
        return When(granularity, lambda provider: getattr(provider, granularity) == wanted)

    def norm_is_local(name: str) -> When:
        return When(
            modules,
            lambda provider: provider.transformer_impl == "local" and name in (getattr(provider, modules) or ()),
        )

    return (
        Row(granularity, any_of(*_UNUSED)),
        Row(f"{prefix}recompute_method", any_of("uniform", "block"), when=at("full")),
        Row(f"{prefix}recompute_num_layers", at_least(1), when=at("full")),
        *(
            Row(f"{prefix}recompute_{name}", None, "it would be ignored", at(of), also=(0, [], _BY_FINALIZE))
            for of, names in _UNUSED.items()
            for name in names
        ),
        # megatron-core's recomputation of a norm uses its default for 8-bit training, and calls Transformer Engine.
        *(
            Row(
                "transformer_impl",
                "transformer_engine",
                f"recomputing {name!r} needs Transformer Engine; remove it",
                norm_is_local(name),
            )
            for name in ("layernorm", "gdn_norm_out")
        ),
    )


def _check_taps(provider: VisionLanguageFields) -> None:
    """Refuse taps inside a recomputed chunk: megatron-core keeps a tapped layer's output only at the chunk's end,
    silently.
    """
    if (provider.vision_recompute_granularity, provider.vision_recompute_method) != ("full", "uniform"):
        return
    chunk = provider.vision_recompute_num_layers
    if lost := [tap for tap in provider.deepstack_layers if (tap + 1) % chunk]:
        raise ValueError(
            f"vision_recompute_num_layers is {chunk}; DeepStack taps {lost} are not at the end of a chunk of {chunk} "
            "layers and would be lost; use 1"
        )


def _check_modules(provider: VisionLanguageFields) -> None:
    """Refuse modules of layers that the text model does not have, which megatron-core skips silently."""
    experts = len(provider.moe_layers)
    there = {
        "mlp": experts < provider.num_layers,
        "moe": experts,
        "moe_act": experts,
        "shared_experts": experts and provider.moe_shared_expert_intermediate_size,
    }
    if provider.recompute_granularity == "selective" and (
        idle := [name for name in provider.recompute_modules or () if not there.get(name, True)]
    ):
        raise ValueError(f"recompute_modules has {idle}, which this model does not have: expected it without")


RULES: tuple[Rule, ...] = (
    *_of_tower(""),
    *_of_tower("vision_"),
    Row(
        "distribute_saved_activations",
        False,
        "it would be ignored",
        When("recompute_granularity", lambda provider: provider.recompute_granularity != "full"),
        also=(None,),
    ),
    # Not "mlp": megatron-core 0.19 returns a recomputed MLP's bias, which the tower's MLPs have, from its autograd
    # function, and the backward pass then recurses without end. The rest is for experts or another kind of attention.
    Row("vision_recompute_modules", any_of(None, "core_attn", "layernorm")),
    _check_modules,
    _check_taps,
)
