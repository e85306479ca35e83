"""What a provider's model costs: `flops.py` for the numbers and the frozen parts of a provider.

What lives here: reading them off the provider, and the figure that Megatron-Bridge asks a provider for. What may not:
the formula (`flops.py`), what adapters train (`training/monitoring/throughput.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3vl_bridge.models.common.flops import TowerCosts, Trained
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.dimensions import text_sizes, vision_sizes

if TYPE_CHECKING:
    from qwen3vl_bridge.models.common.settings.fields import VisionLanguageFields


def provider_sizes(provider: VisionLanguageFields) -> dict[str, int]:
    """`Dimensions.sizes` of a provider's model; its vocabulary without padding."""
    with_experts = bool(provider.moe_layers)
    sizes = text_sizes(
        vocab=provider.vocab_size,
        hidden=provider.hidden_size,
        ffn=provider.ffn_hidden_size,
        heads=provider.num_attention_heads,
        kv_heads=provider.num_query_groups or provider.num_attention_heads,
        head_dim=provider.kv_channels,
        untied=not provider.share_embeddings_and_output_weights,
        experts=provider.num_moe_experts or 0,
        chosen_experts=provider.moe_router_topk if with_experts else 0,
        moe_ffn=(provider.moe_ffn_hidden_size or 0) if with_experts else 0,
    )
    return sizes | vision_sizes(provider.vision_config.to_dict())


def provider_costs(provider: VisionLanguageFields, trained: Trained | None) -> TowerCosts:
    """As `cost.tower_costs`."""
    dimensions = provider.dimensions()
    return family(dimensions.family).costs(dimensions, trained)


def trained_parts(provider: VisionLanguageFields) -> Trained:
    """What is trained without adapters."""
    return Trained(
        language_model=not provider.freeze_language_model,
        vision_model=not provider.freeze_vision_model,
        vision_projection=not provider.freeze_vision_projection,
    )


def operations_of_a_step(
    provider: VisionLanguageFields,
    *,
    batch_size: int,
    seqlen_sum: int | None = None,
    seqlen_squared_sum: int | None = None,
    cross_seqlen_sum: int | None = None,
    cross_seqlen_product_sum: int | None = None,
) -> float:
    """Operations of a global batch, which Megatron-Bridge asks for to log TFLOP/s.

    It passes no patches. It does pass what it takes for the keys of another attention, and their products with the
    queries: where our step has filled them (`meter.Meter`) these are the patches, and the squares of frames' patches,
    which the vision tower's attention is. So nothing is estimated. Under LoRA it does not ask, and takes a formula of
    its own.

    Args:
        provider: the model.
        batch_size: rows, which count as full where nothing else is known.
        seqlen_sum: real tokens.
        seqlen_squared_sum: squares of segments' real tokens.
        cross_seqlen_sum: patches.
        cross_seqlen_product_sum: squares of frames' patches.
    """
    if seqlen_sum is None or seqlen_squared_sum is None:
        seqlen_sum, seqlen_squared_sum = batch_size * provider.seq_length, batch_size * provider.seq_length**2
    return provider_costs(provider, trained_parts(provider)).of_many(
        tokens=seqlen_sum,
        token_pairs=seqlen_squared_sum,
        patches=cross_seqlen_sum or 0,
        patch_pairs=cross_seqlen_product_sum or 0,
    )
