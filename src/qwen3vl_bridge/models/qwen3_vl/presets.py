"""The released Qwen3-VL models: their numbers, and configurations made of them without any network.

What lives here: the numbers, each once, and their shape as a `config.json`. Standard library only; transformers is
imported by the one function that returns one of its classes. What may not: parameter names (`table.py`), how a
model is trained (recipes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.models.qwen3_vl.config_dimensions import dimensions_of
from qwen3vl_bridge.models.qwen3_vl.table import TABLE
from qwen3vl_bridge.weights.rows import parameter_count as count_parameters

if TYPE_CHECKING:
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig


@dataclass(frozen=True)
class VisionTower:
    """A vision tower. `taps` are the layers whose outputs go to the text model's first layers (DeepStack)."""

    depth: int
    hidden: int
    ffn: int
    taps: tuple[int, ...]


@dataclass(frozen=True)
class Experts:
    """Experts of each text layer: how many there are, how many a token visits, and the width of one."""

    number: int
    chosen: int
    ffn: int


@dataclass(frozen=True)
class Preset:
    """What sets one size apart from the others."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vision: VisionTower
    tied: bool = False
    experts: Experts | None = None


_SMALL_TOWER = VisionTower(depth=24, hidden=1024, ffn=4096, taps=(5, 11, 17))
_LARGE_TOWER = VisionTower(depth=27, hidden=1152, ffn=4304, taps=(8, 16, 24))

PRESETS: Mapping[str, Preset] = {
    "2B": Preset(2048, 6144, layers=28, heads=16, kv_heads=8, vision=_SMALL_TOWER, tied=True),
    "4B": Preset(2560, 9728, layers=36, heads=32, kv_heads=8, vision=_SMALL_TOWER, tied=True),
    "8B": Preset(4096, 12288, layers=36, heads=32, kv_heads=8, vision=_LARGE_TOWER),
    "32B": Preset(5120, 25600, layers=64, heads=64, kv_heads=8, vision=_LARGE_TOWER),
    "30B-A3B": Preset(
        2048, 6144, layers=48, heads=32, kv_heads=4, vision=_LARGE_TOWER, experts=Experts(128, chosen=8, ffn=768)
    ),
    "235B-A22B": Preset(
        4096, 12288, layers=94, heads=64, kv_heads=4, vision=_LARGE_TOWER, experts=Experts(128, chosen=8, ffn=1536)
    ),
}

_DTYPE = "bfloat16"


def hub_ids(size: str) -> tuple[str, str]:
    """Names on the Hugging Face hub of the two models of a size, which share all shapes: Instruct, Thinking."""
    return f"Qwen/Qwen3-VL-{size}-Instruct", f"Qwen/Qwen3-VL-{size}-Thinking"


def size_of(name: str) -> str:
    """The size, a key of `PRESETS`, that a size's own name or a hub id means.

    Raises:
        ValueError: there is no such model; the message lists the sizes.
    """
    for size in PRESETS:
        if name == size or name in hub_ids(size):
            return size
    raise ValueError(
        f"no preset is named {name!r}, expected one of {', '.join(PRESETS)} or {' or '.join(hub_ids('<size>'))}"
    )


def config_dict(size: str) -> dict[str, Any]:
    """A `config.json` as transformers 5 spells it. The caller may change it: nothing of it is shared.

    Args:
        size: a key of `PRESETS`, or a hub id.

    Raises:
        ValueError: an unknown size.
    """
    preset = PRESETS[size_of(size)]
    model_type = "qwen3_vl_moe" if preset.experts else "qwen3_vl"
    return {
        "architectures": [f"Qwen3VL{'Moe' if preset.experts else ''}ForConditionalGeneration"],
        "model_type": model_type,
        "dtype": _DTYPE,
        "text_config": {"model_type": f"{model_type}_text", **_text(preset), **_experts(preset.experts)},
        "vision_config": {"model_type": f"{model_type}_vision", **_vision(preset)},
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": preset.tied,
    }


def _text(preset: Preset) -> dict[str, Any]:
    return {
        "dtype": _DTYPE,
        "vocab_size": 151_936,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.ffn,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        # The MoE text configuration's own default is True, whatever the whole model's configuration says.
        "tie_word_embeddings": preset.tied,
    }


def _experts(experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return {}
    return {
        "num_experts": experts.number,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    }


def _vision(preset: Preset) -> dict[str, Any]:
    tower = preset.vision
    return {
        "dtype": _DTYPE,
        "depth": tower.depth,
        "hidden_size": tower.hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": tower.ffn,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": preset.hidden,
        "num_position_embeddings": 48 * 48,
        "deepstack_visual_indexes": list(tower.taps),
        "initializer_range": 0.02,
    }


def hf_config(size: str) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    """Configuration of a size as transformers' own class, in bfloat16; `AutoBridge.from_hf_config` takes it.

    Args:
        size: a key of `PRESETS`, or a hub id. Nothing is fetched.

    Raises:
        ValueError: an unknown size.
    """
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    config = config_dict(size)
    return (Qwen3VLMoeConfig if "num_experts" in config["text_config"] else Qwen3VLConfig).from_dict(config)


def parameter_count(size: str) -> int:
    """Parameters of a size, all experts and the vision tower among them; a tied output layer counts once.

    Args:
        size: a key of `PRESETS`, or a hub id.

    Raises:
        ValueError: an unknown size.
    """
    return count_parameters(TABLE, dimensions_of(config_dict(size)))


def active_parameter_count(size: str) -> int:
    """As `parameter_count`, but with the experts that one token visits alone. The same number for a dense model."""
    config = config_dict(size)
    dimensions, chosen = dimensions_of(config), config["text_config"].get("num_experts_per_tok", 0)
    return count_parameters(TABLE, replace(dimensions, indices={**dimensions.indices, "experts": range(chosen)}))
