"""Released Qwen3.5-VL models: their dimensions, and configurations that are built from them offline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.config import size_presets
from qwen3vl_bridge.config.hybrid_config import TOKENS, released_text_fields
from qwen3vl_bridge.config.size_presets import Experts, Preset, VisionTower
from qwen3vl_bridge.models.qwen3_5.config import FAMILY_NAME

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

# The sizes of each release. Releases of the same size share all shapes.
RELEASES: Mapping[str, Collection[str]] = {
    "Qwen3.5": PRESETS.keys(),
    "Qwen3.6": ("27B", "35B-A3B"),
    "Qwen3.8": ("27B",),
}

# A small proxy of the largest model for tests of parallelism: four layers, sixteen experts. It is not released.
PROXY = Preset(
    4096, 0, 4, 32, 2, linear_value_heads=64, vision=replace(_LARGE, depth=2), experts=Experts(16, topk=2, ffn=1024)
)


def hub_ids(size: str) -> tuple[str, ...]:
    """Return the Hugging Face hub ids of all models of a size. Their parameters have the same shapes.

    The size "proxy", a small model for tests, has the ids of the largest model.
    """
    released = "397B-A17B" if size == "proxy" else size
    return size_presets.hub_names(RELEASES, released, ("", "-Base", "-Instruct", "-Thinking"))


def config_dict(size: str) -> dict[str, Any]:
    """Return a new `config.json` in the format of transformers 5 for a size or a hub id.

    Raises:
        ValueError: the size or hub id is unknown.
    """
    preset = PROXY if size == "proxy" else size_presets.preset_of(size, PRESETS, hub_ids)
    experts = preset.experts
    text = {
        **released_text_fields(preset.layers, preset.linear_value_heads),
        "attn_output_gate": True,
        **({"intermediate_size": preset.ffn} if experts is None else {"shared_expert_intermediate_size": experts.ffn}),
    }
    return size_presets.preset_config(preset, FAMILY_NAME, "Qwen3_5", text=text, token_ids=TOKENS)


def hf_config(size: str) -> Any:
    """Return a transformers configuration in bfloat16 for a size or hub id, without downloads.

    It can be passed to `AutoBridge.from_hf_config`.
    """
    return size_presets.as_transformers(config_dict(size))
