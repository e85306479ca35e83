"""Products in 8 bits: weights in the form that both products of a layer take, and inputs that are saved in one byte."""

import json
from dataclasses import replace

from qwen3vl_bridge.cli.plan import main
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.activations import chunk_activations
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.model_states import stage_states
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import EightBits, Sharding, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of

import pytest
from qwen3vl_recipes.dry_run import memory_plan
from qwen3vl_recipes.registry import find

DIMS = dimensions_of(presets.config_dict("8B"))
ALONE = ModelSplit(1)
USUAL = TrainingSettings()
# Of a layer of the 8B: queries, keys and values; their projection; the gated MLP.
IN_LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288


@pytest.mark.parametrize(("bits", "more"), [
    (EightBits(), 0.0), (EightBits(weights=False), 2.0), (EightBits(scale=1 / 32), 1 / 16),
    (EightBits(weights=False, scale=1 / 32), 2 + 1 / 16),
])  # fmt: skip
def test_a_weight_has_a_form_for_each_product(bits, more):
    chunks = ALONE.chunks(36)[0]
    usual, found = (stage_states(DIMS, ALONE, chunks, each) for each in (USUAL, replace(USUAL, eight_bits=bits)))
    assert found.parameters - usual.parameters == round(36 * IN_LAYER * more)
    ends = replace(bits, first=1, last=2)
    found = stage_states(DIMS, ALONE, chunks, replace(USUAL, eight_bits=ends))
    assert found.parameters - usual.parameters == round(33 * IN_LAYER * more)
    assert found.optimizer == usual.optimizer and found.gradients == usual.gradients


@pytest.mark.parametrize(("bits", "layers"), [(EightBits(), 36), (EightBits(first=1, last=1), 34)])
def test_inputs_of_products_are_saved_in_a_byte(bits, layers):
    """Of linear_qkv, linear_fc1 and linear_fc2; what attention saves stays."""
    (chunk,) = ALONE.chunks(36)[0]
    usual, found = (
        chunk_activations(DIMS, ALONE, training, chunk).stored["language model"]
        for training in (USUAL, replace(USUAL, eight_bits=bits))
    )
    assert usual - found == layers * (2 * 4096 + 12288) * USUAL.seq_length


def test_stages_count_their_own_layers():
    split = ModelSplit(2, pp=2)
    bits = replace(USUAL, eight_bits=EightBits(weights=False, first=1))
    first, last = (stage_states(DIMS, split, chunks, bits) for chunks in split.chunks(36))
    plain = [stage_states(DIMS, split, chunks, USUAL) for chunks in split.chunks(36)]
    assert first.parameters - plain[0].parameters == 17 * IN_LAYER * 2
    assert last.parameters - plain[1].parameters == 18 * IN_LAYER * 2


def test_what_products_do_not_take():
    bits = replace(USUAL, eight_bits=EightBits(multiple=32))
    with pytest.raises(ValueError, match="seq_length is 4080, expected a multiple of 32"):
        estimate(DIMS, ALONE, replace(bits, seq_length=4080))
    with pytest.raises(ValueError, match="counted with Transformer Engine and without Megatron-FSDP"):
        replace(bits, sharding=Sharding.ALL)
    linear = dimensions_of(qwen3_5.config_dict("9B"))
    split = ModelSplit(4, tp=4, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"self_attention.in_proj has 12352 outputs on 4 .* a multiple of 32"):
        estimate(linear, split, bits)
    estimate(linear, split, replace(bits, eight_bits=EightBits(multiple=32, exempt=("in_proj",))))


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize(("kind", "expected"), [
    ("cs", EightBits(first=1, last=1)), ("mx", EightBits(multiple=32, scale=1 / 32)),
])  # fmt: skip
def test_recipes(kind, expected):
    recipe = find(f"qwen3_vl_30b_a3b_pretrain_fp8_{kind}_config")
    assert memory_plan(recipe(), recipe.gpus).training.eight_bits == expected


def test_the_command(capsys):
    words = ["--model", "8B", "--gpus", "8", "--tp", "2", "--json"]
    found = {}
    for precision in ("bf16", "fp8_cs", "fp8_mx"):
        assert main([*words, "--precision", precision]) == 0
        found[precision] = json.loads(capsys.readouterr().out)["stages"][0]
    assert found["fp8_cs"]["parameters"] == found["bf16"]["parameters"] < found["fp8_mx"]["parameters"]
    assert found["fp8_cs"]["total"] < found["bf16"]["total"]


@pytest.mark.usefixtures("no_groups")
def test_a_recipe_that_is_not_counted():
    recipe = find("qwen3_vl_30b_a3b_pretrain_fp8_cs_config")
    cfg = recipe()
    cfg.mixed_precision = "bf16_with_fp8_subchannel_scaling_mixed"
    assert memory_plan(cfg, recipe.gpus).training.eight_bits == EightBits(weights=False)
    cfg.mixed_precision = "bf16_with_nvfp4_mixed"
    with pytest.raises(ValueError, match=r"fp4 .* expected"):
        memory_plan(cfg, recipe.gpus)
