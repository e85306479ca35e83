"""Loss, gradients and metrics of embedding models and rerankers equal a direct computation with transformers."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import DocumentGroups, TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.training.objective_settings import ObjectiveConfig
from qwen3vl_bridge.training.retrieval import freeze_unused_output, info_nce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.batches import Sample, make_batch, make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import SEEDS, allowed, check, rounded
from tests.helpers.ranks import largest
from tests.parity.on_ranks import Split
from tests.parity.references import MICROBATCHES, torch_linear_attention
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.training.objective_steps import compare
from tests.training.objective_steps import run_step as run_microbatches

SETTINGS = {
    "embedding": ObjectiveConfig(kind="embedding", temperature=0.1, max_documents=24),
    "matryoshka": ObjectiveConfig(
        kind="embedding", temperature=0.1, max_documents=24, matryoshka_dims=[8, 20], false_negative_margin=0.05
    ),
    "reranker": ObjectiveConfig(kind="reranker"),
}
# Relative, of loss and metrics, and of each gradient to its largest entry. Measured 7.8e-7, 1.3e-7 and 6.6e-6 over all
# settings and layouts.
LOSS, GRADIENT = 2e-6, 1e-5
YES, NO = 7, 90  # on different tensor-parallel ranks
CONTENTS = ("mixed", "text only", "image and video", "one image")


def records_of_microbatch(kind: str, config: Any, number: int) -> list[list[Sample]]:
    """Return the documents of each record: prompts that end before an answer. They differ in length and images.

    An embedding model's record has a query, a positive document and 0 to 2 negative ones; a reranker's has 1 to 3
    documents. The last record of the second microbatch could not be read.
    """
    rng = torch.Generator().manual_seed(number)
    sides = [make_samples(CONTENTS[number], config, seed=90 * number + side) for side in range(4)]
    records = []
    for place, samples in enumerate(zip(*sides, strict=True)):
        count = 2 + (number + place) % 3 if kind == "embedding" else 1 + (number + place) % 3
        record = []
        for one, sample in enumerate(samples[:count]):
            answer = int(torch.randint(3, 20, (), generator=rng)) if kind == "embedding" else (YES, NO)[one % 2]
            ids = torch.cat((sample.ids, torch.tensor([answer, 3])))
            mask = torch.zeros(len(ids))
            mask[len(sample.ids) - 1 : len(ids) - 1] = 1
            record.append(Sample(ids, mask, sample.pixels))
        records.append(record)
    if number == 1:
        blank = Sample(torch.tensor([3]), torch.zeros(1), {})
        records[-1] = [blank, blank]
    return records


def batches(kind: str, config: Any, multiple: int, tokens: int | None) -> Iterator[TokenBatch]:
    """Yield the microbatches as packed rows."""
    for number in range(MICROBATCHES):
        records = records_of_microbatch(kind, config, number)
        samples = [sample for record in records for sample in record]
        lengths = [-(-len(sample.ids) // multiple) * multiple for sample in samples]
        layout = SequenceLayout.packed_row(
            [len(sample.ids) for sample in samples], multiple=multiple, total=tokens or sum(lengths) + multiple
        )
        answers = (YES, NO) if kind == "reranker" else None
        groups = DocumentGroups(kind, tuple(map(len, records)), answer_tokens=answers)
        yield dataclasses.replace(make_batch(samples, config, layout=layout), groups=groups)


def run_step(split: Split, objective: ObjectiveConfig) -> dict[str, Any]:
    """Return the results of a global batch, on all ranks."""
    return run_microbatches(
        split, objective, lambda multiple: batches(objective.kind, split.hf_config, multiple, split.tokens)
    )


def hidden_states(model: torch.nn.Module, sample: Sample) -> tuple[Tensor, int]:
    """Return the hidden state [h] of the last token of a prompt, and the first token of the answer."""
    ids, last = sample.ids[None], int(sample.loss_mask.argmax())
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    return model.model(input_ids=ids, mm_token_type_ids=kinds, **sample.pixels).last_hidden_state[0, last], last + 1


def embedding_loss(model: torch.nn.Module, settings: ObjectiveConfig, dp: int) -> dict[str, Any]:
    """Return the mean InfoNCE loss over queries, computed query by query; candidates come from `dp` microbatches."""
    losses, found = [], {name: list[float]() for name in settings.metrics}
    for first in range(0, MICROBATCHES, dp):
        read = [r for n in range(first, first + dp) for r in records_of_microbatch(settings.kind, model.config, n)]
        vectors = [[hidden_states(model, sample)[0] for sample in r] for r in read if r[0].loss_mask.any()]
        for place, (query, *own) in enumerate(vectors):
            per_size = []
            for size in sorted({*(settings.matryoshka_dims or ()), len(query)}):
                documents = [own[0], *own[1:]]
                documents += [one for n, other in enumerate(vectors) if n != place for one in other[1:]]
                cosine = torch.stack([F.cosine_similarity(query[:size], one[:size], dim=0) for one in documents])
                positive, others = cosine[0], cosine[1:]
                if settings.false_negative_margin is not None:
                    others = others[others <= positive + settings.false_negative_margin]
                logits = torch.cat((positive[None], others)) / settings.temperature
                per_size.append(-logits.log_softmax(0)[0])
            losses.append(torch.stack(per_size).mean())
            nearest = others.max().item() if len(others) else -math.inf
            found["accuracy"].append(float(positive.item() > nearest))
            found["similarity/positive"].append(positive.item())
            found["similarity/negative"] += [nearest] * (nearest > -math.inf)
    return dict(losses=losses, found=found)


def reranker_loss(model: torch.nn.Module, settings: ObjectiveConfig) -> dict[str, Any]:
    """Return the mean binary cross-entropy over documents; the score is the one of Qwen3-VL-Reranker's script."""
    losses, found = [], {name: list[float]() for name in settings.metrics}
    for number in range(MICROBATCHES):
        for sample in (s for record in records_of_microbatch("reranker", model.config, number) for s in record):
            if not sample.loss_mask.any():
                continue
            hidden, answer = hidden_states(model, sample)
            score = torch.sigmoid(hidden @ (model.lm_head.weight[YES] - model.lm_head.weight[NO]))
            is_positive = sample.ids[answer].item() == YES
            losses.append(-(score if is_positive else 1 - score).log())
            found["accuracy"].append(float((score.item() > 0.5) == is_positive))
            found["score/positive" if is_positive else "score/negative"].append(score.item())
    return dict(losses=losses, found=found)


