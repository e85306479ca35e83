"""Build the `config.json` of a released model from its dimensions, without a network.

Only `as_transformers` imports more than the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionTower:
    """Sizes of a vision tower. `deepstack_layers` are the indices of the DeepStack layers."""

    depth: int
    hidden: int
    ffn: int
    heads: int = 16
    deepstack_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Experts:
    """Experts of each text layer: number of experts, experts per token, and width of an expert."""

    number: int
    topk: int
    ffn: int


@dataclass(frozen=True)
class Preset:
    """Dimensions of a model size. `ffn` is 0 if every layer has experts and a shared expert as wide as an expert."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vision: VisionTower
    tied: bool = False
    experts: Experts | None = None
    linear_value_heads: int = 0  # 0 for a family without linear attention


def hub_names(releases: Mapping[str, Collection[str]], size: str, variants: Collection[str]) -> tuple[str, ...]:
    """Return the hub ids of all releases of a model size, for each variant in bfloat16 and FP8.

    `releases` maps names such as "Qwen3-VL" to sizes. `variants` are suffixes of names, such as "-Instruct".
    """
    having = [release for release, sizes in releases.items() if size in sizes]
    return tuple(f"Qwen/{release}-{size}{kind}{fp8}" for release in having for kind in variants for fp8 in ("", "-FP8"))


def preset_of(name: str, presets: Mapping[str, Preset], hub_ids: Callable[[str], tuple[str, ...]]) -> Preset:
    """Return the preset of a size such as "8B" or of a hub id, ignoring case. Raise ValueError for an unknown name."""
    for size, preset in presets.items():
        if name.lower() in {known.lower() for known in (size, *hub_ids(size))}:
            return preset
    known, (example, *_) = ", ".join(presets), hub_ids(next(iter(presets)))
    raise ValueError(f"unknown model {name!r}, expected one of {known} or {example} or the like")


def preset_config(
    preset: Preset,
    model_type: str,
    architecture: str,
    *,
    text: Mapping[str, Any],
    token_ids: Mapping[str, int],
    has_dense_models: bool = True,
) -> dict[str, Any]:
    """Return a new `config.json` in the format of transformers 5, without fields that have default values.

    Args:
        preset: dimensions of the model.
        model_type: `model_type` of the family's dense models; of its models with experts if it has no dense models.
        architecture: the beginning of the class name of these models in transformers.
        text: additional fields of the family's text model.
        token_ids: field name -> id of a special token.
        has_dense_models: whether the family has dense models.
    """
    if preset.experts is not None and has_dense_models:
        model_type, architecture = f"{model_type}_moe", f"{architecture}Moe"
    experts, tower = preset.experts, preset.vision
    shared_text = {
        "model_type": f"{model_type}_text",
        "dtype": "bfloat16",
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "max_position_embeddings": 262_144,
        # Repeated here, because in the text configuration of MoE models the default is True.
        "tie_word_embeddings": preset.tied,
    }
    if experts is not None:
        shared_text |= {
            "num_experts": experts.number,
            "num_experts_per_tok": experts.topk,
            "moe_intermediate_size": experts.ffn,
        }
    vision = {
        "model_type": f"{model_type}_vision",
        "dtype": "bfloat16",
        "depth": tower.depth,
        "hidden_size": tower.hidden,
        "intermediate_size": tower.ffn,
        "num_heads": tower.heads,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": preset.hidden,
        "num_position_embeddings": 48 * 48,
        **({"deepstack_visual_indexes": list(tower.deepstack_layers)} if tower.deepstack_layers else {}),
    }
    return {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": model_type,
        "dtype": "bfloat16",
        "text_config": shared_text | dict(text),
        "vision_config": vision,
        **token_ids,
        "tie_word_embeddings": preset.tied,
    }


def as_transformers(config: Mapping[str, Any]) -> Any:
    """Convert a `config.json` to an instance of transformers' configuration class for its `model_type`."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
