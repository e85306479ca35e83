"""Parts of `--simulate-gpu` that need no fake GPU: the shortened run, its rows, and the report."""

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

from qwen3vl_bridge.models.common import delta_rule
from qwen3vl_bridge.planning import from_config
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.simulation import one_rank
from qwen3vl_bridge.simulation.fake_gpu import Event
from qwen3vl_bridge.simulation.one_rank import Phase, Simulation, has_data, largest_row
from qwen3vl_bridge.upstream.simulated_gpu import flops_of_grouped_gemm

import pytest
import torch
from megatron.core import parallel_state
from qwen3vl_recipes import dry_run, qwen3_vl_8b_peft_config, qwen38_flash_next_peft_config, simulation
from qwen3vl_recipes.paths import set_paths

from tests.simulation.tiny_run import make_rows

GIB = 2**30


@pytest.mark.parametrize(("name", "counted"), [("model", True), ("step 0, passes", False), ("step 1, passes", True)])
def test_simulation_peak_excludes_first_step(name, counted):
    """The peak excludes the first step, which compiles; reserved memory does not."""
    most, others = Phase(name, 5, 9, 10, 0.0), Phase("step 2, passes", 5, 7, 8, 0.0)
    seen = Simulation(0, 1, phases=[most, others])
    assert (seen.peak, seen.reserved) == (9 if counted else 7, 10)


def test_simulation_peak_of_failed_run_is_peak_until_failure():
    phases = [Phase("model", 5, 9, 10, 0.0), Phase("step 0, passes", 5, 12, 12, 0.0), Phase("failed", 5, 70, 79, 0.0)]
    assert Simulation(0, 1, phases=phases).peak == 70


def test_stack_frame_line_ignores_parent_folders_named_like_our_package():
    """A clone of the repository has torch in a virtual environment below a folder named like our package."""
    upstream = Path(parallel_state.__file__)
    files = ["/home/qwen3vl_bridge/.venv/lib/site-packages/torch/nn/functional.py", str(upstream)]
    frames = [{"filename": file, "line": 7, "name": "forward"} for file in files]
    assert one_rank._line(frames) == "core/parallel_state.py:7 forward"
    assert one_rank._line(frames[:1]) == "nn/functional.py:7 forward"


def test_count_launches_counts_flops_of_grouped_gemm_once():
    """FLOPs come from marks if one kernel computes all experts, and from GEMMs if there is one per expert."""

    def event(kind: str, name: str, amount: int = 0) -> Event:
        return Event(kind, name, amount, 0)

    begin, end = event("mark", f"{one_rank._GROUPED_GEMM}{700}"), event("mark", one_rank._GROUPED_GEMM_END)
    kernel, single = event("kernel", "GemmUniversal"), event("gemm", "cublasLtMatmul bfloat16 8 8 8 1", 350)
    report = Simulation(0, 1)
    one_rank._count_launches([single, begin, kernel, end, begin, single, single, end, begin, kernel, end], report)
    assert report.launches == {"kernel": (2, 0), "gemm": (3, 3 * 350 + 2 * 700)}


@pytest.mark.parametrize("transposed", [(True, False), (False, False), (False, True)])
def test_flops_of_grouped_gemm_equal_sum_over_experts(transposed):
    """Transpositions for outputs, gradients of inputs and gradients of weights."""
    tokens, (n, k) = [3, 0, 5], (4, 6)
    x, y, weight = [torch.empty(t, k) for t in tokens], [torch.empty(t, n) for t in tokens], [torch.empty(n, k)] * 3
    first, second = {(True, False): (weight, x), (False, False): (weight, y), (False, True): (x, y)}[transposed]
    found = flops_of_grouped_gemm(first, transposed[0], second, transposed[1], "more")
    assert found == 2 * sum(tokens) * n * k


@pytest.mark.parametrize(
    ("replicas_last", "stages"), [(False, [0, 0, 0, 0, 1, 1, 1, 1]), (True, [0, 0, 1, 1, 0, 0, 1, 1])]
)
def test_find_stage_matches_megatron_core_rank_generator(replicas_last, stages):
    """Compare with megatron-core's RankGenerator, with and without `use_tp_pp_dp_mapping`."""
    plan = SimpleNamespace(
        layout=ParallelLayout(8, tp=2, pp=2), stages=[SimpleNamespace(stage=stage) for stage in range(2)]
    )
    assert [simulation.find_stage(plan, rank, replicas_last=replicas_last).stage for rank in range(8)] == stages
    order = "tp-cp-ep-pp-dp" if replicas_last else "tp-cp-ep-dp-pp"
    ranks = parallel_state.RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order=order).get_ranks("pp")
    assert all([stages[rank] for rank in group] == [0, 1] for group in ranks)


