"""Memory of FP8 training: two FP8 copies of each weight, and saved inputs of one byte per element."""

import json
from dataclasses import replace

from qwen3vl_bridge.cli.plan import main
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.activations import chunk_activations
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.model_states import estimate_states
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.training_settings import Fp8Settings, Sharding, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of

import pytest
from qwen3vl_recipes.dry_run import estimate_memory
from qwen3vl_recipes.registry import find

DIMS = dimensions_of(presets.config_dict("8B"))
ONE_RANK = ParallelLayout(1)
BF16_RUN = TrainingSettings()
# Weights of a layer of the 8B: linear_qkv, linear_proj, linear_fc1 and linear_fc2.
LAYER_WEIGHTS = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288


@pytest.mark.parametrize(("fp8", "more"), [
    (Fp8Settings(), 0.0), (Fp8Settings(fp8_param=False), 2.0), (Fp8Settings(scale=1 / 32), 1 / 16),
    (Fp8Settings(fp8_param=False, scale=1 / 32), 2 + 1 / 16),
])  # fmt: skip
def test_estimated_fp8_parameter_bytes_include_both_fp8_copies(fp8, more):
    chunks = ONE_RANK.chunks(36)[0]
    bf16, found = (estimate_states(DIMS, ONE_RANK, chunks, each) for each in (BF16_RUN, replace(BF16_RUN, fp8=fp8)))
    assert found.parameters - bf16.parameters == round(36 * LAYER_WEIGHTS * more)
    ends = replace(fp8, first_bf16_layers=1, last_bf16_layers=2)
    found = estimate_states(DIMS, ONE_RANK, chunks, replace(BF16_RUN, fp8=ends))
    assert found.parameters - bf16.parameters == round(33 * LAYER_WEIGHTS * more)
    assert found.optimizer == bf16.optimizer and found.gradients == bf16.gradients


@pytest.mark.parametrize(
    ("fp8", "layers"), [(Fp8Settings(), 36), (Fp8Settings(first_bf16_layers=1, last_bf16_layers=1), 34)]
)
def test_estimated_fp8_activations_count_one_byte_per_saved_input(fp8, layers):
    """Inputs of linear_qkv, linear_fc1 and linear_fc2 are saved in FP8; attention still saves bf16."""
    (chunk,) = ONE_RANK.chunks(36)[0]
    bf16, found = (
        chunk_activations(DIMS, ONE_RANK, training, chunk).stored["language model"]
        for training in (BF16_RUN, replace(BF16_RUN, fp8=fp8))
    )
    assert bf16 - found == layers * (2 * 4096 + 12288) * BF16_RUN.seq_length


def test_estimated_fp8_parameter_bytes_count_only_layers_of_pipeline_stage():
    layout = ParallelLayout(2, pp=2)
    fp8 = replace(BF16_RUN, fp8=Fp8Settings(fp8_param=False, first_bf16_layers=1))
    first, last = (estimate_states(DIMS, layout, chunks, fp8) for chunks in layout.chunks(36))
    plain = [estimate_states(DIMS, layout, chunks, BF16_RUN) for chunks in layout.chunks(36)]
    assert first.parameters - plain[0].parameters == 17 * LAYER_WEIGHTS * 2
    assert last.parameters - plain[1].parameters == 18 * LAYER_WEIGHTS * 2


def test_estimate_raises_if_fp8_is_used_with_misaligned_sizes_or_fsdp():
    fp8 = replace(BF16_RUN, fp8=Fp8Settings(multiple=32))
    with pytest.raises(ValueError, match="seq_length is 4080, expected a multiple of 32"):
        estimate(DIMS, ONE_RANK, replace(fp8, seq_length=4080))
    with pytest.raises(ValueError, match="only with Transformer Engine and without Megatron-FSDP"):
        replace(fp8, sharding=Sharding.ALL)
    linear = dimensions_of(qwen3_5.config_dict("9B"))
    layout = ParallelLayout(4, tp=4, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"self_attention.in_proj has 12352 outputs on 4 .* a multiple of 32"):
        estimate(linear, layout, fp8)
    estimate(linear, layout, replace(fp8, fp8=Fp8Settings(multiple=32, bf16_linears=("in_proj",))))


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize(("kind", "expected"), [
    ("cs", Fp8Settings(first_bf16_layers=1, last_bf16_layers=1)), ("mx", Fp8Settings(multiple=32, scale=1 / 32)),
])  # fmt: skip
def test_estimate_memory_reads_fp8_settings_of_recipes(kind, expected):
    recipe = find(f"qwen3_vl_30b_a3b_pretrain_fp8_{kind}_config")
    assert estimate_memory(recipe(), recipe.gpus).training.fp8 == expected


def test_plan_with_fp8_current_scaling_needs_less_memory_than_bf16(capsys):
    words = ["--model", "8B", "--gpus", "8", "--tp", "2", "--json"]
    found = {}
    for precision in ("bf16", "fp8_cs", "fp8_mx"):
        assert main([*words, "--precision", precision]) == 0
        found[precision] = json.loads(capsys.readouterr().out)["stages"][0]
    assert found["fp8_cs"]["parameters"] == found["bf16"]["parameters"] < found["fp8_mx"]["parameters"]
    assert found["fp8_cs"]["total"] < found["bf16"]["total"]


@pytest.mark.usefixtures("no_groups")
def test_estimate_memory_raises_if_precision_is_nvfp4():
    recipe = find("qwen3_vl_30b_a3b_pretrain_fp8_cs_config")
    cfg = recipe()
    cfg.mixed_precision = "bf16_with_fp8_subchannel_scaling_mixed"
    assert estimate_memory(cfg, recipe.gpus).training.fp8 == Fp8Settings(fp8_param=False)
    cfg.mixed_precision = "bf16_with_nvfp4_mixed"
    with pytest.raises(ValueError, match=r"fp4 .* expected"):
        estimate_memory(cfg, recipe.gpus)
