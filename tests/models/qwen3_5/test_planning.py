"""The planner for Qwen3.5: released sizes, multi-token prediction, adapters, parallel layouts."""

import json
from collections import Counter
from dataclasses import replace

from qwen3vl_bridge.cli.plan import main
from qwen3vl_bridge.models.qwen3_5.presets import PRESETS, config_dict, hf_config, hub_ids
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.model_states import count_parameters
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.training_settings import LINEAR_LAYERS, Sharding, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.training.process_groups import initialize, shutdown
from qwen3vl_bridge.weights.rows import component_of, is_mtp

import pytest
import torch
from megatron.bridge import AutoBridge
from qwen3vl_recipes.cli import train

from tests.models.qwen3_5.test_table import MTP_PARAMETERS
from tests.planning.test_states import check_adapters


def test_planned_parameter_counts_match_built_qwen3_5_model():
    provider = AutoBridge.from_hf_config(hf_config("0.8B")).to_megatron_provider(load_weights=False)
    provider.bf16, provider.params_dtype, provider.perform_initialization = True, torch.bfloat16, False
    provider.finalize()
    initialize(provider, seed=0)
    with torch.device("meta"):
        model = provider.provide(pre_process=True, post_process=True)
    found: Counter[str] = Counter()
    for name, p in model.named_parameters():
        found[component_of(name).value] += p.numel()
    dims = dimensions_of(config_dict("0.8B")).with_vocab(provider.padded_vocab_size or provider.vocab_size)
    assert count_parameters(dims, ParallelLayout(1), ParallelLayout(1).chunks(24)[0][0]) == found


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("size", PRESETS)
def test_plan_command_finds_fitting_layouts_for_every_released_qwen3_5_size(size, capsys):
    gpus = {"122B-A10B": 64, "397B-A17B": 256}.get(size, 16)
    words = [
        "--model", hub_ids(size)[0], "--gpus", str(gpus), "--seq-length", "8192", "--max-patches", "8192", "--json",
    ]  # fmt: skip
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found and all(one["fits"] for one in found)


STAGED = ParallelLayout(16, pp=4, tp=2, sequence_parallel=True)


def test_plan_counts_mtp_training_memory_on_last_pipeline_stage():
    """The last stage has more gradients and optimizer states. Earlier stages keep next tokens with hidden states."""
    config, rows = config_dict("9B"), TrainingSettings(seq_length=8192, max_patches=0, sharding=Sharding.NONE)
    dims, kept = dimensions_of(config), estimate(dimensions_of(config), STAGED, rows)
    trained = estimate(dimensions_of(config), STAGED, replace(rows, trains_mtp=True))
    *others, last = zip(kept.stages, trained.stages, strict=True)
    (chunk,) = STAGED.chunks(32)[-1]
    numbers = count_parameters(dims, STAGED, chunk, is_mtp).total()
    assert abs(numbers * 2 / MTP_PARAMETERS["9B"] - 1) < 1e-3  # norms are whole on both tensor-parallel ranks
    for without, with_it in others:
        assert without.states == with_it.states
    without, with_it = last
    assert with_it.states.parameters == without.states.parameters
    assert with_it.states.gradients - without.states.gradients == 4 * numbers
    assert with_it.states.optimizer - without.states.optimizer == 12 * numbers
    one = 8192 * 4096 * 2 / 2  # hidden states of a microbatch on a sequence-parallel rank
    between = [stage.activations.get("multi-token prediction", 0) / one for stage in trained.stages]
    assert between[:3] == [0, 3, 2]  # as many microbatches are in flight
    assert "multi-token prediction" not in kept.peak.activations


def test_plan_command_rejects_mtp_option_for_model_without_mtp(capsys):
    run = ["--gpus", "8", "--tp", "2", "--mtp"]
    assert main(["--model", "8B", *run]) == 2
    assert "this model has no multi-token prediction to train" in capsys.readouterr().err
    assert main(["--model", "Qwen/Qwen3.5-9B", *run, "--recompute", "full", "--recompute-num-layers", "2"]) == 2
    assert "recompute_num_layers 2, expected 'uniform' and 1" in capsys.readouterr().err


def test_plan_and_recipe_dry_run_add_memory_of_mtp_training(capsys):
    words = ["--model", "Qwen/Qwen3.5-9B", "--gpus", "8", "--tp", "4", "--seq-length", "4096", "--json"]
    shutdown()
    recipe = ["--recipe", "qwen35_vl_9b_sft_config", "--dry-run", "--json"]

    def found(program, *words) -> dict:
        program([*words])
        return json.loads(capsys.readouterr().out)

    for without, trained in (
        (found(main, *words), found(main, *words, "--mtp")),
        (found(train, *recipe)["plan"], found(train, *recipe, "model.mtp_loss_scaling_factor=0.1")["plan"]),
    ):
        assert trained["training"] == without["training"] | {"trains_mtp": True}
        (one,), (other,) = without["stages"], trained["stages"]
        assert other["activations"].keys() - one["activations"].keys() == {"multi-token prediction"}
        numbers = MTP_PARAMETERS["9B"] / trained["parallel_layout"]["tp"]
        assert other["gradients"] - one["gradients"] == pytest.approx(4 * numbers, rel=1e-3)
        assert other["parameters"] == one["parameters"] and trained["fits"]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_planned_model_states_with_adapters_match_built_qwen3_5_model(kind, qwen3_5_folders):
    check_adapters(qwen3_5_folders[kind], target_modules=list(LINEAR_LAYERS))


def test_plan_command_rejects_separate_vision_ranks_for_qwen3_5(capsys):
    for words in ([], ["--tp", "2"]):
        assert main(["--model", "Qwen/Qwen3.5-9B", "--gpus", "16", "--vision-gpus", "4", *words]) == 2
        assert "qwen3_5 does not support separate vision ranks" in capsys.readouterr().err


def test_planned_activations_are_divided_by_tp_and_cp_sizes():
    config, rows = config_dict("9B"), TrainingSettings(seq_length=32768, max_patches=0, loss_chunk_tokens=0)

    def kept(**sizes) -> float:
        return sum(estimate(dimensions_of(config), ParallelLayout(16, **sizes), rows).peak.activations.values())

    by_tensors = kept(tp=4, sequence_parallel=True)
    assert kept(cp=4) == pytest.approx(kept() / 4, rel=1e-3)
    assert by_tensors == pytest.approx(kept() / 4, rel=0.02)  # angles and indices are whole on each
    assert kept(tp=4, cp=4, sequence_parallel=True) == pytest.approx(by_tensors / 4, rel=1e-3)
