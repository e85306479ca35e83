"""`qwen3vl plan`: estimates, proposals, separate vision ranks, run configurations, invalid input."""

import json
import re
from dataclasses import fields, replace

from qwen3vl_bridge import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.cli.plan import main
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.estimate import VISION_CHUNK, estimate
from qwen3vl_bridge.planning.from_config import estimate_run, propose_for_run
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.planning.model_states import count_parameters
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.proposals import MARGIN, propose
from qwen3vl_bridge.planning.training_settings import (
    BF16,
    FP32,
    FULL,
    LINEAR_LAYERS,
    LoraSettings,
    Precision,
    Recompute,
    Sharding,
    TrainingSettings,
)
from qwen3vl_bridge.registry import dimensions_of, nearest_name, preset
from qwen3vl_bridge.weights.rows import Component

import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.bridge import AutoBridge
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.mixed_precision import bf16_mixed
from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
from qwen3vl_recipes.paths import set_paths

RUN = ["--model", "8B", "--gpus", "16", "--seq-length", "8192", "--max-patches", "8192", "--global-batch-size", "32"]


def run(capsys, *arguments: str) -> tuple[int, dict | list]:
    status = main([*RUN, *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_plan_json_memory_kinds_of_stage_add_up_to_its_total(capsys):
    status, found = run(capsys, "--tp", "2", "--pp", "2")
    assert status == 0 and found["fits"]
    assert found["parallel_layout"]["sequence_parallel"] and found["parallel_layout"]["dp"] == 4
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]
    first = found["stages"][0]
    kinds = ("parameters", "gradients", "optimizer", "gathered", "temporary", "reserve")
    assert found["total"] == max(stage["total"] for stage in found["stages"])
    sum_of_kinds = sum(first[kind] for kind in kinds) + sum(first["activations"].values())
    assert first["total"] == pytest.approx(sum_of_kinds, abs=10)


def test_plan_for_too_small_gpu_exits_with_code_1(capsys):
    status, found = run(capsys, "--tp", "1", "--gpu", "A100-40GB")
    assert status == 1 and not found["fits"]
    assert main([*RUN, "--tp", "1", "--gpu-memory", "200"]) == 0
    assert "fits: " in capsys.readouterr().out


def test_plan_command_does_not_propose_layout_that_fits_only_without_margin(capsys):
    """The proposals exclude a layout that fits only without the margin, and their table states the limit."""
    rows = ["--model", "30B-A3B", "--gpus", "16", "--seq-length", "8192", "--gpu-memory", "55"]
    words = [*rows, "--ep", "8", "--pp", "2"]
    assert main([*words, "--recompute", "full", "--vision-recompute", "full"]) == 0
    assert "fits with less than 5 % to spare: 54.0 GiB on stage 0, of 55.0 GiB" in capsys.readouterr().out
    main([*words, "--propose"])
    said = " ".join(capsys.readouterr().out.split())
    assert "into 52.2 of 55.0 GiB (5 % left free)" in said and "54.0" not in said


def test_plan_with_fsdp_requires_memory_for_unsharded_model(capsys):
    """32B on 64 GPUs: a step would fit, but each rank creates the complete model before sharding."""
    sharded = ["--model", "32B", "--gpus", "64", "--fsdp", "--seq-length", "2048", "--recompute", "full"]
    assert main([*sharded, "--vision-recompute", "full", "--gpu", "A100-40GB"]) == 1
    said = capsys.readouterr().out
    assert "does not fit: 67.6 GiB" in said and "before sharding" in said and "63.6" in said


def test_plan_reports_host_memory_for_saving_checkpoint(capsys):
    """8B with TP 2: 12 bytes for each of a rank's 4.39e9 parameters, and 1/8 of 14 bytes."""
    _, found = run(capsys, "--tp", "2")
    held = found["stages"][0]["parameters"] / 2
    assert found["stages"][0]["host_while_saving"] == pytest.approx((12 + 14 / 8) * held, rel=1e-6)
    main([*RUN, "--tp", "2"])
    said = " ".join(capsys.readouterr().out.split())
    assert "saving fits: 56.2 GiB of host memory per rank (7.1 without" in said
    main([*RUN, "--tp", "1", "--gpu-memory", "200"])
    assert "saving does not fit: 105.1 GiB" in " ".join(capsys.readouterr().out.split())


def test_plan_command_prints_first_two_and_last_of_16_pipeline_stages(capsys):
    words = ["--model", "30B-A3B", "--gpus", "16", "--pp", "16"]
    main([*words])
    said = capsys.readouterr().out
    shown = [stage for stage in range(16) if f" stage {stage} " in said]
    assert shown == [0, 1, 15] and max(map(len, said.splitlines())) <= 80
    main([*words, "--json"])
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 16


def test_plan_command_options_change_total_memory_as_expected(capsys):
    _, plain = run(capsys, "--tp", "2")
    fewer = ("--recompute full", "--recompute selective --recompute-modules mlp", "--vision-recompute full", "--fsdp",
             "--kind peft", "--freeze language_model", "--cp 2")  # fmt: skip
    more = ("--no-sequence-parallel", "--no-fused-activation", "--precision fp32", "--no-distributed-optimizer",
            "--micro-batch-size 2")  # fmt: skip
    for option in fewer:
        assert run(capsys, "--tp", "2", *option.split())[1]["total"] < plain["total"], option
    for option in more:
        assert run(capsys, "--tp", "2", *option.split())[1]["total"] > plain["total"], option


# Options that replace those of `RUN`, and the expected message.
INVALID_OPTIONS = {
    "--tp 3": "16 GPUs, expected a multiple of tp * pp * cp, which is 3",
    "--model 30B-A3B --gpus 8 --pp 2 --ep 8": "a multiple of etp * ep * pp, which is 16",
    "--tp 1 --sequence-parallel": "sequence_parallel is True and tp is 1",
    "--tp 1 --vpp 2": "vpp is 2 and pp is 1",
    "--model 2B --pp 8": "28 layers cannot be divided evenly over 8 pipeline stages",
    "--model 2B --pp 2 --vpp 4": "pipeline stage 0 has 14 layers, expected a multiple of vpp",
    "--model 2B --gpus 32 --tp 32": "num_attention_heads is 16",
    "--model 32B --gpus 32 --tp 32": "vision_config.num_heads is 16",
    "--ep 2": "this model has no experts",
    "--model 30B-A3B --gpus 3 --ep 3": "num_moe_experts is 128",
    "--model 30B-A3B --gpus 7 --etp 7": "moe_ffn_hidden_size is 768",
    "--model 30B-A3B --tp 2 --no-sequence-parallel": "sequence_parallel is False with experts",
    "--gpus 3 --cp 3": "seq_length is 8192, expected a multiple of 6",
    "--tp 1 --global-batch-size 12": "global_batch_size is 12, expected a multiple of 16",
    "--fsdp --pp 2": "FSDP does not support pipeline stages",
    "--tp 2 --recompute selective --recompute-modules moe": "this model has no experts",
    "--model Qwen/Qwen3.5-9B --tp 2 --no-sequence-parallel": (
        "sequence_parallel is False with linear attention and tp 2, expected True"
    ),
    "--tp 2 --recompute-modules mlp": "expected modules with 'selective'",
    "--tp 2 --vision-recompute-method block": (
        "with granularity 'full' the method 'uniform' or 'block' and 1 or more layers, otherwise both None"
    ),
    "--max-patches -1": "max_patches is -1",
    "--expert-load 0.5": "expert_load is 0.5",
    "--gpu H1000": "GB200; for another use --gpu-memory of `qwen3vl plan`",
    "--model 7B": "unknown model '7B'",
    "--model 235b": "or a hub id; the nearest name whose dimensions are known is 235B-A22B",
    "--fsdp --no-distributed-optimizer": "both given, expected only one of them",
    "--recompute full": "--propose chooses recomputation",
    "--no-sequence-parallel": "--propose chooses recomputation and sequence parallelism",
    "--propose --ep 2": "no parallel layout of 16 GPUs is possible: ep is 2 and etp None",
    "--propose --vpp 2": "does not try vpp",
    "--vision-gpus 4 --fsdp --tp 2": "sharding is optim_grads_params, expected the distributed optimizer",
    "--vision-gpus 8 --cp 2": "cp is 2 and vpp is None with separate vision ranks",
    "--vision-gpus 8 --pp 2 --vpp 2": "cp is 1 and vpp is 2 with separate vision ranks",
    "--vision-gpus 4 --propose --recompute full": "--propose chooses recomputation",
    "--vision-gpus 4 --tp 16": "12 GPUs, expected a multiple of tp",
    "--vision-gpus 16": "--vision-gpus is 16, expected fewer than --gpus, 16",
    "--vision-gpus 4 --vision-tp 3": "4 GPUs, expected a multiple of tp",
    "--vision-gpus 10 --tp 1": "10 data-parallel replicas and the language model 6",
    "--model 2B --gpus 64 --vision-gpus 32 --vision-tp 32 --tp 1": "vision_config.num_heads is 16",
    "--model 2B --vision-gpus 6 --pp 5": "28 layers cannot be divided evenly over 5 pipeline stages",
    "--tp 2 --vision-tp 2": "--vision-tp is given without --vision-gpus",
}


@pytest.mark.parametrize("options", INVALID_OPTIONS)
def test_plan_command_with_invalid_options_exits_with_code_2(capsys, options):
    assert main([*RUN, *options.split()]) == 2
    assert INVALID_OPTIONS[options] in capsys.readouterr().err


RELEASE_NAMES = {
    "27B": ("Qwen3.5-27B-FP8", "Qwen3.6-27B", "Qwen3.6-27B-FP8", "Qwen3.8-27B", "Qwen3.8-27B-FP8", "Qwen3.8-27B-Base"),
    "35B-A3B": ("Qwen3.5-35B-A3B-Base", "Qwen3.6-35B-A3B", "Qwen3.6-35B-A3B-FP8"),
    "235B-A22B": ("Qwen3-VL-235B-A22B-Thinking-FP8", "Qwen3-VL-235B-A22B-Instruct-FP8"),
}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in RELEASE_NAMES.items() for name in names])
def test_preset_of_release_name_equals_preset_of_model_size(size, name):
    assert preset(f"Qwen/{name}") == preset(size)
    with pytest.raises(ValueError, match=rf"the nearest name whose dimensions are known is Qwen/{name}\Z"):
        preset(f"Qwen/{name}!")


