"""Released models: the dimensions in which sizes differ, and a `config.json` built from them offline.

Standard library only; transformers is imported only in the function that returns one of its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionTower:
    """A vision tower. The outputs of `deepstack_layers`, if any, go to the text model's first layers."""

    depth: int
    hidden: int
    ffn: int
    heads: int = 16
    deepstack_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Experts:
    """Experts of each text layer: number of experts, experts per token, and the width of one."""

    number: int
    topk: int
    ffn: int


@dataclass(frozen=True)
class Preset:
    """The dimensions in which sizes differ. `ffn` is 0 if each layer has experts, and a shared one of their width."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vision: VisionTower
    tied: bool = False
    experts: Experts | None = None
    linear_value_heads: int = 0  # of linear attention, in a family that has it


def hub_names(releases: Mapping[str, Collection[str]], size: str, variants: Collection[str]) -> tuple[str, ...]:
    """Names on the hub of a size: in each of the `releases` that have it, each variant, also in FP8."""
    having = [release for release, sizes in releases.items() if size in sizes]
    return tuple(f"Qwen/{one}-{size}{kind}{fp8}" for one in having for kind in variants for fp8 in ("", "-FP8"))


def preset_of(name: str, presets: Mapping[str, Preset], hub_ids: Callable[[str], tuple[str, ...]]) -> Preset:
    """The preset of a size or a hub id, in any case; a ValueError for an unknown one. `hub_ids` are those of a size."""
    for size, preset in presets.items():
        if name.lower() in {known.lower() for known in (size, *hub_ids(size))}:
            return preset
    known, (example, *_) = ", ".join(presets), hub_ids(next(iter(presets)))
    raise ValueError(f"unknown model {name!r}, expected one of {known} or {example} or the like")


def preset_config(
    preset: Preset, model_type: str, architecture: str, *, text: Mapping[str, Any], token_ids: Mapping[str, int]
) -> dict[str, Any]:
    """A `config.json` in the format of transformers 5, without fields that have its defaults, and with a family's own
    (`text`); a new object that the caller may modify.

    `model_type` is that of the family's dense models, `architecture` the beginning of their class in transformers.
    """
    if preset.experts is not None:
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
        # The default of the MoE text configuration is True, whatever the whole model's configuration has.
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
    """A configuration as transformers' own class, by its `model_type`."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
