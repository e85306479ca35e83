"""Settings of experts: which layers have some, and what would contradict itself or change real tokens' training.

What lives here: reading and checking them. What may not: fields (`fields.py`), what has one value
(a provider's `fixed`), how experts are split (`parallelism.py`), the router (`models/common/router.py`).
"""

from __future__ import annotations

from qwen3vl_bridge.models.common.settings.fields import VisionLanguageFields

# Kinds of load balancing that see tokens alone: not their order, and not which of them share a row.
ROUTING = frozenset({"aux_loss", "global_aux_loss", "none"})
_OF_TRANSFORMER_ENGINE = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")


def layers_with_experts(provider: VisionLanguageFields) -> tuple[int, ...]:
    """Layers with experts, as megatron-core reads `moe_layer_freq`.

    Raises:
        ValueError: a spelling that megatron-core does not read, or a list of another length than the layers.
    """
    frequency, layers = provider.moe_layer_freq, provider.num_layers
    if isinstance(frequency, int):
        return tuple(range(0, layers, frequency))
    if isinstance(frequency, str):
        raise ValueError(f"moe_layer_freq is the text {frequency!r}, expected a number or a list")
    if len(frequency) != layers:
        raise ValueError(f"moe_layer_freq has {len(frequency)} entries, expected {layers}, one per layer")
    return tuple(layer for layer, has_experts in enumerate(frequency) if has_experts)


def check_experts(provider: VisionLanguageFields) -> None:
    """Check a provider before megatron-core completes it.

    Raises:
        ValueError: there are no experts, or more are chosen than there are, or ranks cannot share them; tokens would
            depend on padding or chance; or kernels that are not there are asked for.
    """
    if not provider.num_moe_experts or not provider.moe_layers:
        raise ValueError(
            f"num_moe_experts is {provider.num_moe_experts}, moe_layer_freq {provider.moe_layer_freq}: expected "
            "experts in one layer or more. A model without has the provider of dense ones"
        )
    if not 0 < provider.moe_router_topk <= provider.num_moe_experts:
        raise ValueError(f"moe_router_topk is {provider.moe_router_topk}, expected 1 to {provider.num_moe_experts}")
    if provider.num_moe_experts % provider.expert_model_parallel_size:
        raise ValueError(
            f"num_moe_experts is {provider.num_moe_experts}, expected a multiple of expert_model_parallel_size, "
            f"{provider.expert_model_parallel_size}"
        )
    kinds = provider.moe_router_load_balancing_type
    if unknown := set([kinds] if isinstance(kinds, str) else kinds) - ROUTING:
        raise ValueError(
            f"moe_router_load_balancing_type is {kinds!r}, expected some of {sorted(ROUTING)}: under "
            f"{sorted(unknown)} padding or packing would change what real tokens are trained to"
        )
    if provider.moe_router_force_load_balancing and not provider.allow_random_routing:
        raise ValueError(
            "moe_router_force_load_balancing is True, expected False: tokens would go to experts at random, and "
            "training would spoil the weights. To measure speed alone, set allow_random_routing too"
        )
    for name in _OF_TRANSFORMER_ENGINE:
        if provider.transformer_impl == "local" and getattr(provider, name):
            raise ValueError(
                f"{name} is True, expected False: it is Transformer Engine's, and transformer_impl is 'local'"
            )
    if provider.moe_router_fusion and provider.moe_router_dtype == "fp64":
        raise ValueError("moe_router_fusion is True with moe_router_dtype 'fp64', expected 'fp32': it has no other")