def test_preset_lookup_ignores_case_of_model_name():
    assert preset("30b-a3b") == preset("qwen/qwen3-vl-30b-a3b-instruct") == preset("30B-A3B")
    assert nearest_name("Qwen/Qwen3-VL-8B").endswith("is Qwen/Qwen3-VL-8B-Instruct")
    for other in ("Qwen/Qwen2.5-VL-7B", "Qwen/Qwen2.5-VL-7B-Instruct"):
        found = nearest_name(other)
        assert found == "; supported are the models Qwen/Qwen3-VL, Qwen/Qwen3.5, Qwen/Qwen3.6, Qwen/Qwen3.8"
    assert nearest_name("me/mine") == nearest_name("27B-of-mine") == ""


def test_plan_command_reads_config_of_unlisted_model_from_hub_cache(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    ask = ["--model", "Qwen/Qwen3.9-27B", "--gpus", "64", "--seq-length", "8192", "--max-patches", "8192"]
    assert main(ask) == 2
    said = capsys.readouterr().err
    assert "Qwen/Qwen3.9-27B is neither a folder nor a model available from the hub" in said
    assert re.search(r"the nearest name whose dimensions are known is Qwen/Qwen3\.[568]-27B$", said.strip())
    kept = tmp_path / "models--Qwen--Qwen3.9-27B"
    for path, text in (("refs/main", "a" * 40), (f"snapshots/{'a' * 40}/config.json", json.dumps(preset("27B")))):
        (kept / path).parent.mkdir(parents=True)
        (kept / path).write_text(text)
    assert main(ask) == 0
    found = capsys.readouterr().out
    assert main(["--model", "27B", *ask[2:]]) == 0 and capsys.readouterr().out == found


@pytest.mark.parametrize(("config", "training", "message"), [
    (qwen3_5.config_dict("9B"), dict(lora=LoraSettings(8, ())), "no such layers .* in_proj, linear_fc1, linear_fc2"),
    (presets.config_dict("30B-A3B"), dict(lora=LoraSettings(8, ("linear_fc1",))), "layers outside its experts"),
])  # fmt: skip
def test_estimate_raises_if_lora_target_modules_match_no_layer(config, training, message):
    with pytest.raises(ValueError, match=message):
        estimate(dimensions_of(config), ParallelLayout(8), TrainingSettings(**training))


def test_training_settings_raises_if_recompute_module_is_unsupported():
    mlp, activation = (Recompute("selective", frozenset({name})) for name in ("mlp", "moe_act"))
    with pytest.raises(ValueError, match="vision_recompute_modules has"):
        TrainingSettings(vision_recompute=mlp)
    with pytest.raises(ValueError, match="need Transformer Engine"):
        TrainingSettings(recompute=activation, transformer_engine=False)


def test_plan_reads_config_of_local_model_folder(capsys, untied_folder):
    assert main(["--model", str(untied_folder), "--gpus", "1", "--tp", "1", "--precision", "fp32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["layers"] == 4


def test_plan_proposals_fit_and_are_sorted_by_model_parallel_size(capsys):
    status, proposals = run(capsys)
    assert status == 0 and len(proposals) == 5
    layouts = [proposal["parallel_layout"] for proposal in proposals]
    ranks = [layout["tp"] * layout["pp"] * layout["cp"] for layout in layouts]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]
    assert all(proposal["fits"] and proposal["free"] > 0 for proposal in proposals)
    assert len({json.dumps(layout) for layout in layouts}) == 5
    assert {proposal["training"]["sharding"] for proposal in proposals} == {"optim"}
    _, fixed = run(capsys, "--propose", "--tp", "4")
    assert fixed and {proposal["parallel_layout"]["tp"] for proposal in fixed} == {4}
    _, sharded = run(capsys, "--propose", "--fsdp")
    assert sharded and {proposal["training"]["sharding"] for proposal in sharded} == {"optim_grads_params"}
    assert main([*RUN]) == 0
    assert "fewest model-parallel ranks first" in " ".join(capsys.readouterr().out.split())


def sort_key(proposal) -> tuple:
    """Return the sort key of a proposal, in the order that `planning/proposals.py` states."""
    kinds = {None: 0, "selective": 1, "full": 2}
    training, layout = proposal.training, proposal.layout
    recomputed = (kinds[training.recompute.granularity], kinds[training.vision_recompute.granularity])
    return max(layout.ep, 8), layout.tp * layout.pp * layout.cp, recomputed, layout.pp, layout.tp


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("size", "world", "seq_length"), [("8B", 16, 32768), ("30B-A3B", 16, 8192), ("235B-A22B", 128, 8192)]
)
def test_propose_returns_first_layouts_of_sorted_fitting_layouts(size, world, seq_length):
    """Each proposal also equals an estimate of all stages, although only some are estimated in the search."""
    config, gpu = presets.config_dict(size), GPUS["H100"]
    training = TrainingSettings(seq_length=seq_length, max_patches=4096, global_batch_size=256)
    dims = dimensions_of(config)
    (proposals, _), (everything, _) = (propose(dims, world, gpu, training, max_proposals=most) for most in (5, 1000))
    assert proposals == everything[:5] and everything == sorted(everything, key=sort_key)
    for proposal in everything:
        assert proposal == estimate(dimensions_of(config), proposal.layout, proposal.training)
        assert proposal.peak.total <= (1 - MARGIN) * gpu.memory_bytes
    fixed = {name: getattr(everything[-1].layout, name) for name in ("tp", "pp", "cp")}
    assert propose(dims, world, gpu, training, fixed=fixed)[0] == everything[-1:]


def test_plan_command_says_what_to_change_if_no_layout_fits(capsys):
    assert main(["--model", "235B-A22B", "--gpus", "2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.fullmatch(
        r"nothing fits into 75.1 of 79.1 GiB \(5 % left free\); TP 2, SP, EP 2 \(.*\) needs least, [\d.]+ GiB: "
        r"use more GPUs, --fsdp \(Megatron-FSDP\), --kind peft \(LoRA\), shorter rows, or --max-patches",
        said,
    ), said


@pytest.mark.parametrize(("size", "world", "fixed"), [("8B", 2, {}), ("30B-A3B", 8, {"tp": 2})])
@pytest.mark.parametrize("sharding", [Sharding.OPTIMIZER, Sharding.ALL])
def test_propose_returns_smallest_layout_only_if_gpu_memory_suffices(size, world, fixed, sharding):
    dims = dimensions_of(presets.config_dict(size))
    training = TrainingSettings(seq_length=4096, max_patches=4096, sharding=sharding)
    none, smallest = propose(dims, world, replace(GPUS["H100"], memory_bytes=1), training, fixed=fixed)
    assert none == []
    for factor, fits in ((0.99999, False), (1.00001, True)):
        gpu = replace(GPUS["H100"], memory_bytes=round(smallest.peak.total / (1 - MARGIN) * factor))
        found = propose(dims, world, gpu, training, fixed=fixed)[0]
        assert (smallest in found) == fits
        assert all(other.peak.total >= smallest.peak.total for other in found)


H100 = GPUS["H100"]
ROWS = TrainingSettings(seq_length=8192, max_patches=27205, global_batch_size=96)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_dist_train_vision_and_language_parameters_add_up_to_model(name):
    dims = dimensions_of(presets.config_dict(name))
    ((chunk,),) = ParallelLayout(1, vision=False).chunks(len(dims.indices["text_layers"]))
    vision, language = (count_parameters(dims, ParallelLayout(1), side) for side in (VISION_CHUNK, chunk))
    assert vision.total() + language.total() == presets.parameter_count(name)
    assert set(+vision) == {"vision_model", "vision_projection"}
    assert {"language_model"} <= set(+language) <= {"language_model", "experts"}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(presets.PRESETS)), st.frozensets(st.sampled_from(list(Component)), max_size=2),
    st.sampled_from([Recompute(), FULL]), st.sampled_from([Recompute(), FULL]),
)  # fmt: skip
def test_dist_train_vision_and_language_memory_adds_up_to_full_model(name, parts, recompute, vision_recompute):
    config, sent = presets.config_dict(name), "sent between towers"
    training = replace(
        ROWS, global_batch_size=1, frozen=parts, recompute=recompute, vision_recompute=vision_recompute,
        sharding=Sharding.NONE,
    )  # fmt: skip
    (together,) = estimate(dimensions_of(config), ParallelLayout(1), training).stages
    vision, language = estimate(
        dimensions_of(config), ParallelLayout(1), training, vision_layout=ParallelLayout(1)
    ).stages
    for module, nbytes in together.activations.items():
        both = vision.activations.get(module, 0) + language.activations.get(module, 0)
        assert both == pytest.approx(nbytes), module
    assert vision.states.total + language.states.total == pytest.approx(together.states.total)
    hidden = config["text_config"]["hidden_size"]
    assert vision.activations[sent] == language.activations[sent] == (27205 / 4) * 4 * hidden * 2


