"""The cost formula against torch's own count of what transformers' model does."""

import copy

from qwen3vl_bridge.cost import tower_costs
from qwen3vl_bridge.presets import hf_config

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

SIZES = {
    "dense": ("2B", {}),
    "tied": ("4B", {}),
    "moe": ("30B-A3B", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
}


def tiny(name: str, **experts):
    """A configuration of that family, small, no two of its sizes alike."""
    config = copy.deepcopy(hf_config(name))
    text, vision = config.text_config, config.vision_config
    text.update(
        dict(hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6, head_dim=16)
        | dict(
            num_key_value_heads=2, vocab_size=512, rope_parameters={**text.rope_parameters, "mrope_section": [4, 2, 2]}
        )
        | experts
    )
    vision.update(
        dict(hidden_size=32, intermediate_size=80, depth=3, num_heads=2, out_hidden_size=64, patch_size=4)
        | dict(deepstack_visual_indexes=[0, 2], num_position_embeddings=36)
    )
    config.image_token_id, config.video_token_id, config.vision_start_token_id = 500, 501, 502
    return config


def operations(model, tokens: int, grid: tuple[int, int, int] | None) -> int:
    """What one forward pass multiplies and adds, as torch counts it."""
    config = model.config
    ids, pictures = torch.full((1, tokens), 7), {}
    if grid is not None:
        patches = grid[0] * grid[1] * grid[2]
        ids[0, 1 : 1 + patches // 4] = config.image_token_id
        pixels = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
        pictures = {"pixel_values": torch.zeros(patches, pixels), "image_grid_thw": torch.tensor([grid])}
        pictures["mm_token_type_ids"] = (ids == config.image_token_id).int()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False, **pictures)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", SIZES)
def test_costs_are_what_transformers_does(family):
    """Exactly, but for causal attention: torch counts all pairs of tokens, of which kernels compute half."""
    name, experts = SIZES[family]
    config = tiny(name, **experts)
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    costs = tower_costs(config.to_dict())

    def expected(tokens: int, frames: tuple[int, ...] = ()) -> float:
        cost = costs.of(tokens=tokens, patches=sum(frames), patch_pairs=sum(n**2 for n in frames))
        return cost + costs.token_pair * tokens**2

    for tokens in (1, 40, 200):
        assert operations(model, tokens, None) - _rotary(model, tokens) == expected(tokens)
    for grid in ((1, 4, 4), (1, 8, 12)):
        frames = (grid[1] * grid[2],) * grid[0]
        assert operations(model, 60, grid) - _rotary(model, 60) == expected(60, frames)


def _rotary(model, tokens: int) -> int:
    """Its angles come from a matrix product, which is no layer's."""
    return 2 * 3 * tokens * model.config.text_config.head_dim // 2
