"""Released Qwen3-VL models: their dimensions, and configurations that are built from them offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.config import size_presets
from qwen3vl_bridge.config.size_presets import Experts, Preset, VisionTower
from qwen3vl_bridge.models.qwen3_vl.config import FAMILY_NAME, TOKENS, dimensions_of
from qwen3vl_bridge.models.qwen3_vl.table import table
from qwen3vl_bridge.weights.rows import parameter_count as count_parameters

_SMALL_TOWER = VisionTower(depth=24, hidden=1024, ffn=4096, deepstack_layers=(5, 11, 17))
_LARGE_TOWER = VisionTower(depth=27, hidden=1152, ffn=4304, deepstack_layers=(8, 16, 24))

PRESETS: Mapping[str, Preset] = {
    "2B": Preset(2048, 6144, layers=28, heads=16, kv_heads=8, vision=_SMALL_TOWER, tied=True),
    "4B": Preset(2560, 9728, layers=36, heads=32, kv_heads=8, vision=_SMALL_TOWER, tied=True),
    "8B": Preset(4096, 12288, layers=36, heads=32, kv_heads=8, vision=_LARGE_TOWER),
    "32B": Preset(5120, 25600, layers=64, heads=64, kv_heads=8, vision=_LARGE_TOWER),
    "30B-A3B": Preset(2048, 6144, layers=48, heads=32, kv_heads=4, vision=_LARGE_TOWER, experts=Experts(128, 8, 768)),
    "235B-A22B": Preset(4096, 12288, 94, heads=64, kv_heads=4, vision=_LARGE_TOWER, experts=Experts(128, 8, 1536)),
}


def hub_ids(size: str) -> tuple[str, ...]:
    """Return the Hugging Face hub ids of all models of a size. Their parameters have the same shapes."""
    return size_presets.hub_names({"Qwen3-VL": PRESETS}, size, ("-Instruct", "-Thinking"))


def config_dict(size: str) -> dict[str, Any]:
    """Return a new `config.json` in the format of transformers 5 for a size or a hub id.

    Raises:
        ValueError: the size or hub id is unknown.
    """
    preset = size_presets.preset_of(size, PRESETS, hub_ids)
    text = {
        "vocab_size": 151_936,
        "intermediate_size": preset.ffn,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    }
    if preset.experts is not None:
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return size_presets.preset_config(preset, FAMILY_NAME, "Qwen3VL", text=text, token_ids=TOKENS)


def hf_config(size: str) -> Any:
    """Return a transformers configuration in bfloat16 for a size or hub id, without downloads.

    It can be passed to `AutoBridge.from_hf_config`.
    """
    return size_presets.as_transformers(config_dict(size))


def parameter_count(size: str) -> int:
    """Return the number of parameters of a model size, including all experts and the vision tower.

    A tied output layer is not counted in addition to the embedding.
    """
    return count_parameters(table(), dimensions_of(config_dict(size)))