@pytest.mark.parametrize(("vision", "share"), [(1, 4), (2, 2), (4, 1), (8, 1 / 2)])
def test_vision_rank_memory_is_proportional_to_replicas_it_serves(vision, share):
    """Vision ranks hold one microbatch more than the first stage, unless the step has fewer."""
    dims = dimensions_of(presets.config_dict("2B"))
    equal, *_ = estimate(dims, ParallelLayout(8, pp=2), ROWS, vision_layout=ParallelLayout(4)).stages
    stage, *_ = estimate(dims, ParallelLayout(8, pp=2), ROWS, vision_layout=ParallelLayout(vision)).stages
    assert stage.in_flight == (3,)
    assert stage.activations == pytest.approx({module: share * each for module, each in equal.activations.items()})
    fewer = replace(ROWS, global_batch_size=8)
    short, *_ = estimate(dims, ParallelLayout(8, pp=2), fewer, vision_layout=ParallelLayout(4)).stages
    assert short.in_flight == (2,)


@pytest.mark.parametrize("name", ["30B-A3B", "35B-A3B"])
def test_estimate_with_expert_overlap_counts_activations_of_next_microbatch(name):
    """The first layers and the tower of the next microbatch count, and outputs of Qwen3.5's shared experts."""
    dims = dimensions_of((presets if name == "30B-A3B" else qwen3_5).config_dict(name))
    layout, layers = ParallelLayout(8, ep=8), len(dims.indices["text_layers"])
    for rows in (8, 16):
        plain = replace(
            ROWS, global_batch_size=rows, transformer_engine=False, on_gpu=True, delta_rule_kernels=True,
            frozen=frozenset({Component.LANGUAGE_MODEL}), loss_chunk_tokens=512,
        )  # fmt: skip
        ours, expected = (estimate(dims, layout, replace(plain, overlaps_experts=on)).peak for on in (True, False))
        text = expected.activations["language model"] + layers * 2 * dims["hidden"] * 8192 * (name == "35B-A3B")
        twice = {"vision model", "vision projection", "DeepStack"} if rows > 8 else set()
        stored = {module: n * (1 + (module in twice)) for module, n in expected.activations.items()}
        assert ours.activations == pytest.approx(stored | {"language model": text})
        least, most = (0.999, 1) if name == "30B-A3B" else (1.2, 1.3)  # three of four layers of Qwen3.5 are larger
        ahead = (ours.temporary - expected.temporary) / (text / layers)
        assert least <= ahead <= most if rows > 8 else ahead == 0


