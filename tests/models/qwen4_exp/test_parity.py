"""Qwen3.8-Flash-Next against transformers in one process, and parallel layouts against one process of ours."""

import json
import os
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from transformers import AutoConfig

from tests.distributed import test_fsdp
from tests.helpers.batches import CONTENTS, make_batch, make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.newer_transformers import needs_newer_transformers, run_with_newer_transformers
from tests.helpers.noise import check, relative
from tests.helpers.ranks import of_all_ranks
from tests.models.qwen4_exp.tiny import make_checkpoint
from tests.parity.conftest import build
from tests.parity.matrix import Case, run
from tests.parity.on_ranks import MICROBATCHES, STEPS, Split, forward_backward, train_step
from tests.parity.topologies import TOPOLOGIES, Topology

# Measured: logits 5.8e-6, loss 1.7e-7, gradients 1.9e-5 of their largest entry, with MTP 8.6e-5. The largest are of
# decays of linear attention, and of the n-gram embedding, whose gate has the square root of a number near zero.
LARGEST = {"logits": 2e-5, "loss": 1e-6, "gradients": 5e-4}


@pytest.fixture(scope="module")
def against_transformers():
    return run_with_newer_transformers("tests.models.qwen4_exp.against_transformers")


@pytest.mark.one_case_in(13)
@needs_newer_transformers
@pytest.mark.parametrize("rows", ["rows", "packed"])
@pytest.mark.parametrize("content", [*CONTENTS, "MTP"])
def test_qwen4_exp_logits_loss_and_gradients_match_transformers(against_transformers, content, rows):
    errors, limits = against_transformers[f"{content}, {rows}"]
    check(errors, {name: min(limits[name], LARGEST[name]) for name in errors})


@needs_newer_transformers
def test_qwen4_exp_greedy_tokens_match_transformers(against_transformers):
    assert against_transformers["different tokens"] == 0


