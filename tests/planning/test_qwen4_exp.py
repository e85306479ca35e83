"""The planner, FLOPs and divisibility of Qwen3.8-Flash-Next: gated residuals, n-gram tables, sparse attention."""

import itertools
import json
from collections import Counter
from dataclasses import replace

from qwen3vl_bridge import Qwen3VLLoRA
from qwen3vl_bridge.cli.plan import main
from qwen3vl_bridge.config.divisibility import indivisible_sizes
from qwen3vl_bridge.config.flops import TowerCosts, Trained, model_costs
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.qwen4_exp.hf_classes import Config, register_configs
from qwen3vl_bridge.models.qwen4_exp.presets import config_dict, hub_ids
from qwen3vl_bridge.planning.activations import chunk_activations
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.model_states import count_parameters, estimate_states
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.training_settings import (
    BF16,
    FP32,
    FULL,
    LINEAR_LAYERS,
    LoraSettings,
    Recompute,
    Sharding,
    TrainingSettings,
)
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Component, component_of, is_mtp

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.batches import make_batch, make_samples
from tests.models.qwen4_exp.tiny import make_config
from tests.planning.test_activations import build
from tests.planning.test_memory_on_ranks import collect_saved_storages, work_of

RELEASED = dimensions_of(config_dict("Flash-Next"))
ONE = ParallelLayout(1)
# Measured at most 6e-4 for packed rows. In padded rows torch's delta rule also copies chunks (7e-3). Angles are counted
# for all dimensions of a head, of which a quarter is rotated: 1.4e-2 of what full recomputation leaves.
TOLERANCE, TOLERANCE_ROWS, TOLERANCE_RECOMPUTED = 1e-3, 1e-2, 2e-2


def tiny_config(**changes):
    """Return the configuration of a tiny model as a class of transformers."""
    register_configs()
    raw = make_config(**changes)
    config = Config(**raw)
    config.architectures = raw["architectures"]
    return config, dimensions_of(raw)


def only_chunk(dims):
    ((chunk,),) = ONE.chunks(len(dims.indices["text_layers"]))
    return chunk


def test_planned_parameters_of_released_model_match_published_numbers():
    """125 B in the text model without multi-token prediction, and 51 B in the n-gram table."""
    counts, mtp = (count_parameters(RELEASED, ONE, only_chunk(RELEASED), which) for which in (None, is_mtp))
    assert counts.total() - mtp.total() == 177_392_830_576
    assert counts["ngram_table"] == 160 * 320_001_536
    of_text = (counts - mtp)["language_model"] + (counts - mtp)["experts"]
    assert of_text == pytest.approx(125e9, rel=0.01)


@pytest.mark.parametrize("layout", [
    ParallelLayout(2, pp=2), ParallelLayout(4, pp=4, vpp=3), ParallelLayout(2, pp=2, first_layers=20),
])  # fmt: skip
def test_planned_parameters_of_stages_add_up_and_first_stage_has_ngram_table(layout):
    chunks = [chunk for stage in layout.chunks(48) for chunk in stage]
    counts = [count_parameters(RELEASED, layout, chunk) for chunk in chunks]
    assert sum(count.total() for count in counts) == 177_392_830_576 + 2_607_150_848
    by_layer = {chunk.layers.start: count["ngram_table"] for chunk, count in zip(chunks, counts, strict=True)}
    assert {start for start, number in by_layer.items() if number} == {0}


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (4, 2), (32, 1), (64, 1)])
def test_planned_ngram_table_is_shared_by_expert_parallel_ranks(ep, etp):
    """With 32 and 64 ranks each has columns of one hash head."""
    layout = ParallelLayout(64, tp=2, ep=ep, etp=etp, sequence_parallel=True)
    layout.check(RELEASED)
    count = count_parameters(RELEASED, layout, layout.chunks(48)[0][0])
    assert count["ngram_table"] == 160 * 320_001_536 // (ep * etp)


def model_counts(model, *, trained: bool) -> Counter[str]:
    """Return the number of parameters of a model by component, as `count_parameters` names them."""
    counts: Counter[str] = Counter()
    for name, p in model.named_parameters():
        if p.requires_grad or not trained:
            kind = "experts" if ".mlp.experts." in name else component_of(name).value
            counts["ngram_table" if ".ngram_embedding." in name else kind] += p.numel()
    return counts