def test_propose_enables_expert_overlap_only_where_supported():
    dims = dimensions_of(presets.config_dict("30B-A3B"))
    found, _ = propose(dims, 32, H100, replace(ROWS, overlaps_experts=True))
    for one in found:
        no_overlap = one.layout.pp > 1 or one.layout.ep == 1 or one.training.recompute == FULL
        assert one.training.overlaps_experts == (not no_overlap)
    assert len({one.training.overlaps_experts for one in found}) == 2


@pytest.mark.parametrize(("name", "gpus", "vision"), [("2B", 8, 2), ("8B", 16, 4), ("30B-A3B", 32, 8)])
def test_propose_with_separate_vision_ranks_returns_layouts_that_fit(name, gpus, vision):
    config, vision_layout = presets.config_dict(name), ParallelLayout(vision)
    proposals, _ = propose(dimensions_of(config), gpus, H100, ROWS, vision_layout=vision_layout)
    assert proposals
    for proposal in proposals:
        layout = replace(proposal.layout, vision=True)
        assert proposal == estimate(dimensions_of(config), layout, proposal.training, vision_layout=vision_layout)
        assert layout.world == gpus - vision and layout.cp == 1 and proposal.training.sharding is Sharding.OPTIMIZER
        assert proposal.peak.total <= 0.95 * H100.memory_bytes
    ranks = [proposal.layout.tp * proposal.layout.pp for proposal in proposals]
    assert ranks == sorted(ranks)
    with pytest.raises(ValueError, match=f"{gpus} vision ranks, expected fewer than all GPUs"):
        propose(dimensions_of(config), gpus, H100, ROWS, vision_layout=ParallelLayout(gpus))


