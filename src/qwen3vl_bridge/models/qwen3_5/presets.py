"""The released Qwen3.5-VL models: their numbers, and configurations made of them without any network.

What lives here: the numbers, each once, and their shape as a `config.json`. Standard library only; transformers is
imported by the one function that returns one of its classes. What may not: parameter names (`table.py`), how a model
is trained (recipes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.models.qwen3_5.config_dimensions import FULL, LINEAR

if TYPE_CHECKING:
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig


@dataclass(frozen=True)
class VisionTower:
    """A vision tower."""

    depth: int
    hidden: int
    ffn: int
    heads: int


@dataclass(frozen=True)
class Experts:
    """Experts of each text layer: how many, how many a token visits, the width of one and of the shared one."""

    number: int
    chosen: int
    ffn: int


@dataclass(frozen=True)
class Preset:
    """What sets one size apart from the others; `ffn` is 0 with experts."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    linear_value_heads: int
    vision: VisionTower
    tied: bool = False
    experts: Experts | None = None


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

_DTYPE = "bfloat16"


def hub_id(size: str) -> str:
    """Name on the Hugging Face hub."""
    return f"Qwen/Qwen3.5-{size}"


def size_of(name: str) -> str:
    """The size, a key of `PRESETS`, that a size's own name or a hub id means.

    Raises:
        ValueError: there is no such model; the message lists the sizes.
    """
    for size in PRESETS:
        if name in (size, hub_id(size)):
            return size
    raise ValueError(f"no preset is named {name!r}, expected one of {', '.join(PRESETS)} or {hub_id('<size>')}")


def config_dict(size: str) -> dict[str, Any]:
    """A `config.json` as transformers 5 spells it. The caller may change it: nothing of it is shared.

    Args:
        size: a key of `PRESETS`, or a hub id.

    Raises:
        ValueError: an unknown size.
    """
    preset = PRESETS[size_of(size)]
    model_type = "qwen3_5_moe" if preset.experts else "qwen3_5"
    return {
        "architectures": [f"Qwen3_5{'Moe' if preset.experts else ''}ForConditionalGeneration"],
        "model_type": model_type,
        "dtype": _DTYPE,
        "text_config": {"model_type": f"{model_type}_text", **_text(preset), **_mlp(preset)},
        "vision_config": {"model_type": f"{model_type}_vision", **_vision(preset)},
        "image_token_id": 248_056,
        "video_token_id": 248_057,
        "vision_start_token_id": 248_053,
        "vision_end_token_id": 248_054,
        "tie_word_embeddings": preset.tied,
    }


def _text(preset: Preset) -> dict[str, Any]:
    return {
        "dtype": _DTYPE,
        "vocab_size": 248_320,
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.layers,
        "layer_types": [FULL if layer % 4 == 3 else LINEAR for layer in range(preset.layers)],
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": preset.linear_value_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 248_044,
        "tie_word_embeddings": preset.tied,
    }


def _mlp(preset: Preset) -> dict[str, Any]:
    experts = preset.experts
    if experts is None:
        return {"intermediate_size": preset.ffn}
    return {
        "num_experts": experts.number,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.ffn,
        "shared_expert_intermediate_size": experts.ffn,
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
        "num_heads": tower.heads,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": preset.hidden,
        "num_position_embeddings": 48 * 48,
        "initializer_range": 0.02,
    }


def hf_config(size: str) -> Qwen3_5Config | Qwen3_5MoeConfig:
    """Configuration of a size as transformers' own class, in bfloat16; `AutoBridge.from_hf_config` takes it.

    Args:
        size: a key of `PRESETS`, or a hub id. Nothing is fetched.

    Raises:
        ValueError: an unknown size.
    """
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    config = config_dict(size)
    return (Qwen3_5MoeConfig if "num_experts" in config["text_config"] else Qwen3_5Config).from_dict(config)
