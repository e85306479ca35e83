"""Vision on ranks of its own: together both kinds hold what one would, and what cannot be is refused."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

from qwen3vl_bridge.cli.plan import main
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.estimate import VISION_CHUNK, estimate
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.planning.model_states import chunk_count
from qwen3vl_bridge.planning.proposals import propose
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import FULL, Recompute, Sharding, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Part

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forked import ROOT

H100 = GPUS["H100"]
ROWS = TrainingSettings(seq_length=8192, max_patches=27205, global_batch_size=96)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_parameter_is_on_one_side(name):
    dims = dimensions_of(presets.config_dict(name))
    ((chunk,),) = ModelSplit(1, vision=False).chunks(len(dims.indices["text_layers"]))
    vision, language = (chunk_count(dims, ModelSplit(1), side) for side in (VISION_CHUNK, chunk))
    assert vision.total + language.total == presets.parameter_count(name)
    assert vision.language_model == vision.experts == language.vision_model == language.vision_projection == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(presets.PRESETS)),
    st.frozensets(st.sampled_from(list(Part)), max_size=2),
    st.sampled_from([Recompute(), FULL]),
    st.sampled_from([Recompute(), FULL]),
)
def test_both_sides_hold_what_one_rank_would(name, parts, recompute, vision_recompute):
    config, sent = presets.config_dict(name), "sent between towers"
    training = replace(
        ROWS, global_batch_size=1, frozen=parts, recompute=recompute, vision_recompute=vision_recompute,
        sharding=Sharding.NONE,
    )  # fmt: skip
    (together,) = estimate(config, ModelSplit(1), training).stages
    vision, language = estimate(config, ModelSplit(1), training, vision_split=ModelSplit(1)).stages
    for module, nbytes in together.activations.items():
        both = vision.activations.get(module, 0) + language.activations.get(module, 0)
        assert both == pytest.approx(nbytes), module
    assert vision.states.total + language.states.total == pytest.approx(together.states.total)
    hidden = config["text_config"]["hidden_size"]
    assert vision.activations[sent] == language.activations[sent] == (27205 / 4) * 4 * hidden * 2


@pytest.mark.parametrize(("vision", "share"), [(1, 4), (2, 2), (4, 1), (8, 1 / 2)])
def test_a_vision_rank_encodes_for_all_replicas_that_it_serves(vision, share):
    """One microbatch more than the first stage is in flight, unless the step has fewer."""
    config = presets.config_dict("2B")
    equal, *_ = estimate(config, ModelSplit(8, pp=2), ROWS, vision_split=ModelSplit(4)).stages
    stage, *_ = estimate(config, ModelSplit(8, pp=2), ROWS, vision_split=ModelSplit(vision)).stages
    assert stage.in_flight == (3,)
    assert stage.activations == pytest.approx({module: share * each for module, each in equal.activations.items()})
    short, *_ = estimate(
        config, ModelSplit(8, pp=2), replace(ROWS, global_batch_size=8), vision_split=ModelSplit(4)
    ).stages
    assert short.in_flight == (2,)


@pytest.mark.parametrize(("name", "gpus", "vision"), [("2B", 8, 2), ("8B", 16, 4), ("30B-A3B", 32, 8)])
def test_proposals_fit(name, gpus, vision):
    config, vision_split = presets.config_dict(name), ModelSplit(vision)
    proposals = propose(dimensions_of(config), gpus, H100, ROWS, vision_split=vision_split)
    assert proposals
    for proposal in proposals:
        split = replace(proposal.split, vision=True)
        assert proposal == estimate(config, split, proposal.training, vision_split=vision_split)
        assert split.world == gpus - vision and split.cp == 1 and proposal.training.sharding is Sharding.OPTIMIZER
        assert proposal.peak.total <= 0.95 * H100.memory_bytes
    ranks = [proposal.split.tp * proposal.split.pp for proposal in proposals]
    assert ranks == sorted(ranks)
    with pytest.raises(ValueError, match=f"{gpus} vision ranks, expected fewer than all GPUs"):
        propose(dimensions_of(config), gpus, H100, ROWS, vision_split=ModelSplit(gpus))


REFUSED = {
    "replicas": (dict(world=4), ModelSplit(6), {}, "4 data-parallel replicas and the language model 6"),
    "context": (dict(world=2), ModelSplit(2, cp=2), {}, "cp is 2 and vpp None, expected neither"),
    "interleaved": (dict(world=2), ModelSplit(2, pp=2, vpp=2), {}, "cp is 1 and vpp 2, expected neither"),
    "sharded": (dict(world=2), ModelSplit(2), dict(sharding=Sharding.ALL), "sharding is optim_grads_params"),
    "heads": (dict(world=32, tp=32), ModelSplit(2), {}, "vision_config.num_heads is 16"),
    "layers": (dict(world=2), ModelSplit(5, pp=5), {}, "28 layers for 5 pipeline stages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    vision, split, changed, message = REFUSED[case]
    training = replace(ROWS, global_batch_size=None, **changed)
    with pytest.raises(ValueError, match=message):
        estimate(presets.config_dict("2B"), split, training, vision_split=ModelSplit(**vision))


def test_the_pages_part_of_the_flops(capsys):
    (block,) = re.findall(
        r"```python\n([^`]*tower_costs.*?)```", (ROOT / "docs" / "dist_train.md").read_text(), re.DOTALL
    )
    exec(block)
    assert capsys.readouterr().out.strip() == block.rsplit("# ", 1)[1].strip()


RUN = ["--model", "8B", "--gpus", "16", "--seq-length", "8192", "--max-patches", "27205"]


def run(capsys, *arguments: str) -> dict:
    assert main([*RUN, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_settings_are_megatron_bridges(capsys):
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig

    plan = run(capsys, "--tp", "2", "--recompute", "full", "--vision-gpus", "8", "--vision-tp", "2")
    assert plan["dist_train"].keys() <= {field.name for field in fields(DistTrainConfig)}
    assert plan["dist_train"] == {
        "use_dist_train": True,
        "vision_world_size": 8,
        "language_world_size": 8,
        "vision_tensor_model_parallel_size": 2,
        "vision_pipeline_model_parallel_size": 1,
        "vision_context_parallel_size": 1,
        "vision_to_llm_dp_ratio": 1,
    }
    assert [stage["stage"] for stage in plan["stages"]] == [-1, 0]
    few = run(capsys, "--tp", "1", "--recompute", "full", "--vision-recompute", "full", "--vision-gpus", "4",
              "--vision-tp", "2", "--no-distributed-optimizer", "--gpu-memory", "200")  # fmt: skip
    assert few["dist_train"]["vision_to_llm_dp_ratio"] is None  # six language replicas for each


def test_both_kinds_of_ranks_are_printed(capsys):
    assert main([*RUN, "--vision-gpus", "4"]) == 0
    assert "4 vision + " in capsys.readouterr().out
    assert main([*RUN, "--vision-gpus", "8", "--vision-tp", "2", "--tp", "2", "--recompute", "full"]) == 0
    printed = capsys.readouterr().out
    assert "8 vision (TP 2) + TP 2, SP, DP 4" in printed and "vision ranks" in printed and "language ranks" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vision-gpus", "4", "--fsdp", "--tp", "2"], "Megatron-FSDP does not support pipeline stages"),
        (["--vision-gpus", "4", "--cp", "2"], "cp is 2"),
        (["--vision-gpus", "4", "--propose", "--recompute", "full"], "--propose chooses recomputation"),
        (["--vision-gpus", "4", "--tp", "16"], "12 GPUs, expected a multiple of tp"),
        (["--vision-gpus", "16"], "--vision-gpus is 16, expected fewer than --gpus, 16"),
        (["--vision-gpus", "4", "--vision-tp", "3"], "4 GPUs, expected a multiple of tp"),
        (["--tp", "2", "--vision-tp", "2"], "--vision-tp without --vision-gpus"),
    ],
)
def test_bad_input(capsys, arguments, message):
    assert main([*RUN, *arguments]) == 2
    assert message in capsys.readouterr().err