def test_plan_json_dist_train_section_has_fields_of_dist_train_config(capsys):
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig

    _, plan = run(capsys, "--tp", "2", "--recompute", "full", "--vision-gpus", "8", "--vision-tp", "2")
    assert plan["dist_train"].keys() <= {field.name for field in fields(DistTrainConfig)}
    assert plan["dist_train"] == {
        "use_dist_train": True, "vision_world_size": 8, "language_world_size": 8,
        "vision_tensor_model_parallel_size": 2, "vision_pipeline_model_parallel_size": 1,
        "vision_context_parallel_size": 1, "vision_to_llm_dp_ratio": 1,
    }  # fmt: skip
    assert [stage["stage"] for stage in plan["stages"]] == [-1, 0]
    _, few = run(capsys, "--tp", "1", "--vision-gpus", "4", "--vision-tp", "2", "--global-batch-size", "48")
    assert few["dist_train"]["vision_to_llm_dp_ratio"] is None  # six language replicas for each


# Megatron-FSDP's gradients have the dtype of the parameters by default.
BRIDGES = Precision(2, 2, 4)
RUN_OF_CONFIG = TrainingSettings(
    seq_length=512, global_batch_size=2, precision=Precision(4, 4, 4), sharding=Sharding.ALL, transformer_engine=False,
    balancing_loss=False, loss_chunk_tokens=8192, on_gpu=True,
)  # fmt: skip
DISTRIBUTED = dict(sharding=Sharding.OPTIMIZER, precision=FP32)


