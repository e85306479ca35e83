"""The FLOPs formula against torch's count for transformers' models, forward and backward."""

import copy
import dataclasses
import itertools

from qwen3vl_bridge import registry
from qwen3vl_bridge.config.flops import CHUNK, Trained, tower_costs
from qwen3vl_bridge.registry import dimensions_of

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from tests.models.qwen3_5.tiny import MTPReference

# Of a family: a released size, and what its text model has instead of the released numbers.
SIZES = {
    "dense": ("qwen3_vl", "2B", {}), "tied": ("qwen3_vl", "4B", {}),
    "moe": ("qwen3_vl", "30B-A3B", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)),
    "linear": ("qwen3_5", "2B", {}),
    "linear moe": ("qwen3_5", "35B-A3B", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                                              shared_expert_intermediate_size=56)),
}  # fmt: skip
FULL = [kind for kind, (family, _, _) in SIZES.items() if family == "qwen3_vl"]  # with full attention alone
LINEAR = [kind for kind in SIZES if kind not in FULL]
ATTENTION = {
    "qwen3_vl": dict(num_hidden_layers=3),
    "qwen3_5": dict(num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"])
    | dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=24, linear_value_head_dim=28),
}
SECTIONS = {"qwen3_vl": [4, 2, 2], "qwen3_5": [1, 1, 0]}