@pytest.mark.parametrize("case", ["MTP not trained", "MTP", "frozen table", "frozen FP8 table", "LoRA"])
def test_planned_model_states_match_trained_parameters_of_built_model(case):
    """The indexer is never trained, and LoRA freezes the table."""
    config, dims = tiny_config()
    training = TrainingSettings(
        transformer_engine=False, precision=FP32, sharding=Sharding.NONE, trains_mtp=case == "MTP",
        freezes_ngram_table=case.startswith("frozen"), fp8_ngram_table=case == "frozen FP8 table",
        lora=LoraSettings(8) if case == "LoRA" else None,
    )  # fmt: skip
    fp8 = dict(ngram_table_dtype="float8_e4m3fn") if training.fp8_ngram_table else {}
    model = build(config, training, freeze_ngram_table=training.freezes_ngram_table, **fp8)
    buffers = dict(model.named_buffers())
    table = sum(one.nbytes for name, one in buffers.items() if one.dtype == torch.uint8 and "weight_scale" not in name)
    found = model_counts(model, trained=False) + Counter(ngram_table=table)
    assert found == count_parameters(dims, ONE, only_chunk(dims))
    if case == "LoRA":
        model = Qwen3VLLoRA(dim=8, target_modules=list(LINEAR_LAYERS))(model)
    trained = model_counts(model, trained=True)
    assert ("ngram_table" in trained) == case.startswith("MTP")
    states = estimate_states(dims, ONE, (only_chunk(dims),), training)
    assert states.gradients == 4 * trained.total() and states.optimizer == 8 * trained.total()
    assert states.parameters == 4 * sum(p.numel() for p in model.parameters()) + table


CASES = {
    "float32": (FP32, Recompute(), TOLERANCE), "bfloat16": (BF16, Recompute(), 2 * TOLERANCE),
    "MTP": (FP32, Recompute(), TOLERANCE), "full": (FP32, FULL, TOLERANCE_RECOMPUTED),
    "MTP, full": (FP32, FULL, TOLERANCE_RECOMPUTED),
    "moe": (FP32, Recompute("selective", frozenset({"moe"})), TOLERANCE),
}  # fmt: skip


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("case", CASES)
def test_estimated_qwen4_exp_activations_match_bytes_saved_by_autograd(case):
    (config, dims), (precision, recompute, tolerance) = tiny_config(), CASES[case]
    training = TrainingSettings(
        transformer_engine=False, precision=precision, recompute=recompute, fused_activation=False,
        loss_chunk_tokens=0, trains_mtp=case.startswith("MTP"),
    )  # fmt: skip
    model = build(config, training)
    hashes = model.config.ngram_hashes()
    for content, packed in itertools.product(("many images", "text only"), (True, False)):
        samples = make_samples(content, config, seed=3)
        lengths = [len(sample.ids) for sample in samples]
        layout = (
            SequenceLayout.packed_row(lengths, multiple=196) if packed else SequenceLayout.padded_rows(lengths, 332)
        )
        batch = make_batch(samples, config, layout=layout)
        with collect_saved_storages([model]) as storages:
            model(inputs=batch.local(with_next_tokens=training.trains_mtp, ngram_hashes=hashes))
        saved = sum(storage.nbytes() for storage in storages.values())
        counted = chunk_activations(dims, ONE, replace(training, packed=packed), only_chunk(dims), work_of(batch)).total
        error = counted / saved - 1
        print(f"{content}, {'packed' if packed else 'rows'}: {error:+.1e}")
        assert abs(error) <= (tolerance if packed else max(tolerance, TOLERANCE_ROWS)), (content, packed)


def test_recomputed_qwen4_exp_layer_keeps_four_streams_as_input():
    """Under full recomputation a layer keeps its input, four streams; a rank has its share of the tokens."""
    training = TrainingSettings(seq_length=8192, max_patches=0, recompute=FULL, loss_chunk_tokens=2048)

    def kept(**sizes) -> float:
        layout = ParallelLayout(8, etp=1, **sizes)
        return estimate(RELEASED, layout, training).stages[-1].activations["language model"]

    layers = 48 * 8192 * 4 * 2560 * 2
    assert kept() == pytest.approx(layers, rel=0.01)
    assert kept(pp=2) == pytest.approx(layers / 2, rel=0.01)
    assert kept(tp=2, sequence_parallel=True) == pytest.approx(layers / 2, rel=0.02)
    assert kept(cp=4) == pytest.approx(layers / 4, rel=0.01)


