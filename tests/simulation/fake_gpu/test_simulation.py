"""`qwen3vl train --simulate-gpu`: one rank of a recipe with its real sizes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

from qwen3vl_bridge.planning.hardware import GPUS

import pytest

from tests.helpers.flash_linear_attention import PYTHONPATH, needs_package

H100 = GPUS["H100"].memory_bytes


@pytest.fixture(scope="module")
def simulate(built):
    """Return a function that runs the command, which finds the fake GPU in the user's cache."""
    cache = built.parents[2]

    def run(*arguments: str, **variables: str) -> tuple[int, dict]:
        command = [sys.executable, "-m", "qwen3vl_bridge", "train", "--simulate-gpu", "--json", *arguments]
        variables["XDG_CACHE_HOME"] = str(cache)
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
        assert done.stdout.startswith("{"), done.stderr[-4000:]
        return done.returncode, json.loads(done.stdout)

    return run


LAYERS = 8  # of 36
TRAINED = 2_031_616 * LAYERS  # LoRA of rank 32


@pytest.mark.slow
class TestLastRank:
    @pytest.fixture(scope="class")
    def seen(self, simulate):
        words = ["--gpus", "4", "--rank", "last", f"model.num_layers={LAYERS}"]
        status, seen = simulate("--recipe", "qwen3_vl_8b_peft_config", *words)
        assert (status, seen["error"]) == (0, None)
        return seen

    def test_simulated_peak_memory_is_within_2_percent_of_planned_memory(self, seen):
        """Measured 0.999 of the plan."""
        assert seen["peak"] == pytest.approx(seen["planned"], rel=0.02)
        assert seen["peak"] <= seen["reserved"] <= H100

    def test_simulation_reports_phases_in_order(self, seen):
        names = [phase["name"] for phase in seen["phases"]]
        steps = [f"step {step}, {part}" for step in range(3) for part in ("passes", "optimizer")]
        assert names == ["model", "optimizer", *steps]

    def test_simulated_memory_by_code_line_adds_up_to_step_peak(self, seen):
        assert sum(nbytes for nbytes, *_ in seen["held"]) == pytest.approx(
            max(phase["peak"] for phase in seen["phases"] if phase["name"].startswith("step 1")), rel=0.01
        )
        (model, _, of_model), (optimizer, _, of_optimizer) = seen["held"][:2]
        assert (of_model, of_optimizer) == ("the model: weights, gradients", "optimizer states, workspaces")
        states = 12 * TRAINED / 4  # a quarter of float32 weights and two moments
        assert model == seen["phases"][0]["allocated"] and states < optimizer < states + 96 * 2**20

    def test_simulated_collectives_have_sizes_of_adapter_gradients_and_weights(self, seen):
        """Float32 gradients, bfloat16 weights."""
        assert seen["collectives"]["reduce_scatter_tensor"][1] == pytest.approx(4 * TRAINED, rel=0.01)
        assert seen["collectives"]["all_gather_into_tensor"][1] == pytest.approx(2 * TRAINED, rel=0.01)

    def test_simulated_host_syncs_are_attributed_to_lines_outside_simulation_code(self, seen):
        """The simulation adds none, and none is a copy to the host for a collective, which NCCL does not need."""
        lines = [line for *_, line in seen["syncs"]]
        assert any(line.startswith("optimizer/clip_grads.py:") for line in lines)
        assert not any(line.endswith(" sum_over_ranks") for line in lines)
        assert not any("one_rank" in line or "simulated_gpu" in line or line == "no Python line" for line in lines)


@pytest.mark.slow
def test_simulated_last_pipeline_stage_of_moe_has_no_vision_memory(simulate):
    sizes = ["model.num_layers=8", "model.pipeline_model_parallel_size=2"]
    status, seen = simulate("--recipe", "qwen3_vl_30b_a3b_sft_config", "--rank", "last", *sizes)
    assert (status, seen["error"], seen["rank"]) == (0, None, 15)
    assert seen["collectives"]["all_to_all_single"][0] > 0
    syncs = {line.partition(":")[0] for *_, line in seen["syncs"]}
    assert "moe/token_dispatcher.py" in syncs and "upstream/simulated_gpu.py" not in syncs
    assert not any("vision" in line for *_, line in seen["held"])


