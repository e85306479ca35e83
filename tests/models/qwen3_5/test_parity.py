"""Qwen3.5 against transformers in all parallel layouts: logits, loss and every gradient in float32 on the CPU."""

import itertools

import pytest

from tests.distributed.test_cp_check import LENGTHS, RANKS, check_sizes, steps_of_sizes
from tests.distributed.test_fsdp import check_models, run_models
from tests.helpers.batches import CONTENTS, make_batch, make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import check, relative
from tests.models.qwen3_5.conftest import pair_with_mtp
from tests.models.qwen3_5.tiny import ROPE, with_mtp
from tests.parity.conftest import make_pair
from tests.parity.matrix import MODELS, some_cases, with_references
from tests.parity.matrix import check as check_matrix
from tests.parity.test_parity import check_parity, run_megatron
from tests.parity.test_recompute import FULL, of_vision
from tests.parity.test_settings import SCALED, assert_parity_of_change, changed


@pytest.fixture(scope="module", params=["dense", "tied", "moe"])
def pair(request, qwen3_5_folders):
    return pair_with_mtp(qwen3_5_folders, request.param)


@pytest.mark.parametrize("content", CONTENTS)
def test_qwen3_5_logits_loss_and_gradients_match_transformers(pair, content):
    """The reference gets one sample at a time: its linear attention does not restart in a packed row."""
    samples = make_samples(content, pair.config, seed=3)
    check_parity(pair, samples, *(make_batch(samples, pair.config, packed=packed) for packed in (False, True)))


def test_qwen3_5_layers_are_three_linear_attention_and_one_full_attention(pair):
    layers = [type(layer.self_attention).__name__ for layer in pair.megatron.language_model.decoder.layers]
    assert layers == ["LinearAttention"] * 3 + ["RotarySelfAttention"]
    assert not pair.megatron.vision_model.deepstack_layers


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", SCALED)
def test_qwen3_5_scaled_rope_matches_transformers(kind, qwen3_5_folders, tmp_path):
    scaled = ROPE | dict(rope_type=kind, **SCALED[kind])
    folder = changed(qwen3_5_folders["dense"], tmp_path / kind, rope_parameters=scaled)
    assert_parity_of_change(make_pair(qwen3_5_folders["dense"]), pair_with_mtp({kind: folder}, kind))


PARTS = ("language_model", "vision_model", "vision_projection")
RECOMPUTE = FULL | of_vision(FULL)


def component_of(name: str) -> str:
    if not name.startswith("model.visual."):
        return "language_model"
    return "vision_projection" if name.startswith("model.visual.merger.") else "vision_model"


@pytest.mark.one_case_in(35)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rests", itertools.product((False, True), repeat=3))
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_qwen3_5_gradients_with_frozen_components_match_transformers(qwen3_5_folders, kind, rests, recompute):
    flags = {f"freeze_{part}": rest for part, rest in zip(PARTS, rests, strict=True)}
    settings = (RECOMPUTE if recompute else {}) | ({"moe_aux_loss_coeff": 0.0} if kind == "moe" else {})
    pair = make_pair(qwen3_5_folders[kind], **flags, **settings)
    trained = {name: p.requires_grad for name, p in pair.megatron.named_parameters()}
    if all(rests):
        assert not any(trained.values())
        return
    samples = make_samples("mixed", pair.config, seed=4)
    expected = pair.reference_results(samples)
    found = run_megatron(pair, make_batch(samples, pair.config, packed=True)).gradients
    assert {name: p.grad is not None for name, p in pair.megatron.named_parameters()} == trained
    # MTP is kept, and trained where asked for.
    rest = {name for name in found if name.startswith("mtp.") or flags[f"freeze_{component_of(name)}"]}
    assert not any(found.pop(name).any() for name in rest)
    error = max(relative(found, expected.gradients).values())
    check({"gradients": error}, pair.limits(samples, expected))


MATRIX = MODELS["qwen3_5"]


@pytest.fixture(scope="module")
def both(qwen3_5_folders):
    return {"dense": qwen3_5_folders["dense"], "MoE": qwen3_5_folders["yarn"]}


@pytest.fixture(scope="module")
def folders(both, tmp_path_factory):
    return with_references(both, tmp_path_factory.mktemp("references"), **MATRIX.settings)


@pytest.mark.slow
def test_qwen3_5_training_on_two_ranks_matches_transformers(both, tmp_path):
    chosen = [("MoE", split, "mixed", "packed") for split in ("TP2+SP+EP2", "CP2+EP2", "PP2")]
    references = with_references({"MoE": both["MoE"]}, tmp_path, ["mixed"], **MATRIX.settings)
    check_matrix(chosen, *references, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_qwen3_5_with_combined_parallelism_matches_transformers(folders, ranks):
    chosen = [case for case in some_cases(ranks, each=1, both=False) if case[1] not in MATRIX.refused]
    check_matrix(chosen, *folders, ranks)


@pytest.fixture(scope="module")
def of_fsdp(both):
    return run_models(*both.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_qwen3_5_fsdp_losses_and_gradients_match_transformers(of_fsdp, kind, both):
    *losses, gradients, _ = of_fsdp
    pair = make_pair(both[kind], **(dict(moe_aux_loss_coeff=0.0) if kind == "MoE" else {}))
    with_mtp(pair.reference, both[kind])
    check_models(pair, both[kind], losses, gradients)


@pytest.fixture(scope="module")
def of_sizes(both):
    return results_of_ranks(steps_of_sizes, RANKS, *both.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "MoE"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_qwen3_5_context_parallel_4_matches_context_parallel_1(of_sizes, kind, lengths):
    """Heads of linear attention are divided over ranks, for padded and packed rows."""
    check_sizes(of_sizes, kind, lengths)
