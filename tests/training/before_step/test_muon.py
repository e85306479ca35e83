"""Muon orthogonalises the matrices that layers have, not those of other head sizes; what it cannot do is refused."""

from __future__ import annotations

import functools
import json
import re

from qwen3vl_bridge.training import run_refusals

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_attr_wrapped_model

from tests.forked import run_ranks
from tests.steps import set_up

from ..conftest import losses
from ..running import replicated, stored, train
from .muon_on_ranks import CASES, LAYER_WISE
from .muon_reference import train_with_muon

pytest.importorskip("emerging_optimizers")

# The largest error of a weight in units of what another order of summation makes; measured 1.7 to 6.5. Matrices that
# are split at other rows or not at all give 5e4 and more.
NOISES = 100
# In bfloat16, of all weights; measured 1.0e-2 after steps of 0.7 of a weight's norm.
HALF_WEIGHT = 0.1


@pytest.fixture(scope="module")
def models(folders, untied_folder):
    return {
        "dense": untied_folder, "MoE": folders["qwen3_vl", "moe"], "Qwen3.5": folders["qwen3_5", "dense"],
        "Qwen3.5 MoE": folders["qwen3_5", "moe"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def references(models):
    """Steps of transformers, and the error that another order of summation makes."""
    references = {name: train_with_muon(folder) for name, folder in models.items()}
    again = {name: train_with_muon(folder, last_first=True)["after"] for name, folder in models.items()}
    return {name: (steps, worst_movement(again[name], **steps)) for name, steps in references.items()}


def worst_movement(found, *, before, after):
    assert found.keys() == after.keys(), found.keys() ^ after.keys()
    return max(((found[name] - after[name]).norm() / (after[name] - before[name]).norm()).item() for name in after)


@pytest.fixture(scope="module")
def trained_on(models, tmp_path_factory):
    """Weights of split models after their steps, by case, on a number of ranks."""
    folders = json.dumps({name: str(folder) for name, folder in models.items()})

    @functools.cache
    def trained(ranks):
        output = tmp_path_factory.mktemp("muon") / "weights.pt"
        run_ranks("tests.training.before_step.muon_on_ranks", ranks, output, folders)
        return torch.load(output)

    return trained


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_steps_equal_those_of_the_matrices_of_transformers(trained_on, references, ranks):
    for case in CASES[ranks]:
        steps, noise = references[case[0]]
        error = worst_movement(trained_on(ranks)[case], **steps)
        assert error <= NOISES * noise, (case, error, noise)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "split"), LAYER_WISE)
def test_a_rank_for_each_matrix_makes_the_same_steps(trained_on, references, model, split):
    before = references[model][0]["before"]
    whole, layers = (trained_on(2)[model, split, name] for name in ("muon", "dist_muon"))
    error, moved = (
        torch.stack([(whole[name].float() - other[name].float()).norm() for name in whole]).norm()
        for other in (layers, before)
    )
    assert error <= HALF_WEIGHT * moved, (error / moved).item()


def test_a_resumed_run_is_the_whole(inputs, tmp_path):
    def config(save):
        return replicated(inputs, save, distributed=False, optimizer__optimizer="muon", checkpoint__save_interval=2)

    whole = train(config(tmp_path / "whole"), stop_after=4)
    pieces = [entry for _ in range(2) for entry in train(config(tmp_path / "pieces"), stop_after=2)]
    assert losses(pieces) == losses(whole)
    found, expected = stored(tmp_path / "pieces"), stored(tmp_path / "whole")
    assert any("momentum_buffer" in name for name in expected)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(ddp__use_distributed_optimizer=True), "ddp.use_distributed_optimizer is True with optimizer.optimizer"),
        (dict(optimizer__use_distributed_optimizer=True), "optimizer.use_distributed_optimizer is True"),
        (dict(ddp__use_megatron_fsdp=True), "ddp.use_megatron_fsdp is True"),
        (dict(optimizer__optimizer_cpu_offload=True), "optimizer.optimizer_cpu_offload is True"),
        (dict(optimizer__optimizer="dist_muon"), "optimizer.bf16 is False with optimizer.optimizer 'dist_muon'"),
        (dict(optimizer__use_layer_wise_distributed_optimizer=True), "optimizer.bf16 is False"),
        (dict(optimizer__optimizer="soap"), "optimizer.optimizer is 'soap', expected 'adam', 'sgd', 'lion', 'muon'"),
    ],
)
def test_what_would_step_wrong_gradients_or_fail_later_is_refused(inputs, settings, message):
    cfg = replicated(inputs, None, distributed=False, optimizer__optimizer="muon")
    for name, value in settings.items():
        section, _, field = name.partition("__")
        setattr(getattr(cfg, section), field, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        cfg.validate()


def test_a_missing_package_is_named_before_the_model_is_built(inputs, monkeypatch):
    monkeypatch.setattr(run_refusals, "HAVE_EMERGING_OPTIMIZERS", False)
    cfg = replicated(inputs, None, distributed=False, optimizer__optimizer="muon")
    with pytest.raises(ModuleNotFoundError, match=r"optimizer is 'muon', .*: pip install emerging-optimizers"):
        cfg.validate()


def test_scripts_with_other_configurations_are_refused_parts_of_gradients(inputs):
    run = set_up(replicated(inputs, None, distributed=True), data=False)
    config = OptimizerConfig(optimizer="muon", lr=1e-3)
    with pytest.raises(ValueError, match="use_distributed_optimizer is True with optimizer 'muon', expected False"):
        get_megatron_optimizer(config, run.model, pg_collection=run.groups)


def test_a_part_of_a_query_group_is_refused(inputs):
    run = set_up(replicated(inputs, None, distributed=False), data=False)
    config = OptimizerConfig(optimizer="muon", lr=1e-3)
    projection = get_attr_wrapped_model(run.model[0], "language_model").decoder.layers[1].self_attention.linear_qkv
    projection.weight = torch.nn.Parameter(projection.weight[: len(projection.weight) // 4])  # as on four ranks
    with pytest.raises(ValueError, match=r"layers\.1\.self_attention has 64 rows on this rank, expected a multiple of"):
        get_megatron_optimizer(config, run.model, pg_collection=run.groups)
