"""The cost formula on Qwen3.5 against torch's own count of what transformers' model does.

torch counts matrix products and convolutions. The delta rule by chunks is made of products, but for the inversion of
each chunk's triangular system, which transformers does row by row; so rows are of whole chunks here.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from qwen3vl_bridge.models.flops import CHUNK, Trained, tower_costs
from qwen3vl_bridge.models.qwen3_5.presets import hf_config
from qwen3vl_bridge.registry import dimensions_of

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from tests.model.test_cost import inputs_of

from .tiny import MTPReference

SIZES = {"dense": ("2B", {}), "moe": ("35B-A3B", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                                                     shared_expert_intermediate_size=56))}  # fmt: skip


def build(kind: str):
    """A tiny model, no two of its sizes alike, whose products torch counts as they are."""
    size, experts = SIZES[kind]
    config = copy.deepcopy(hf_config(size))
    text, vision = config.text_config, config.vision_config
    text.update(
        dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
        | dict(vocab_size=512, rope_parameters={**text.rope_parameters, "mrope_section": [1, 1, 0]})
        | dict(layer_types=["linear_attention"] * 3 + ["full_attention"])
        | dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=24, linear_value_head_dim=28)
        | (experts or dict(intermediate_size=160))
    )
    vision.update(
        dict(hidden_size=32, intermediate_size=80, depth=3, num_heads=2, out_hidden_size=64, patch_size=4)
        | dict(num_position_embeddings=36)
    )
    config.image_token_id, config.video_token_id, config.vision_start_token_id = 500, 501, 502
    return AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def operations(model, tokens: int, grid=None, *, backward: bool = False) -> int:
    """What one pass multiplies and adds, as torch counts it, without the products that make rotary angles."""
    inputs = inputs_of(model.config, tokens, grid)
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        logits = model(**inputs, use_cache=False).logits
        if backward:
            logits.sum().backward()
    turning = model.config.text_config.head_dim // 4
    return counter.get_total_flops() - 2 * 3 * tokens * turning // 2


def padding_of_convolutions(model) -> int:
    """Torch convolves the padding behind the row too: as many tokens as there are taps but one."""
    n = dimensions_of(model.config.to_dict())
    return 2 * len(n.indices["linear_layers"]) * (n["l_conv"] - 1) * n["l_conv"] * n["l_qkv"]


@pytest.mark.parametrize("kind", SIZES)
def test_forward_costs_are_what_transformers_does(kind):
    """Exactly, but for causal attention, of which torch counts all pairs, and for the convolution's padding."""
    model = build(kind)
    costs = tower_costs(model.config.to_dict())
    for tokens, grid in ((CHUNK, None), (5 * CHUNK, None), (2 * CHUNK, (1, 8, 12))):
        patches = grid[1] * grid[2] if grid else 0
        expected = costs.of(tokens=tokens, patches=patches, patch_pairs=patches**2) + costs.token_pair * tokens**2
        assert operations(model, tokens, grid) - padding_of_convolutions(model) == expected, (tokens, grid)


@pytest.mark.parametrize("kind", SIZES)
def test_a_step_costs_what_transformers_does(kind):
    """Exactly, of matrix products: torch has its own idea of a depthwise convolution's backward pass.

    What is counted here and has no backward pass there: products with the first chunk's state, which is zero, have no
    gradient of it; the last chunk's state is not used.
    """
    model = build(kind)
    n, costs, tokens = dimensions_of(model.config.to_dict()), tower_costs(model.config.to_dict(), Trained()), 4 * CHUNK
    with FlopCounterMode(display=False) as counter:
        model(**inputs_of(model.config, tokens, None), use_cache=False).logits.sum().backward()
    counted = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
    products = sum(number for op, number in counted.items() if "convolution" not in op)
    layers, turning = len(n.indices["linear_layers"]), model.config.text_config.head_dim // 4
    convolutions = 3 * 2 * layers * tokens * n["l_conv"] * n["l_qkv"]
    states = 2 * layers * 4 * CHUNK * n["l_key_dim"] * n["l_value"]
    expected = costs.token * tokens + 2 * costs.token_pair * tokens**2 - convolutions - states
    print(f"{kind}: {products / (expected + states):.4f} of what is counted")
    assert products - 2 * 3 * tokens * turning // 2 == expected


FROZEN = Trained(language_model=False)  # gradients go through it to the vision tower
MTP = {"forward": (Trained(False, False, False), None), "step": (Trained(), Trained()), "frozen": (FROZEN, FROZEN)}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("case", MTP)
def test_multi_token_prediction_costs_what_its_parts_do(kind, case):
    """Exactly: the difference to a step without it, against its layer and the output layer as torch counts them."""
    model, (trained, without), tokens = build(kind), MTP[case], 40
    config, parts = model.config.to_dict(), torch.nn.ModuleList([MTPReference(model.config), model.lm_head])
    parts.float().requires_grad_(trained.language_model)
    hidden, embedded = (torch.randn(1, tokens, 64, requires_grad=without is not None) for _ in range(2))
    angles = model.model.language_model.rotary_emb(hidden, torch.arange(tokens).expand(3, 1, -1))
    with FlopCounterMode(display=False) as counter:
        logits = parts[1](parts[0](hidden, embedded, angles))
        if without is not None:
            logits.sum().backward()
    costs, base = tower_costs(config, replace(trained, mtp=True)), tower_costs(config, without)
    expected = (costs.token - base.token) * tokens + 2 * (costs.token_pair - base.token_pair) * tokens**2
    assert counter.get_total_flops() == expected
    assert (costs.patch, costs.patch_pair) == (base.patch, base.patch_pair)


def test_it_gets_no_adapters():
    config = hf_config("9B").to_dict()
    everywhere, in_decoder = (
        Trained(False, False, False, mtp=True, rank=lambda name, inside=inside: 8 * (inside in name))
        for inside in ("language_model.", "language_model.decoder.")
    )
    assert tower_costs(config, everywhere) == tower_costs(config, in_decoder)
