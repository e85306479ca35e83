"""Released Qwen3.8-Flash-Next models: their dimensions, and configurations that are built from them offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.config import size_presets
from qwen3vl_bridge.config.hybrid_config import TOKENS, released_text_fields
from qwen3vl_bridge.config.size_presets import Experts, Preset, VisionTower
from qwen3vl_bridge.models.qwen4_exp.config import FAMILY_NAME

_VISION = VisionTower(depth=27, hidden=1152, ffn=4304, heads=16)

PRESETS: Mapping[str, Preset] = {
    "Flash-Next": Preset(2560, 0, 48, 24, 2, linear_value_heads=48, vision=_VISION, experts=Experts(512, 10, 640)),
}


def hub_ids(size: str) -> tuple[str, ...]:
    """Return the Hugging Face hub ids of all models of a size. Their parameters have the same shapes."""
    return size_presets.hub_names({"Qwen3.8": PRESETS.keys()}, "Flash-Next", ("",))


def config_dict(size: str) -> dict[str, Any]:
    """Return a new `config.json` in the format of transformers 5 for a size or a hub id.

    Raises:
        ValueError: the size or hub id is unknown.
    """
    preset = size_presets.preset_of(size, PRESETS, hub_ids)
    assert preset.experts is not None
    text = {
        **released_text_fields(preset.layers, preset.linear_value_heads),
        "output_gate_type": "sigmoid",
        "shared_expert_intermediate_size": preset.experts.ffn,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 128,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    }
    return size_presets.preset_config(
        preset, FAMILY_NAME, "Qwen4Exp", text=text, token_ids=TOKENS, has_dense_models=False
    )


def hf_config(size: str) -> Any:
    """Return a transformers configuration in bfloat16 for a size or hub id, without downloads.

    It can be passed to `AutoBridge.from_hf_config`.
    """
    from qwen3vl_bridge.models.qwen4_exp.hf_classes import register_configs

    register_configs()
    return size_presets.as_transformers(config_dict(size))
