"""Settings of experts: which layers have experts, and settings that contradict each other or change real tokens'
training.
"""

from __future__ import annotations

from qwen3vl_bridge.models.settings.fields import VisionLanguageFields
from qwen3vl_bridge.models.settings.kernels import LOCAL
from qwen3vl_bridge.models.settings.rules import Row, Rule, When, any_of, multiple_of


def layers_with_experts(provider: VisionLanguageFields) -> tuple[int, ...]:
    """Layers with experts, as megatron-core reads `moe_layer_freq`.

    Raises:
        ValueError: a format that megatron-core does not read, or a list of another length than the layers.
    """
    frequency, layers = provider.moe_layer_freq, provider.num_layers
    if isinstance(frequency, int):
        return tuple(range(0, layers, frequency))
    if isinstance(frequency, str):
        raise ValueError(f"moe_layer_freq is the text {frequency!r}, expected a number or a list")
    if len(frequency) != layers:
        raise ValueError(f"moe_layer_freq has {len(frequency)} entries, expected {layers}, one per layer")
    return tuple(layer for layer, has_experts in enumerate(frequency) if has_experts)


def _check_experts(provider: VisionLanguageFields) -> None:
    if not provider.num_moe_experts or not provider.moe_layers:
        raise ValueError(
            f"num_moe_experts is {provider.num_moe_experts}, moe_layer_freq {provider.moe_layer_freq}: expected "
            "experts in at least one layer; a dense model has the dense provider"
        )
    if not 0 < provider.moe_router_topk <= provider.num_moe_experts:
        raise ValueError(f"moe_router_topk is {provider.moe_router_topk}, expected 1 to {provider.num_moe_experts}")


# For a provider with experts, before megatron-core completes it.
RULES: tuple[Rule, ...] = (
    _check_experts,
    Row("num_moe_experts", multiple_of("expert_model_parallel_size")),
    Row(
        "moe_router_load_balancing_type",
        any_of("aux_loss", "global_aux_loss", "none"),
        "other types balance over the tokens of a row, so padding or packing would change the training of real tokens",
    ),
    Row(
        "moe_router_force_load_balancing",
        False,
        "tokens would be routed at random, and training would ruin the weights. For speed measurements, set "
        "allow_random_routing too",
        When("allow_random_routing", lambda provider: not provider.allow_random_routing),
    ),
    *(
        Row(name, False, "Transformer Engine provides it", LOCAL)
        for name in ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
    ),
    Row(
        "moe_router_fusion",
        False,
        "the fused router computes only in 'fp32'",
        When("moe_router_dtype", lambda provider: provider.moe_router_dtype == "fp64"),
    ),
)
