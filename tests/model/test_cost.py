"""The cost formula against torch's own count of what transformers' model does, forward and backward."""

import copy
import dataclasses
import itertools

from qwen3vl_bridge.models.flops import Trained, tower_costs
from qwen3vl_bridge.models.qwen3_vl.presets import hf_config

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


def inputs_of(config, tokens: int, grid: tuple[int, int, int] | None) -> dict[str, torch.Tensor]:
    ids, pictures = torch.full((1, tokens), 7), {}
    if grid is not None:
        patches = grid[0] * grid[1] * grid[2]
        ids[0, 1 : 1 + patches // 4] = config.image_token_id
        pixels = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
        pictures = {"pixel_values": torch.zeros(patches, pixels), "image_grid_thw": torch.tensor([grid])}
        pictures["mm_token_type_ids"] = (ids == config.image_token_id).int()
    return dict(input_ids=ids, **pictures)


def operations(model, tokens: int, grid: tuple[int, int, int] | None, *, backward: bool = False) -> int:
    """What one pass multiplies and adds, as torch counts it; but not the angles of the rotary embedding.

    They come from a matrix product, which is no layer's.
    """
    inputs = inputs_of(model.config, tokens, grid)
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        logits = model(**inputs, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops() - 2 * 3 * tokens * model.config.text_config.head_dim // 2


def build(family: str):
    name, experts = SIZES[family]
    return AutoModelForImageTextToText.from_config(
        tiny(name, **experts), attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.mark.parametrize("family", SIZES)
def test_costs_are_what_transformers_does(family):
    """Exactly, but for causal attention: torch counts all pairs of tokens, of which kernels compute half."""
    model = build(family)
    costs = tower_costs(model.config.to_dict())

    def expected(tokens: int, frames: tuple[int, ...] = ()) -> float:
        cost = costs.of(tokens=tokens, patches=sum(frames), patch_pairs=sum(n**2 for n in frames))
        return cost + costs.token_pair * tokens**2

    for tokens in (1, 40, 200):
        assert operations(model, tokens, None) == expected(tokens)
    for grid in ((1, 4, 4), (1, 8, 12)):
        frames = (grid[1] * grid[2],) * grid[0]
        assert operations(model, 60, grid) == expected(60, frames)


def part_of(name: str) -> str:
    if ".visual." not in f".{name}":
        return "language_model"
    return "vision_projection" if "merger" in name else "vision_model"


def of_vision(trained: Trained) -> bool:
    adapted = any(trained.rank(layer) for layer in ADAPTED.values() if layer.startswith("vision_model"))
    return trained.vision_model or trained.vision_projection or adapted


def count(model, trained: Trained) -> None:
    costs = tower_costs(model.config.to_dict(), trained)
    for tokens, grid in ((40, None), (60, (1, 8, 12))):
        patches = grid[1] * grid[2] if grid else 0
        if grid is None and not trained.language_model and of_vision(trained):
            continue  # transformers' gradient ends sooner; our model goes through the tower on text too
        cost = costs.of(tokens=tokens, patches=patches, patch_pairs=patches**2) + costs.token_pair * tokens**2
        assert operations(model, tokens, grid, backward=True) == cost, (trained, grid)


@pytest.mark.parametrize("family", SIZES)
def test_costs_of_a_step_follow_what_is_trained(family):
    model = build(family)
    for number in range(1, 8):
        parts = [name for bit, name in enumerate(PARTS) if number >> bit & 1]
        for name, parameter in model.named_parameters():
            parameter.requires_grad = part_of(name) in parts
        count(model, Trained(**{name: name in parts for name in PARTS}))


PARTS = [field.name for field in dataclasses.fields(Trained) if field.type == "bool"]
# Layers that are one matrix in both models, by their names in transformers' and in Megatron's.
ADAPTED = {
    "language_model.layers.1.self_attn.o_proj": "language_model.decoder.layers.1.self_attention.linear_proj",
    "language_model.layers.2.mlp.down_proj": "language_model.decoder.layers.2.mlp.linear_fc2",
    "visual.blocks.1.attn.qkv": "vision_model.decoder.layers.1.self_attention.linear_qkv",
    "visual.blocks.2.mlp.linear_fc1": "vision_model.decoder.layers.2.mlp.linear_fc1",
    "visual.deepstack_merger_list.0.linear_fc2": "vision_model.decoder.deepstack_merger_list.0.linear_fc2",
    "visual.merger.linear_fc1": "vision_model.merger.linear_fc1",
}


@pytest.mark.parametrize("chosen", [[0, 1], [1], [2, 3], [4], [5], [0, 3]])
@pytest.mark.parametrize("also", [None, "language_model"])
def test_costs_of_a_step_with_adapters(chosen, also):
    """Gradients go no further down than the lowest adapter; a part's own weights may be trained beside them."""
    from peft import LoraConfig, get_peft_model

    model, names = build("dense"), list(ADAPTED)
    layers = [names[number] for number in chosen]
    get_peft_model(model, LoraConfig(r=5, target_modules=f".*({'|'.join(layers)})"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name or part_of(name) == also
    ranks = {ADAPTED[layer]: 5 for layer in layers}
    parts = {name: name == also for name in PARTS}
    count(model, Trained(**parts, rank=lambda name: ranks.get(name, 0)))


def test_adapters_of_experts_count_for_each_chosen_one():
    """Of both matrices of an adapter: the product, the gradient of its input and that of its weight."""
    name, experts = SIZES["moe"]
    trained = Trained(False, False, False, rank=lambda layer: 5 * layer.startswith("language_model"))
    costs = [
        tower_costs(tiny(name, **experts | {"num_experts_per_tok": chosen}).to_dict(), trained) for chosen in (1, 2, 3)
    ]
    up, down = (64, 2 * 48), (48, 64)  # of hidden size 64, experts of 48
    one = sum(2 * 2 * inputs * outputs + 2 * 3 * 5 * (inputs + outputs) for inputs, outputs in (up, down))
    assert [b.token - a.token for a, b in itertools.pairwise(costs)] == [3 * one, 3 * one]


def test_samples_add_up():
    costs = tower_costs(hf_config("8B").to_dict(), Trained())
    samples = [(500, 400, 160_000), (70, 0, 0), (1800, 7200, 26_000_000)]
    alone = [costs.of(tokens=t, patches=p, patch_pairs=pairs) for t, p, pairs in samples]
    tokens, patches, pairs = (sum(part) for part in zip(*samples, strict=True))
    squares = sum(t**2 for t, _, _ in samples)
    assert sum(alone) == costs.of_many(tokens=tokens, token_pairs=squares, patches=patches, patch_pairs=pairs)