@pytest.mark.parametrize(("reserved", "status"), [(35.2, 0), (35.4, 1), (38.37, 1)])
def test_simulation_exits_with_code_1_if_too_little_memory_is_free(
    reserved, status, tmp_path, monkeypatch, caplog, capsys
):
    """An A100-40GB has 39.3 GiB, of which 4 are reserved. Hints about the configuration are logged once."""
    seen = Simulation(0, 8, phases=[Phase("step 1, passes", 0, 0, round(reserved * GIB), 0.0)])
    model = dict(transformer_impl="local", num_moe_experts=None, fp8=None, init_model_with_meta_device=False)
    cfg = SimpleNamespace(model=SimpleNamespace(**model), dataset=None)

    def log_hints_and_return(result):
        return lambda *_, **__: [delta_rule.check_package(), result][1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no flash-linear-attention
    caplog.set_level(logging.WARNING, delta_rule.__name__)
    monkeypatch.setenv("FAKE_GPU_LOG", str(tmp_path / "simulation" / "log"))
    monkeypatch.setattr(one_rank, "simulate_rank", log_hints_and_return(seen))
    monkeypatch.setattr(dry_run, "finalize_copy", log_hints_and_return(cfg))
    monkeypatch.setattr(from_config, "estimate_run", Mock(side_effect=ValueError("none")))
    found = simulation.run(cfg, rank=0, gpus=8, gpu="A100-40GB", as_json=False, verbose=True)
    said, before = capsys.readouterr()
    assert "similar simulations took up to 2 GiB of host memory and about a minute" in before
    assert found == status and f"of 39.3 GiB: {39.3 - reserved:.2f} are free" in said
    assert ("would probably fail: CUDA's context, NCCL" in said) == bool(status)
    assert "Transformer Engine, its layers run instead" in said
    assert caplog.text.count("are many times slower and need much more memory") == 1


@pytest.mark.parametrize(("full", "compared"), [(True, ": 0.500"), (False, "; planned for rows full of images")])
def test_simulation_report_compares_plan_only_if_packed_rows_are_full(full, compared, capsys):
    seen = Simulation(0, 1, phases=[Phase("step 1, passes", 0, 4 * GIB, 4 * GIB, 0.0)])
    simulation._print(seen, 8 * GIB, "transformer_engine", 40 * GIB, rows_are_full=full)
    assert f"planned 8.00 GiB without reserve, allocated 4.00{compared}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("settings", [
    {"scheduler.lr_warmup_iters": 0, "scheduler.lr_warmup_fraction": 0.03},
    {"scheduler.lr_decay_style": "WSD", "scheduler.lr_wsd_decay_iters": 10},
    {"train.train_iters": None, "train.train_samples": 6400, "scheduler.lr_warmup_iters": 0},
    {"train.exit_interval": 2, "train.exit_duration_in_mins": 0},
    {"checkpoint.save": "run", "checkpoint.async_save": True},
    {"checkpoint.load": "run", "checkpoint.ckpt_step": 100},
    {"logger.wandb_project": "p", "logger.wandb_exp_name": "n", "logger.mlflow_experiment": "m"},
])  # fmt: skip
def test_shortened_simulation_config_runs_three_steps_and_saves_nothing(settings):
    cfg = qwen3_vl_8b_peft_config()
    for path, value in settings.items():
        part, name = path.split(".")
        setattr(getattr(cfg, part), name, value)
    one_rank._shorten(cfg, 8)
    cfg = dry_run.finalize_copy(cfg, 8)
    assert cfg.train.train_iters == one_rank.STEPS
    assert not any((cfg.train.exit_interval, cfg.train.exit_duration_in_mins, cfg.checkpoint.save, cfg.checkpoint.load))
    assert not any((cfg.logger.wandb_project, cfg.logger.mlflow_experiment, cfg.logger.tensorboard_dir))


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize(("length", "patches", "images"), [(8192, None, 8), (8192, 24, 6), (32, None, 4), (8, 4, 1)])
def test_full_row_returns_packed_row_with_images_for_any_length(length, patches, images):
    cfg = qwen3_vl_8b_peft_config()
    cfg.dataset.seq_length = cfg.model.seq_length = length
    cfg.dataset.max_patches = patches
    row = one_rank.full_row(dry_run.finalize_copy(cfg, 1))
    assert row.input_ids.shape == (1, length) and sum(map(bool, row.layout.lengths)) == images
    assert len(row.vision.pixel_values) <= (patches or 4 * length)


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize(("length", "longest"), [(8192, 8192), (16384, 16384), (32768, 4096)])
def test_full_row_for_sparse_attention_has_segment_longer_than_budget(length, longest):
    """With 16,384 tokens, segments of one image would have as many tokens as the budget, 2,048."""
    cfg = qwen38_flash_next_peft_config()
    cfg.dataset.seq_length = cfg.model.seq_length = length
    assert max(one_rank.full_row(dry_run.finalize_copy(cfg, 8)).layout.lengths) == longest


def test_largest_row_returns_data_row_with_most_patches(tmp_path):
    make_rows(tmp_path)
    cfg = set_paths(qwen3_vl_8b_peft_config(), hf_path=tmp_path / "model", data_path=tmp_path)
    cfg.dataset.seq_length = 64
    row = largest_row(cfg)
    assert has_data(cfg) and not has_data(qwen3_vl_8b_peft_config())
    assert row.input_ids.shape == (1, 64) and len(row.vision.pixel_values) == 4 * 28


SIZES = dict(
    seq_length=64, hidden_size=8, context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True
)


@pytest.mark.parametrize(("settings", "shape"), [
    (dict(), (16, 1, 8)),
    (dict(trains_mtp=True), (32, 1, 8)),  # next tokens after tokens
    (dict(hc_count=4), (16, 1, 32)),
    (dict(hc_count=4, trains_mtp=True), (16, 1, 40)),  # next tokens beside streams
])  # fmt: skip
def test_assume_lengths_sets_tensor_shape_between_pipeline_stages(monkeypatch, settings, shape):
    seen = []
    monkeypatch.setattr(one_rank.simulated_gpu, "receive_shape", seen.append)
    monkeypatch.setattr(one_rank.NgramEmbedding, "exchanged_tokens", None)  # put back after the test
    one_rank._assume_lengths(SimpleNamespace(**SIZES | settings))
    assert seen == [shape]


def test_simulate_rank_raises_for_deepstack_with_variable_seq_lengths(tmp_path):
    cfg = qwen3_vl_8b_peft_config()
    cfg.model.variable_seq_lengths = True
    with pytest.raises(ValueError, match="how many DeepStack features"):
        one_rank.simulate_rank(cfg, rank=0, world=8, log=tmp_path / "log")