def expected_step(folder: Path, settings: ObjectiveConfig, dp: int = 1, seed: int | None = None) -> dict[str, Any]:
    """Return loss, metrics and gradients; `seed` moves each weight by one unit in the last place."""
    from transformers import AutoModelForImageTextToText

    with torch_linear_attention():
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    with rounded(model, seed):
        if settings.kind == "reranker":
            computed = reranker_loss(model, settings)
        else:
            computed = embedding_loss(model, settings, dp)
        loss = torch.stack(computed["losses"]).mean()
        loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}
    metrics = {name: math.fsum(values) / len(values) for name, values in computed["found"].items()}
    return dict(loss=loss.item(), number=len(computed["losses"]), metrics=metrics, gradients=gradients)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("family", ["dense", "MoE", "Qwen3.5"])
def test_retrieval_step_one_process_matches_transformers(family_folders, family):
    split = Split(family_folders[family], Topology(1))
    for name in SETTINGS if family == "dense" else ["embedding", "reranker"]:
        expected = expected_step(family_folders[family], SETTINGS[name])
        limits = dict(loss=LOSS, metrics=LOSS, gradient=GRADIENT)
        if family == "Qwen3.5":  # linear attention multiplies rounding errors
            noisy = (expected_step(family_folders[family], SETTINGS[name], seed=seed) for seed in SEEDS)
            limits = allowed(compare(one, expected) for one in noisy)
        errors = compare(run_step(split, SETTINGS[name]), expected)
        print(name, errors)
        check(errors, limits)


def errors_of_ranks(folders: dict[str, Path], expected: dict[Any, dict], names: list[str]) -> dict:
    found = {}
    for name in names:
        for family in TOPOLOGIES[name].families:
            split = Split(folders[family], TOPOLOGIES[name])
            for kind in ("matryoshka", "reranker"):
                one = expected[family, kind, split.run.groups.dp.size()]
                found[name, family, kind] = largest(compare(run_step(split, SETTINGS[kind]), one))
    return found


@pytest.fixture(scope="module")
def expected_of_ranks(family_folders):
    cases = [(family, kind, dp) for family in ("dense", "MoE") for kind in ("matryoshka", "reranker") for dp in (1, 2)]
    return {case: expected_step(family_folders[case[0]], SETTINGS[case[1]], case[2]) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("names", [["TP2+SP", "CP2"], ["TP2", "DP2", "PP2"], ["PP2+VPP2", "EP2", "CP2+EP2"]])
def test_retrieval_step_two_ranks_matches_transformers(family_folders, expected_of_ranks, names):
    found = results_of_ranks(errors_of_ranks, 2, family_folders, expected_of_ranks, names)
    print(found)
    assert len(found) >= 2 * len(names)
    for errors in found.values():
        assert errors["loss"] <= LOSS and errors["metrics"] <= LOSS and errors["gradient"] <= GRADIENT


def test_freeze_unused_output_freezes_only_untied_output_layer(family_folders):
    split = Split(family_folders["dense"], Topology(1))
    frozen = freeze_unused_output(split.run.model)
    names = [name for name, p in frozen[0].named_parameters() if not p.requires_grad]
    assert [name.split("language_model.")[-1] for name in names] == ["output_layer.weight"]


def test_freeze_unused_output_freezes_nothing_with_tied_embeddings(tied_folder):
    split = Split(tied_folder, Topology(1))
    assert all(p.requires_grad for chunk in freeze_unused_output(split.run.model) for p in chunk.parameters())


def test_info_nce_compares_only_given_candidates():
    """A query, its document and two others: one with an equal text, one of another rank."""
    rng = torch.Generator().manual_seed(1)
    query, documents = torch.randn(1, 6, generator=rng), torch.randn(4, 6, generator=rng)
    settings, positive = SETTINGS["embedding"], torch.tensor([1])
    for compared in ([False, False, True, True], [True, False, True, False], [False] * 4):
        loss, own, nearest = info_nce(settings, query, documents, torch.tensor([compared]), positive)
        cosine = F.cosine_similarity(query, documents)
        others = [i for i, is_compared in enumerate(compared) if is_compared and i != 1]
        logits = cosine[[1, *others]] / settings.temperature
        torch.testing.assert_close(loss[0], -logits.log_softmax(0)[0])
        torch.testing.assert_close(own[0], cosine[1])
        torch.testing.assert_close(nearest[0], cosine[others].max() if others else torch.tensor(-torch.inf))


@pytest.mark.parametrize("kind", ["sft", "reranker"])
def test_forward_step_raises_if_batch_has_records_of_another_objective(family_folders, kind):
    split = Split(family_folders["dense"], Topology(1))
    with pytest.raises(ValueError, match=f"objective.kind is '{kind}', but the batch has records for 'embedding'"):
        run_microbatches(
            split, ObjectiveConfig(kind=kind), lambda multiple: batches("embedding", split.hf_config, multiple, None)
        )
