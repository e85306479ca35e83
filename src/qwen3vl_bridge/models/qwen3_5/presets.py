"""The released Qwen3.5-VL models: their dimensions, and configurations built from them offline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.models import size_presets
from qwen3vl_bridge.models.qwen3_5.config import FAMILY_NAME, FULL, LINEAR, LINEAR_SIZES, MTP_LAYERS, TOKENS
from qwen3vl_bridge.models.size_presets import Experts, Preset, VisionTower

_SMALL = VisionTower(depth=12, hidden=768, ffn=3072, heads=12)
_MEDIUM = VisionTower(depth=24, hidden=1024, ffn=4096, heads=16)
_LARGE = VisionTower(depth=27, hidden=1152, ffn=4304, heads=16)

PRESETS: Mapping[str, Preset] = {
    "0.8B": Preset(1024, 3584, 24, heads=8, kv_heads=2, linear_value_heads=16, vision=_SMALL, tied=True),
    "2B": Preset(2048, 6144, 24, heads=8, kv_heads=2, linear_value_heads=16, vision=_MEDIUM, tied=True),
    "4B": Preset(2560, 9216, 32, heads=16, kv_heads=4, linear_value_heads=32, vision=_MEDIUM, tied=True),
    "9B": Preset(4096, 12288, 32, heads=16, kv_heads=4, linear_value_heads=32, vision=_LARGE),
    "27B": Preset(5120, 17408, 64, heads=24, kv_heads=4, linear_value_heads=48, vision=_LARGE),
    "35B-A3B": Preset(2048, 0, 40, 16, 2, linear_value_heads=32, vision=_LARGE, experts=Experts(256, 8, 512)),
    "122B-A10B": Preset(3072, 0, 48, 32, 2, linear_value_heads=64, vision=_LARGE, experts=Experts(256, 8, 1024)),
    "397B-A17B": Preset(4096, 0, 60, 32, 2, linear_value_heads=64, vision=_LARGE, experts=Experts(512, 10, 1024)),
}

# By release, the sizes it has: a name of the hub stands for these dimensions.
RELEASES: Mapping[str, Collection[str]] = {
    "Qwen3.5": PRESETS.keys(),
    "Qwen3.6": ("27B", "35B-A3B"),
    "Qwen3.8": ("27B",),
}

# A scaled-down proxy of the largest model, for testing its parallelism: four layers, sixteen experts. Never released.
PROXY = Preset(
    4096, 0, 4, 32, 2, linear_value_heads=64, vision=replace(_LARGE, depth=2), experts=Experts(16, topk=2, ffn=1024)
)


def hub_ids(size: str) -> tuple[str, ...]:
    """Names on the Hugging Face hub of the models of a size, which share all shapes; for the proxy, those of the model
    whose processor it uses.
    """
    released = "397B-A17B" if size == "proxy" else size
    return size_presets.hub_names(RELEASES, released, ("", "-Base", "-Instruct", "-Thinking"))


def config_dict(size: str) -> dict[str, Any]:
    """A `config.json` in the format of transformers 5, for a size or a hub id; raises ValueError for an unknown one.

    The result is a new object that the caller may modify.
    """
    preset = PROXY if size == "proxy" else size_presets.preset_of(size, PRESETS, hub_ids)
    experts = preset.experts
    text = {
        "vocab_size": 248_320,
        "layer_types": [FULL if layer % 4 == 3 else LINEAR for layer in range(preset.layers)],
        "head_dim": 256,
        "attn_output_gate": True,
        **LINEAR_SIZES,
        "linear_num_value_heads": preset.linear_value_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "eos_token_id": 248_044,
        MTP_LAYERS: 1,
        **({"intermediate_size": preset.ffn} if experts is None else {"shared_expert_intermediate_size": experts.ffn}),
    }
    return size_presets.preset_config(preset, FAMILY_NAME, "Qwen3_5", text=text, token_ids=TOKENS)


def hf_config(size: str) -> Any:
    """Transformers' configuration, in bfloat16, for `AutoBridge.from_hf_config`. Nothing is downloaded."""
    return size_presets.as_transformers(config_dict(size))