def tiny(kind: str, **changes):
    family, size, experts = SIZES[kind]
    config = copy.deepcopy(registry.family(family).presets.hf_config(size))
    text, vision = config.text_config, config.vision_config
    rope = {**text.rope_parameters, "mrope_section": SECTIONS[family]}
    text.update(
        dict(hidden_size=64, intermediate_size=160, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
        | dict(vocab_size=512, rope_parameters=rope, **ATTENTION[family])
        | experts
        | changes
    )
    vision.update(
        dict(hidden_size=32, intermediate_size=80, depth=3, num_heads=2, out_hidden_size=64, patch_size=4)
        | dict(num_position_embeddings=36)
        | (dict(deepstack_visual_indexes=[0, 2]) if family == "qwen3_vl" else {})
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
    """Return torch's count of operations in one pass, without the matrix product of the rotary angles."""
    inputs = inputs_of(model.config, tokens, grid)
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        logits = model(**inputs, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops() - angles(model, tokens)


def angles(model, tokens: int) -> int:
    text = model.config.text_config
    return 2 * 3 * tokens * int(text.head_dim * text.rope_parameters.get("partial_rotary_factor", 1)) // 2


def build(kind: str):
    return AutoModelForImageTextToText.from_config(
        tiny(kind), attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.mark.parametrize("kind", SIZES)
def test_forward_flops_match_torch_flop_counter_on_transformers(kind):
    """Exact, except that torch counts all pairs of tokens in causal attention, of which kernels compute half, and
    that it counts padding of the convolution in linear attention.
    """
    model = build(kind)
    n = dimensions_of(model.config.to_dict())
    layers = n.indices.get("linear_layers", ())
    padding = 2 * len(layers) * (n["l_conv"] - 1) * n["l_conv"] * n["l_qkv"] if layers else 0
    costs, unit = tower_costs(model.config.to_dict()), CHUNK if kind in LINEAR else 40
    for tokens, grid in ((unit, None), (5 * unit, None), (2 * unit, (1, 8, 12)), (2 * unit, (1, 4, 4))):
        patches = grid[1] * grid[2] if grid else 0
        expected = (
            costs.count_flops(tokens=tokens, patches=patches, patch_pairs=patches**2) + costs.token_pair * tokens**2
        )
        assert operations(model, tokens, grid) - padding == expected, (tokens, grid)
    if kind in FULL:
        assert operations(model, 1, None) == costs.count_flops(tokens=1, patches=0, patch_pairs=0) + costs.token_pair


def component_of(name: str) -> str:
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
        cost = costs.count_flops(tokens=tokens, patches=patches, patch_pairs=patches**2) + costs.token_pair * tokens**2
        assert operations(model, tokens, grid, backward=True) == cost, (trained, grid)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", FULL)
def test_step_flops_with_frozen_components_match_torch_flop_counter(kind):
    model = build(kind)
    for number in range(1, 8):
        parts = [name for bit, name in enumerate(PARTS) if number >> bit & 1]
        for name, parameter in model.named_parameters():
            parameter.requires_grad = component_of(name) in parts
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
def test_step_flops_with_adapters_match_torch_flop_counter(chosen, also):
    """Gradients are computed down to the lowest adapter. Weights of a component may be trained with them."""
    from peft import LoraConfig, get_peft_model

    model, names = build("dense"), list(ADAPTED)
    layers = [names[number] for number in chosen]
    get_peft_model(model, LoraConfig(r=5, target_modules=f".*({'|'.join(layers)})"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name or component_of(name) == also
    ranks = {ADAPTED[layer]: 5 for layer in layers}
    parts = {name: name == also for name in PARTS}
    count(model, Trained(**parts, rank=lambda name: ranks.get(name, 0)))


def test_flops_of_expert_adapters_grow_with_selected_experts():
    """Count the products of both adapter matrices, of the gradients of their inputs and of their weights."""
    trained = Trained(False, False, False, rank=lambda layer: 5 * layer.startswith("language_model"))
    costs = [tower_costs(tiny("moe", num_experts_per_tok=topk).to_dict(), trained) for topk in (1, 2, 3)]
    up, down = (64, 2 * 48), (48, 64)  # of hidden size 64, experts of 48
    one = sum(2 * 2 * inputs * outputs + 2 * 3 * 5 * (inputs + outputs) for inputs, outputs in (up, down))
    assert [b.token - a.token for a, b in itertools.pairwise(costs)] == [3 * one, 3 * one]


def test_flops_of_samples_add_up_to_flops_of_batch():
    costs = tower_costs(registry.family("qwen3_vl").presets.hf_config("8B").to_dict(), Trained())
    samples = [(500, 400, 160_000), (70, 0, 0), (1800, 7200, 26_000_000)]
    alone = [costs.count_flops(tokens=t, patches=p, patch_pairs=pairs) for t, p, pairs in samples]
    tokens, patches, pairs = (sum(part) for part in zip(*samples, strict=True))
    squares = sum(t**2 for t, _, _ in samples)
    assert sum(alone) == costs.count_flops(tokens=tokens, token_pairs=squares, patches=patches, patch_pairs=pairs)


@pytest.mark.parametrize("kind", LINEAR)
def test_linear_attention_step_flops_match_torch_flop_counter(kind):
    """Exact for matrix products; torch counts the backward pass of a depthwise convolution differently.

    Products with the state of the first chunk (zero) and the state after the last chunk have no backward pass.
    """
    model = build(kind)
    n, costs, tokens = dimensions_of(model.config.to_dict()), tower_costs(model.config.to_dict(), Trained()), 4 * CHUNK
    with FlopCounterMode(display=False) as counter:
        model(**inputs_of(model.config, tokens, None), use_cache=False).logits.sum().backward()
    counted = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
    products = sum(number for op, number in counted.items() if "convolution" not in op)
    layers = len(n.indices["linear_layers"])
    convolutions = 3 * 2 * layers * tokens * n["l_conv"] * n["l_qkv"]
    states = 2 * layers * 4 * CHUNK * n["l_key_dim"] * n["l_value"]
    expected = costs.token * tokens + 2 * costs.token_pair * tokens**2 - convolutions - states
    print(f"{kind}: {products / (expected + states):.4f} of what is counted")
    assert products - angles(model, tokens) == expected


FROZEN = Trained(language_model=False)  # gradients go through it to the vision tower
MTP = {"forward": (Trained(False, False, False), None), "step": (Trained(), Trained()), "frozen": (FROZEN, FROZEN)}


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("case", MTP)
def test_flops_of_mtp_match_torch_flop_counter(kind, case):
    """The difference to a step without MTP is exactly the cost of its layer and of the output layer."""
    model, (trained, without), tokens = build(kind), MTP[case], 40
    config, parts = model.config.to_dict(), torch.nn.ModuleList([MTPReference(model.config), model.lm_head])
    parts.float().requires_grad_(trained.language_model)
    hidden, embedded = (torch.randn(1, tokens, 64, requires_grad=without is not None) for _ in range(2))
    rotary = model.model.language_model.rotary_emb(hidden, torch.arange(tokens).expand(3, 1, -1))
    with FlopCounterMode(display=False) as counter:
        logits = parts[1](parts[0](hidden, embedded, rotary))
        if without is not None:
            logits.sum().backward()
    costs, base = tower_costs(config, dataclasses.replace(trained, mtp=True)), tower_costs(config, without)
    expected = (costs.token - base.token) * tokens + 2 * (costs.token_pair - base.token_pair) * tokens**2
    assert counter.get_total_flops() == expected
    assert (costs.patch, costs.patch_pair) == (base.patch, base.patch_pair)


def test_flops_of_mtp_do_not_count_adapters():
    config = registry.family("qwen3_5").presets.hf_config("9B").to_dict()
    everywhere, in_decoder = (
        Trained(False, False, False, mtp=True, rank=lambda name, inside=inside: 8 * (inside in name))
        for inside in ("language_model.", "language_model.decoder.")
    )
    assert tower_costs(config, everywhere) == tower_costs(config, in_decoder)