@pytest.mark.slow
def test_simulate_exits_with_code_1_if_gpu_is_too_small(simulate):
    status, seen = simulate("--recipe", "qwen3_vl_8b_sft_config", "--gpus", "2", "--gpu", "A100-40GB")
    assert status == 1
    assert "CUDA out of memory" in seen["error"]


@pytest.mark.slow
def test_simulate_with_data_path_uses_packed_row_of_given_data(simulate, tmp_path):
    from tests.simulation.tiny_run import make_rows  # imports transformers

    make_rows(tmp_path)
    files = ["--hf-model", str(tmp_path / "model"), "--data-path", str(tmp_path)]
    lengths = [f"{part}.seq_length=64" for part in ("dataset", "model")]
    status, seen = simulate("--recipe", "qwen3_vl_8b_peft_config", "--gpus", "1", *files, *lengths)
    assert (status, seen["error"]) == (0, None)
    assert seen["row"] == "64 tokens in 1 segments, 28 of them of images and videos"


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "last"])
@pytest.mark.parametrize("recipe", [
    "qwen3_vl_8b_sft_config", "qwen3_vl_8b_sft_fsdp_config", "qwen3_vl_30b_a3b_sft_config",
    "qwen3_vl_235b_a22b_sft_config", "qwen3_vl_8b_peft_config",
    pytest.param("qwen35_vl_27b_sft_config", marks=needs_package),
])  # fmt: skip
def test_simulated_memory_of_recipes_matches_planned_memory(simulate, recipe, rank):
    variables = {"PYTHONPATH": PYTHONPATH} if "qwen35" in recipe else {}
    status, seen = simulate("--recipe", recipe, "--rank", rank, **variables)
    assert (status, seen["error"]) == (0, None)
    # Measured 1.031 of the plan for the first rank of the 27B, which the planner underestimates.
    tolerance = 0.05 if "fsdp" in recipe else 0.035 if "qwen35" in recipe else 0.02
    assert seen["peak"] == pytest.approx(seen["planned"], rel=tolerance)
    assert seen["reserved"] <= 0.95 * H100


KEPT = [f"model.recompute_{name}=null" for name in ("granularity", "method", "num_layers")]
SHORT = ["model.num_layers=8", "dataset.seq_length=4096", "model.seq_length=4096", *KEPT]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("words", [
    ["qwen3_vl_8b_sft_config", "--gpus", "8", "mixed_precision=bf16_with_fp8_current_scaling_mixed"],
    ["qwen3_vl_8b_sft_config", "--gpus", "8", "mixed_precision=bf16_with_fp8_subchannel_scaling_mixed"],
    ["qwen3_vl_30b_a3b_pretrain_fp8_cs_config"], ["qwen3_vl_30b_a3b_pretrain_fp8_mx_config", "--gpu", "B200"],
], ids=["current scaling", "blocks", "experts", "experts, mxfp8"])  # fmt: skip
def test_simulated_memory_with_fp8_matches_planned_memory(simulate, words):
    """Measured 1.008 of the plan, with experts 1.013: GEMM workspaces, which are in the reserve."""
    status, seen = simulate("--recipe", *words, *SHORT)
    assert (status, seen["error"]) == (0, None)
    assert seen["peak"] == pytest.approx(seen["planned"], rel=0.02)


SHALLOW = [
    *("model.num_layers=8", "model.linear_attention_freq=4", "dataset.max_patches=32768"),
    *("dataset.seq_length=65536", "model.seq_length=65536"),
]
OUR_CODE = ("qwen3vl_bridge/", "common/", "core/", "models/", "training/step.py")


@pytest.mark.slow
@needs_package
def test_simulated_chunkwise_cp_memory_matches_plan_and_never_syncs(simulate):
    """The 9B with rows of 64K tokens, TP 4 and CP 16, which is above its 16 key heads. Measured 1.017 of the plan."""
    sizes = ["model.context_parallel_size=16", "--gpus", "64", *SHALLOW]
    status, seen = simulate("--recipe", "qwen35_vl_9b_sft_1m_config", *sizes, PYTHONPATH=PYTHONPATH)
    assert (status, seen["error"]) == (0, None)
    assert seen["peak"] == pytest.approx(seen["planned"], rel=0.03)
    assert not [line for *_, line in seen["syncs"] if line.startswith(OUR_CODE)]
