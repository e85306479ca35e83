"""Vision on ranks of its own: together both kinds hold and do what one would, and the rule is what it says it is."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from qwen3vl_bridge.cli.plan import main
from qwen3vl_bridge.models.common.flops import Trained, tower_costs
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.encoder_ranks import TOWER, DistSplit, dist_estimate
from qwen3vl_bridge.planning.encoder_sizing import measure, size
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.planning.memory.estimate import estimate_of
from qwen3vl_bridge.planning.memory.parameters import chunk_count
from qwen3vl_bridge.planning.settings import FULL, Lora, Recompute, Sharding, Training
from qwen3vl_bridge.planning.speed.microbatch_flops import Costs, language_operations, tower_operations
from qwen3vl_bridge.planning.speed.stage_times import PUBLISHED
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.model_parts import Part

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

H100 = GPUS["H100"]
ROWS = Training(seq_length=8192, max_patches=27205, global_batch_size=96)
sizes = st.sampled_from(list(presets.PRESETS))
frozen = st.frozensets(st.sampled_from(list(Part)), max_size=2)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_parameter_is_on_one_side(name):
    n = dimensions_of(presets.config_dict(name))
    ((chunk,),) = Split(1, tower=False).chunks(len(n.indices["text_layers"]))
    tower, language = chunk_count(n, Split(1), TOWER), chunk_count(n, Split(1), chunk)
    assert tower.total + language.total == presets.parameter_count(name)
    assert tower.language_model == tower.experts == language.vision_model == language.vision_projection == 0


@settings(max_examples=60, deadline=None)
@given(sizes, frozen, st.sampled_from([Recompute(), FULL]), st.sampled_from([Recompute(), FULL]))
def test_both_sides_keep_what_one_rank_would(name, parts, recompute, vision_recompute):
    """And on both what is sent."""
    config, payload = presets.config_dict(name), "sent between towers"
    n, chosen = dimensions_of(config), config["text_config"].get("num_experts_per_tok") or 0
    training = replace(
        ROWS, global_batch_size=1, frozen=parts, recompute=recompute, vision_recompute=vision_recompute,
        sharding=Sharding.NONE,
    )  # fmt: skip
    whole = estimate_of(n, Split(1), training, chosen).stages[0]
    vision, language = dist_estimate(n, DistSplit.of(1, 1, Split(1)), training, chosen).stages
    for part in whole.activations:
        both = vision.activations.get(part, 0) + language.activations.get(part, 0)
        assert both == pytest.approx(whole.activations[part]), part
    assert vision.states.total + language.states.total == pytest.approx(whole.states.total)
    assert vision.activations[payload] == language.activations[payload] == (27205 / 4) * 4 * n["hidden"] * 2


@settings(max_examples=100, deadline=None)
@given(sizes, frozen, st.none() | st.integers(1, 64), st.sampled_from([1, 2, 4]))
def test_operations_of_all_stages_are_those_of_a_step(name, parts, rank, pp):
    """As `models/common/flops.py` has them, which was compared with what torch counts."""
    config = presets.config_dict(name)
    n, training = dimensions_of(config), replace(ROWS, frozen=parts, lora=rank and Lora(rank))
    as_layer = bool(len(n.indices["text_layers"]) % pp)
    split = Split(pp, pp=pp, tower=False, embedding_as_layer=as_layer, loss_as_layer=as_layer)
    amounts = dict(tokens=8192, token_pairs=2e7, patches=20000, patch_pairs=6e7)
    costs = Costs.of(config, training)
    stages, tower = language_operations(costs, n, split, training), tower_operations(costs, training)

    def total(way):
        language = sum(getattr(one, way).of(8192, 2e7) for one in stages)
        return language + getattr(tower, way).of(20000, 6e7)

    if rank:
        text = lambda layer: rank if layer.startswith("language_model.") and ".experts." not in layer else 0  # noqa: E731
        step = tower_costs(config, Trained(False, False, False, text))
    else:
        step = tower_costs(config, Trained(**{part.value: part not in parts for part in Part}))
    assert total("forward") == pytest.approx(tower_costs(config).of_many(**amounts))
    assert total("forward") + total("backward") == pytest.approx(step.of_many(**amounts))


def test_the_formula_by_hand():
    """Without tensor parallelism and stages nothing is sent within a tower: operations alone, at one rate."""
    config = presets.config_dict("2B")
    n, costs = dimensions_of(config), Costs.of(config, ROWS)
    split = DistSplit.of(4, 1, Split(8, tower=False))
    found = measure(costs, n, split, ROWS, H100)
    patches = 2.85 * 8192
    step = costs.step
    tower = (step.patch * patches + step.patch_pair * patches * 3470) / (0.45 * 989e12)
    text = (step.token * 8192 + step.token_pair * 8192 * 2400) / (0.45 * 989e12)
    # Half of 50 GB/s, there and back; four rows of features for each token, of four patches.
    sent = 2 * patches / 4 * 4 * n["hidden"] * 2 / 25e9
    assert found.language == pytest.approx([text + sent])
    assert found.needed == pytest.approx(8 * tower / (text + sent))
    assert found.vision == pytest.approx(2 * (tower + sent))  # each serves two
    assert found.seconds_per_row * 96 == pytest.approx(11 * max(found.vision, text + sent) + found.vision + text + sent
                                                       + found.data)  # fmt: skip


def test_a_group_has_no_less_than_a_frame():
    config = presets.config_dict("8B")
    n, costs = dimensions_of(config), Costs.of(config, ROWS)
    times = [measure(costs, n, DistSplit.of(k, 1, Split(2, tp=2, sequence_parallel=True)), ROWS, H100).vision
             for k in (1, 2, 4, 8)]  # fmt: skip
    assert times[0] > times[1] > times[2] == times[3]
    frozen_tower = replace(ROWS, frozen=frozenset({Part.VISION_MODEL, Part.VISION_PROJECTION}))
    split = DistSplit.of(1, 1, Split(2, tp=2, sequence_parallel=True))
    found = measure(Costs.of(config, frozen_tower), n, split, frozen_tower, H100)
    assert found.vision < times[0] / 2.8  # neither a backward pass nor gradients to receive


@pytest.mark.parametrize(
    ("name", "gpus", "language"),
    [
        ("8B", 24, Split(2, tp=2, sequence_parallel=True)),
        ("30B-A3B", 32, Split(4, tp=2, pp=2, ep=2, sequence_parallel=True)),
    ],
)
def test_the_rule_is_the_best_of_all_that_keep_up(name, gpus, language):
    """Every number of vision ranks, at every tensor parallelism."""
    config = presets.config_dict(name)
    n, training = dimensions_of(config), replace(ROWS, recompute=FULL, vision_recompute=FULL)
    best = []
    for vision in range(1, gpus):
        for tp in (1, 2, 4, 8):
            try:
                split = DistSplit.of(vision, tp, replace(language, world=gpus - vision))
                split.check(n, training)
            except ValueError:
                continue
            one = measure(Costs.of(config, training), n, split, training, H100)
            if one.vision <= max(one.language):
                assert vision >= one.needed
                best.append(one)
    found = size(config, gpus, H100, training, language=language)
    assert found[0].sized == min(best, key=lambda one: (round(one.seconds_per_row, 9), one.split.vision.world))
    assert (
        len({one.split.replicas.language_per_encoder for one in best} | {-one.split.replicas.encoders for one in best})
        > 2
    )  # both ways


@pytest.mark.parametrize(("name", "gpus"), [("2B", 8), ("8B", 16), ("30B-A3B", 24)])
def test_sizes_fit_and_keep_up(name, gpus):
    found = size(presets.config_dict(name), gpus, H100, ROWS)
    assert found
    for one in found:
        split, sized = one.sized.split, one.sized
        assert split.world == gpus and sized.needed <= split.vision.world
        assert not split.vision.dp % split.language.dp or not split.language.dp % split.vision.dp
        assert one.estimate.worst.total <= 0.95 * H100.memory_bytes
        assert one.estimate.stages[0].in_flight == (min(split.language.pp + 1, 96 // split.language.dp),)
    steps = [one.sized.seconds_per_row for one in found]
    assert steps == sorted(steps)


def test_more_pictures_want_more_ranks():
    config = presets.config_dict("30B-A3B")
    n, costs = dimensions_of(config), Costs.of(config, ROWS)
    split = DistSplit.of(8, 1, Split(24, tp=2, pp=3, sequence_parallel=True))
    few, many = (
        measure(costs, n, split, replace(ROWS, max_patches=None), H100, replace(PUBLISHED, patches=patches)).needed
        for patches in (1.0, 3.0)
    )
    assert many > 2.5 * few


REFUSED = {
    "replicas": (dict(vision=4), Split(6), {}, "4 data-parallel replicas and the language model 6"),
    "context": (dict(vision=2), Split(2, cp=2), {}, "cp is 2 and vpp None, expected neither"),
    "interleaved": (dict(vision=2), Split(2, pp=2, vpp=2), {}, "cp is 1 and vpp 2, expected neither"),
    "sharded": (dict(vision=2), Split(2), dict(sharding=Sharding.ALL), "sharding is optim_grads_params"),
    "heads": (dict(vision=32, vision_tp=32), Split(2), {}, "vision_config.num_heads is 16"),
    "layers": (dict(vision=2), Split(5, pp=5), {}, "28 layers for 5 pipeline stages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    vision, language, changed, message = REFUSED[case]
    n = dimensions_of(presets.config_dict("2B"))
    with pytest.raises(ValueError, match=message):
        split = DistSplit.of(vision["vision"], vision.get("vision_tp", 1), language)
        dist_estimate(n, split, replace(ROWS, global_batch_size=None, **changed), 0)


RUN = ["--model", "8B", "--gpus", "16", "--seq-length", "8192", "--max-patches", "27205", "--dist-train"]


def answer(capsys, *arguments: str) -> list[dict]:
    assert main([*RUN, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_settings_are_megatron_bridges(capsys):
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig

    (found, *_) = answer(capsys, "--tp", "2", "--recompute", "full", "--vision-gpus", "8", "--vision-tp", "2")
    assert found["dist_train"].keys() <= {field.name for field in fields(DistTrainConfig)}
    assert found["dist_train"] == {
        "use_dist_train": True,
        "vision_world_size": 8,
        "language_world_size": 8,
        "vision_tensor_model_parallel_size": 2,
        "vision_pipeline_model_parallel_size": 1,
        "vision_context_parallel_size": 1,
        "vision_to_llm_dp_ratio": 1,
    }
    assert [stage["stage"] for stage in found["stages"]] == [-1, 0]
    few = answer(capsys, "--tp", "1", "--recompute", "full", "--vision-recompute", "full", "--vision-gpus", "4",
                 "--vision-tp", "2", "--no-distributed-optimizer", "--gpu-memory", "200")  # fmt: skip
    assert few[0]["dist_train"]["vision_to_llm_dp_ratio"] is None  # six language replicas for each


def test_options_reach_the_rule(capsys):
    given = ("--tp", "2", "--vision-gpus", "8", "--vision-tp", "1")
    plain = answer(capsys, *given)[0]
    for option, factor in (("--patches-per-token", 0.9), ("--patches-per-frame", 0.9), ("--largest-frame", 3)):
        name = {"--patches-per-token": "patches", "--patches-per-frame": "frame", "--largest-frame": "largest"}[option]
        found = answer(capsys, *given, option, str(getattr(PUBLISHED, name) * factor))[0]
        assert (found["vision_seconds"] > plain["vision_seconds"]) == (factor > 1), option
    assert main([*RUN]) == 0
    printed = capsys.readouterr().out
    assert "cfg.model.dist_train.vision_world_size = " in printed and "vision ranks" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fsdp", "--tp", "2"], "Megatron-FSDP does not support pipeline stages"),
        (["--cp", "2"], "cp is 2"),
        (["--propose", "--recompute", "full"], "--propose chooses sharding"),
        (["--tp", "2", "--patches-per-token", "0"], "patches of the mix is 0.0"),
        (["--tp", "16"], "no number of vision ranks"),
    ],
)
def test_bad_input(capsys, arguments, message):
    assert main([*RUN, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_only_dist_train_reads_is_refused_without(capsys):
    assert main([*RUN[:-1], "--tp", "2", "--vision-gpus", "4", "--largest-frame", "9"]) == 2
    assert "--vision-gpus, --largest-frame without --dist-train" in capsys.readouterr().err


def test_no_tower_that_keeps_up(capsys):
    assert main([*RUN, "--tp", "8", "--pp", "1", "--gpus", "9"]) == 1
    assert "nothing fits together with a vision tower that keeps up" in capsys.readouterr().out