UNSUPPORTED = {
    "Megatron-FSDP with ep": (dict(ep=2), dict(sharding=Sharding.ALL), "ep \\* etp is 2 .* expected 1: Megatron-FSDP"),
    "overlap": (dict(ep=2), dict(overlaps_experts=True), "overlap_moe_expert_parallel_comm is True, expected False"),
    "layernorm": (
        {}, dict(recompute=Recompute("selective", frozenset({"layernorm"}))), "recompute_modules has 'layernorm'",
    ),
    "ep * etp": (dict(world=40, ep=8, etp=5), {}, "heads_per_ngram is 16, expected a multiple or divisor of ep"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_estimate_raises_if_qwen4_exp_setting_is_unsupported(case):
    layout, training, message = UNSUPPORTED[case]
    with pytest.raises(ValueError, match=message):
        estimate(RELEASED, ParallelLayout(**dict(world=8, etp=1) | layout), TrainingSettings(**training))


def test_indivisible_sizes_lists_ngram_settings_that_ranks_cannot_divide():
    """16 hash heads of 160 columns: ranks divide the heads, or a multiple of the heads divides the columns."""

    def found(**sizes) -> set[str]:
        names = {"(ngram_size - 1) * heads_per_ngram", "ple_embed_dim", "hc_count * hidden_size"}
        return {one.setting for one in indivisible_sizes(RELEASED, **dict(tp=1) | sizes)} & names

    for ranks in (1, 2, 4, 8, 16, 32, 64, 80, 128, 160, 256, 512):
        assert found(ep=ranks) == found(ep=1, etp=ranks) == set(), ranks
    assert found(ep=3) == found(ep=24) == found(ep=4, etp=6) == {"(ngram_size - 1) * heads_per_ngram"}
    assert found(ep=48) == found(ep=1024) == {"ple_embed_dim"}
    assert found(tp=3, cp=1) == {"hc_count * hidden_size"} and not found(tp=8, cp=16)


def test_plan_of_released_qwen4_exp_finds_fitting_layouts(capsys):
    words = ["--gpus", "64", "--seq-length", "8192", "--max-patches", "8192", "--tp", "4", "--propose"]
    assert main(["--model", hub_ids("Flash-Next")[0], *words]) == 0
    assert "TP 4" in capsys.readouterr().out


def test_plan_with_frozen_ngram_table_counts_only_its_weights(capsys):
    """Each of 16 ranks has a sixteenth of the table; the 4 ranks that share it divide its optimizer states."""
    words = ["--gpus", "64", "--tp", "4", "--ep", "16", "--etp", "1", "--gpu-memory", "1000", "--json"]
    found = []
    for frozen in ([], ["--freeze", "ngram_table"]):
        assert main(["--model", "Flash-Next", *words, *frozen]) == 0
        found.append(json.loads(capsys.readouterr().out)["stages"][0])
    table = 160 * 320_001_536 // 16
    assert found[0]["parameters"] == found[1]["parameters"]
    assert found[0]["gradients"] - found[1]["gradients"] == 4 * table
    assert found[0]["optimizer"] - found[1]["optimizer"] == 12 * table // 4


def test_plan_with_ngram_table_in_fp8_counts_one_byte_per_element(capsys):
    words = ["--model", "Flash-Next", "--gpus", "64", "--tp", "4", "--ep", "16", "--etp", "1", "--gpu-memory", "1000"]
    fp8, found = ["--ngram-table-dtype", "float8_e4m3fn"], []
    for options in (["--freeze", "ngram_table"], ["--freeze", "ngram_table", *fp8], ["--kind", "peft", *fp8]):
        assert main([*words, *options, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["stages"][0])
    table = 160 * 320_001_536 // 16
    assert found[0]["parameters"] - found[1]["parameters"] == table
    assert found[0]["total"] - found[1]["total"] == table and found[2]["gradients"] < found[1]["gradients"]
    assert main([*words, "--freeze", "ngram_table", *fp8]) == 0
    assert "n-gram table in FP8" in " ".join(capsys.readouterr().out.split())
    assert main([*words, *fp8]) == 2
    assert "the n-gram table in FP8 is trained, which is not supported; freeze ngram_table" in capsys.readouterr().err
    assert main(["--model", "8B", "--gpus", "8", "--kind", "peft", *fp8]) == 2
    assert "--ngram-table-dtype is given, but 8B has no n-gram table; remove it" in capsys.readouterr().err


def test_plan_counts_full_fp8_ngram_table_on_each_fsdp_rank():
    """Its bytes are neither sharded nor gathered, unlike those of a table of parameters."""
    layout, frozen = ParallelLayout(8, etp=1), dict(sharding=Sharding.ALL, freezes_ngram_table=True)
    ((chunk,),) = layout.chunks(48)
    before, after = (
        estimate_states(RELEASED, layout, (chunk,), TrainingSettings(**frozen, fp8_ngram_table=fp8))
        for fp8 in (False, True)
    )
    table = 160 * 320_001_536
    assert after.parameters - before.parameters == table - 2 * table // 8
    assert before.gathered_weights > 2 * table > after.gathered_weights
    assert before.before_sharding - after.before_sharding == table


def test_plan_command_rejects_freeze_ngram_table_for_model_without_ngram_table(capsys):
    assert main(["--model", "8B", "--gpus", "8", "--freeze", "ngram_table"]) == 2
    assert "--freeze lists ngram_table, but 8B has no n-gram table; remove it" in capsys.readouterr().err


def test_flops_of_gated_residuals_and_ngrams_match_torch_flop_counter():
    """Exact for matrix products. The convolution is shifted products, which torch does not count."""
    config, dims = tiny_config()
    model = build(config, TrainingSettings(transformer_engine=False, precision=FP32, loss_chunk_tokens=0))
    batch = make_batch(make_samples("text only", config, seed=3), config, packed=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs=batch.local(ngram_hashes=model.config.ngram_hashes()))
    counted: Counter[str] = Counter()
    for module, operations in counter.get_flop_counts().items():
        counted[module.rpartition(".")[2]] += sum(operations.values())
    ordinary = replace(dims, sizes={**dims.sizes, "streams": 0})
    without = replace(ordinary, indices={**dims.indices, "ple_layers": ()})
    costs = [model_costs(one).token * batch.layout.total for one in (dims, ordinary, without)]
    residuals = ("input_layernorm", "pre_mlp_layernorm", "hyper_connection_mixer")
    assert sum(counted[name] for name in residuals) == costs[0] - costs[1]
    convolution = 2 * dims["ple_conv"] * dims["streams_hidden"] * batch.layout.total
    assert counted["ple"] == costs[1] - costs[2] - convolution


def test_flops_of_sparse_attention_are_linear_in_tokens_above_budget():
    costs = model_costs(RELEASED, Trained())
    assert costs.budget == 2048
    attention = replace(costs, token=0.0, token_pair=0.0)

    def attended(tokens: int, token_pairs: int | None = None) -> float:
        return attention.count_flops(tokens=tokens, patches=0, patch_pairs=0, token_pairs=token_pairs)

    for tokens in (1, 100, 2047, 2048, 2049, 8192, 131_072):
        visible = sum(min(place, 2048) for place in range(1, tokens + 1))  # of which each token sees itself
        assert attended(tokens) == pytest.approx(2 * attention.sparse_pair * (visible - min(tokens, 2048) / 2))
    lengths = (100, 5000, 2048, 30_000)
    together = attended(sum(lengths), sum(n**2 for n in lengths))
    each = sum(map(attended, lengths))
    assert each <= together <= 1.1 * each
    assert attended(4 * 5000, 4 * 5000**2) == pytest.approx(4 * attended(5000))
    assert TowerCosts(1.0, 1.0, 0.0, 0.0).count_flops(tokens=0, patches=0, patch_pairs=0) == 0


def test_flops_of_frozen_language_model_have_no_weight_gradients():
    """A step of the vision tower alone takes the forward pass and the gradients of inputs of the text model."""
    forward, frozen, full = (
        model_costs(RELEASED, trained) for trained in (None, Trained(language_model=False), Trained())
    )
    assert forward.token < frozen.token < full.token
    assert full.token == pytest.approx(3 * forward.token, rel=0.01)
    assert frozen.token == pytest.approx(2 * forward.token, rel=0.01)
    assert full.sparse_pair == frozen.sparse_pair == 3 * forward.sparse_pair
    assert full.token_pair == forward.token_pair  # the indexer has no backward pass


def test_planned_ngram_table_is_frozen_if_language_model_is_frozen():
    states = estimate_states(
        RELEASED, ONE, (only_chunk(RELEASED),), TrainingSettings(frozen=frozenset({Component.LANGUAGE_MODEL}))
    )
    assert states.gradients == 4 * (415_891_440 + 33_039_616)