@pytest.fixture
def cfg(untied_folder):
    cfg = set_paths(qwen3_vl_digits_sft_config(), hf_path=untied_folder, data_path="x", save="x")
    cfg.mixed_precision = None
    cfg.ddp.megatron_fsdp_main_grads_dtype = None  # default: the dtype of the parameters
    return cfg


def change(cfg, **settings):
    for name, value in settings.items():
        section, _, field = name.partition("__")
        target = getattr(cfg, section) if field else cfg
        assert hasattr(target, field or section), name
        setattr(target, field or section, value)
    return cfg


def estimate_of_folder(folder, layout: ParallelLayout, training: TrainingSettings):
    return estimate(dimensions_of(json.loads((folder / "config.json").read_text())), layout, training)


def test_estimate_run_of_recipe_equals_estimate_from_its_settings(cfg, untied_folder):
    assert estimate_run(cfg, 2) == estimate_of_folder(untied_folder, ParallelLayout(2), RUN_OF_CONFIG)


MODELED = {
    "init on CPU": (dict(model__init_model_with_meta_device=True), dict(init_on_cpu=True)),
    "optimizer saved by shard index": (
        dict(checkpoint__dist_ckpt_optim_fully_reshardable=False), dict(fully_reshardable=False),
    ),
    "sizes": (
        dict(model__tensor_model_parallel_size=2, model__sequence_parallel=True, model__context_parallel_size=2), {},
        ParallelLayout(4, tp=2, cp=2, sequence_parallel=True),
    ),
    "stages": (
        dict(model__pipeline_model_parallel_size=2, model__num_layers_in_first_pipeline_stage=1,
             ddp__use_megatron_fsdp=False), DISTRIBUTED, ParallelLayout(4, pp=2, first_layers=1),
    ),
    "no sharding": (
        dict(ddp__use_megatron_fsdp=False, ddp__use_distributed_optimizer=False,
             optimizer__use_distributed_optimizer=False), DISTRIBUTED | dict(sharding=Sharding.NONE),
    ),
    "mixed precision by name": (dict(mixed_precision="bf16_mixed"), dict(precision=BRIDGES)),
    "mixed precision": (dict(mixed_precision=bf16_mixed()), dict(precision=BRIDGES)),
    "bfloat16": (
        dict(model__params_dtype=torch.bfloat16, ddp__grad_reduce_in_fp32=False), dict(precision=Precision(2, 2, 4)),
    ),
    "gradients of FSDP": (
        dict(mixed_precision="bf16_mixed", ddp__megatron_fsdp_main_grads_dtype=torch.float32), dict(precision=BF16),
    ),
    "FSDP that shards the optimizer alone": (
        dict(ddp__data_parallel_sharding_strategy="optim"),
        dict(sharding=Sharding.OPTIMIZER, precision=Precision(4, 4, 4)),
    ),
    "small moments": (
        dict(mixed_precision="bf16_mixed", optimizer__use_precision_aware_optimizer=True,
             optimizer__exp_avg_dtype=torch.bfloat16, optimizer__exp_avg_sq_dtype=torch.bfloat16),
        dict(precision=Precision(2, 2, 4, 4)),
    ),
    "recomputation": (
        dict(model__recompute_granularity="selective", model__recompute_modules=["mlp"],
             model__vision_recompute_granularity="full", model__vision_recompute_method="uniform",
             model__vision_recompute_num_layers=1),
        dict(recompute=Recompute("selective", frozenset({"mlp"})), vision_recompute=FULL),
    ),
    "frozen": (dict(model__freeze_vision_model=True), dict(frozen=frozenset({Component.VISION_MODEL}))),
    "adapters": (
        dict(peft=Qwen3VLLoRA(dim=4, target_modules=["linear_qkv"])), dict(lora=LoraSettings(4, LINEAR_LAYERS[:1])),
    ),
    "DoRA": (
        dict(peft=Qwen3VLDoRA(dim=4, target_modules=["linear_qkv"])),
        dict(lora=LoraSettings(4, LINEAR_LAYERS[:1], regather_inputs=False, dora=True)),
    ),
    "loss of a whole row": (dict(model__loss_chunk_tokens=0), dict(loss_chunk_tokens=0)),
    "rows": (
        dict(dataset__max_patches=64, train__micro_batch_size=2, train__global_batch_size=8, dataset__seq_length=256),
        dict(max_patches=64, micro_batch_size=2, global_batch_size=8, seq_length=256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELED)
def test_estimate_run_translates_each_supported_setting(name, cfg, untied_folder):
    settings, fields, layout = (*MODELED[name], ParallelLayout(4))[:3]
    change(cfg, **{"train__global_batch_size": 4} | settings)
    assert estimate_run(cfg, 4) == estimate_of_folder(
        untied_folder, layout, replace(RUN_OF_CONFIG, **{"global_batch_size": 4} | fields)
    )


def test_estimate_run_reads_pipeline_model_parallel_layout(cfg, untied_folder):
    change(cfg, model__pipeline_model_parallel_size=2, model__pipeline_model_parallel_layout="Ettt|tL",
           model__pipeline_dtype=torch.float32, ddp__use_megatron_fsdp=False)  # fmt: skip
    cfg.model.finalize()
    expected = estimate_of_folder(
        untied_folder, ParallelLayout(2, pp=2, pipeline_layout=((3,), (1,))), replace(RUN_OF_CONFIG, **DISTRIBUTED)
    )
    assert estimate_run(cfg, 2).stages == expected.stages


def test_estimate_run_reads_expert_parallel_settings(cfg):
    cfg.model = AutoBridge.from_hf_config(presets.hf_config("30B-A3B")).to_megatron_provider(load_weights=False)
    change(cfg, model__expert_model_parallel_size=8, model__expert_tensor_parallel_size=1,
           mixed_precision="bf16_mixed", train__global_batch_size=8)  # fmt: skip
    training = replace(
        RUN_OF_CONFIG, global_batch_size=8, precision=BRIDGES, balancing_loss=True, loss_chunk_tokens=2048
    )
    dims = dimensions_of(presets.config_dict("30B-A3B"))
    assert estimate_run(cfg, 8) == estimate(dims, ParallelLayout(8, ep=8, etp=1), training)


def test_estimate_run_reads_dist_train_settings_and_checks_rank_count(cfg, untied_folder):
    cfg.model.dist_train = DistTrainConfig(use_dist_train=True, vision_world_size=4, language_world_size=4,
                                           vision_tensor_model_parallel_size=2)  # fmt: skip
    change(cfg, model__pipeline_model_parallel_size=2, ddp__use_megatron_fsdp=False)
    config, training = json.loads((untied_folder / "config.json").read_text()), replace(RUN_OF_CONFIG, **DISTRIBUTED)
    plan = estimate_run(cfg, 8)
    assert plan == estimate(
        dimensions_of(config), ParallelLayout(4, pp=2), training, vision_layout=ParallelLayout(4, tp=2)
    )
    assert [stage.stage for stage in plan.stages] == [-1, 0, 1]
    proposals = propose_for_run(cfg, plan, GPUS["H100"])
    assert proposals == propose(dimensions_of(config), 8, H100, training, vision_layout=ParallelLayout(4, tp=2))[0]
    cfg.model.dist_train.vision_world_size = None
    with pytest.raises(ValueError, match="None vision and 4 language ranks, expected a total of 8"):
        estimate_run(cfg, 8)
    cfg.model.dist_train.vision_world_size = 4
    with pytest.raises(ValueError, match="4 vision and 4 language ranks, expected a total of 16"):
        estimate_run(cfg, 16)


_FP4 = bf16_mixed()
_FP4.fp4 = "e2m1"
NOT_MODELED = {
    "model.fp4": dict(model__fp4="e2m1"), "model.cpu_offloading": dict(model__cpu_offloading=True),
    "model.fine_grained_activation_offloading": dict(model__fine_grained_activation_offloading=True),
    "model.cuda_graph_impl": dict(model__cuda_graph_impl="local"),
    "optimizer.optimizer_cpu_offload": dict(optimizer__optimizer_cpu_offload=True),
    "optimizer.optimizer is": dict(optimizer__optimizer="sgd"),
    "ddp.num_distributed_optimizer_instances": dict(ddp__num_distributed_optimizer_instances=2),
    "mixed_precision is": dict(mixed_precision="fp16_mixed"),
    "mixed_precision has": dict(mixed_precision=_FP4),
    "peft is a LoRA, expected Qwen3VLLoRA or Qwen3VLDoRA": dict(peft=LoRA()),
    "peft.adapt_vision_model": dict(peft=Qwen3VLLoRA(adapt_vision_model=True)),
    "peft.adapt_experts": dict(peft=Qwen3VLLoRA(adapt_experts=True)),
    "peft.freeze_vision_model": dict(peft=Qwen3VLLoRA(freeze_vision_model=False)),
    "peft.target_modules": dict(peft=Qwen3VLLoRA(target_modules=["*.layers.0.*"])),
    "pipeline_model_parallel_layout": dict(model__pipeline_model_parallel_layout="Et*2|t*2L"),
}  # fmt: skip


@pytest.mark.parametrize("message", NOT_MODELED)
def test_estimate_run_raises_if_setting_is_unsupported(message, cfg):
    change(cfg, **NOT_MODELED[message])
    with pytest.raises(ValueError, match=message.replace(".", "\\.")):
        estimate_run(cfg, 4)


def test_validate_raises_if_fsdp_is_used_with_one_cuda_device_connection(cfg, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(AssertionError, match="FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset"):
        cfg.validate()