def own_results(folder: Path) -> dict[str, Any]:
    """Return two steps of the model in one process, in the form of the references of other families."""
    split = Split(folder, Topology(1))
    split.begin(split.batches("mixed", "packed"), "packed")
    forward_backward(split.run, split.run.stream, MICROBATCHES)
    gradients = split.gradients()
    split.begin(split.batches("mixed", "packed"), "packed")
    logs = [train_step(split.run) for _ in range(STEPS)]
    return dict(
        losses=[log["loss"] for log in logs],
        norms=[log["grad_norm"] for log in logs],
        gradients=gradients,
        weights=split.exported(),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a model, with the results of one process. Ranks may have other numbers of rows."""
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen4_exp"), seed=5)
    (folder / "provider.json").write_text(json.dumps(dict(variable_seq_lengths=True, mtp_loss_scaling_factor=0.3)))
    torch.save(results_of_ranks(own_results, 1, folder), folder / "reference_mixed.pt")
    return folder


# Measured with MTP: 1.5e-7, 1.7e-4, 1.2e-4 of the largest entry of a gradient (with context parallelism 7e-5, otherwise
# without tensor parallelism 4e-6), 0.05 of the learning rate.
ON_RANKS = {"loss": 1e-6, "grad_norm": 5e-4, "gradient": 5e-4, "weight": 0.2}
ROWS = ("padded", "packed")


def check_layouts(folder: Path, ranks: int, names: tuple[str, ...]) -> None:
    chosen: list[Case] = [("MoE", name, "mixed", ROWS[i % 2]) for i, name in enumerate(names)]
    found = run(chosen, {"MoE": folder}, ranks)
    assert found.keys() == set(chosen)
    for case, errors in found.items():
        print(case)
        check({name: errors[name] for name in ON_RANKS if name in errors}, ON_RANKS)


@pytest.mark.slow
def test_qwen4_exp_on_two_ranks_trains_as_in_one_process(folder):
    check_layouts(folder, 2, ("TP2+SP+EP2", "CP2", "PP2", "EP2", "CP2, chunkwise"))


@pytest.mark.slow
def test_qwen4_exp_on_two_ranks_in_all_layouts_trains_as_in_one_process(folder):
    names = ("TP2+SP", "TP2+SP+ETP2", "CP2+EP2", "PP2+VPP2", "DP2", "DP2, distributed optimizer", "EP2, DeepEP")
    check_layouts(folder, 2, (*names, "CP2+EP2, chunkwise"))


@pytest.mark.slow
def test_qwen4_exp_on_four_ranks_trains_as_in_one_process(folder):
    check_layouts(
        folder,
        4,
        (
            *("CP4", "PP4", "TP4+SP", "TP2+SP+CP2+EP2", "PP2+DP2+EP2", "PP2+TP2+SP+EP2", "PP2+VPP2+CP2"),
            "PP2+CP2, chunkwise",
        ),
    )


def stages_with_ngrams(folder: Path) -> list[list[tuple[bool, bool]]]:
    """Return for each chunk of each rank whether it has an n-gram table, and whether its input has ids of n-grams."""
    split = Split(folder, TOPOLOGIES["PP2+VPP2"])
    split.begin(split.batches("mixed", "packed"), "packed")
    chunks, found = [unwrap_model(chunk) for chunk in split.run.model], {}
    for number, chunk in enumerate(chunks):
        chunk.register_forward_pre_hook(
            lambda _, __, given, number=number: found.update({number: given["inputs"].ngram_ids is not None}),
            with_kwargs=True,
        )
    forward_backward(split.run, split.run.stream, MICROBATCHES)
    has_table = [any(".ngram_embedding." in name for name, _ in chunk.named_parameters()) for chunk in chunks]
    return of_all_ranks([(has_table[number], found[number]) for number in range(len(chunks))])


@pytest.mark.slow
def test_only_pipeline_stages_with_ngram_table_get_ngram_ids(folder):
    """Of four chunks with one layer each, the second has the table: the first chunk of the second rank."""
    nothing, both = (False, False), (True, True)
    assert results_of_ranks(stages_with_ngrams, 2, folder) == [[nothing, nothing], [both, nothing]]


CONTENTS_OF_RANKS = ("video", "text only")


def gradients_under_fsdp(folder: Path) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Return of each rank the loss of its content, and its rows of the gradients."""
    model = test_fsdp.build(folder)
    model.zero_grad_buffer()
    loss = backward(model, folder, CONTENTS_OF_RANKS[int(os.environ["RANK"])])
    model.finish_grad_sync()
    return of_all_ranks((loss, test_fsdp.gradients(model)))


def backward(model: torch.nn.Module, folder: Path, content: str) -> float:
    """Run a forward and a backward pass on a packed row, and return the sum of losses."""
    groups, config = ProcessGroupCollection.use_mpu_process_groups(), AutoConfig.from_pretrained(folder)
    batch = make_batch(make_samples(content, config, seed=11), config, packed=True)
    inputs = batch.local(**unwrap_model(model).config.local_arguments(groups))
    loss = (model(inputs=inputs) * inputs.loss_mask).sum()
    loss.backward()
    return loss.item()


def gradients_alone(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and gradients of the contents of all ranks in one process."""
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
    provider.calculate_per_token_loss, provider.moe_aux_loss_coeff = True, 0.0
    model = build(provider).train()
    losses = [backward(model, folder, content) for content in CONTENTS_OF_RANKS]
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_qwen4_exp_gradients_with_megatron_fsdp_match_one_process(folder):
    losses, expected = results_of_ranks(gradients_alone, 1, folder)
    ranks = results_of_ranks(gradients_under_fsdp, 2, folder)
    assert [loss for loss, _ in ranks] == pytest.approx(losses, rel=1e-6)
    found = {
        name: torch.cat([rows[name].flatten() for _, rows in ranks]).view(gradient.shape)
        for name, gradient in expected.items()
    }
    check({"gradient": max(relative(found, expected).values())}, {"gradient": 2e-5})  # measured 0
