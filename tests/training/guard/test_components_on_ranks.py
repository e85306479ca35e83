"""With any parallel layout: learning rates and gradient norms by component equal one process; bad samples are named."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.training.callbacks import build_callbacks
from qwen3vl_bridge.training.config import GuardConfig, Qwen3VLLearningRates
from qwen3vl_bridge.training.guard import COMPONENT_NORMS
from qwen3vl_bridge.training.run_log import ENTRY

import pytest
import torch

from tests.helpers.batches import run_reference
from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import of_all_ranks
from tests.helpers.steps import Run, followed, train_step
from tests.parity.on_ranks import Split
from tests.parity.references import ADAM, CLIP, DECAY, MICROBATCHES, step_samples, worst
from tests.parity.topologies import TOPOLOGIES
from tests.training.running import messages, optimizer_states

STEPS, CONTENT = 4, "mixed"
TOWERS = dict(vision_model_lr=5e-4, vision_projection_lr=2e-3)
COMPONENTS = ("language_model", "vision_model", "vision_projection")


def component_of(name: str) -> str:
    if ".visual." not in name:
        return "language_model"
    return "vision_projection" if "merger" in name else "vision_model"


def train_reference(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    named = dict(model.named_parameters())
    rates = Qwen3VLLearningRates(**TOWERS)
    groups = [
        dict(
            params=[p for name, p in named.items() if component_of(name) == component and (p.ndim > 1) == decays],
            lr=getattr(rates, f"{component}_lr") or ADAM["lr"],
            weight_decay=DECAY if decays else 0.0,
        )
        for component in COMPONENTS
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, **ADAM)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        microbatches = step_samples(CONTENT, model.config, step)
        tokens = sum(sample.loss_mask.sum() for samples in microbatches for sample in samples)
        for samples in microbatches:
            (run_reference(model, samples)[1] / tokens).backward()
        gradients = {
            component: [p.grad for name, p in named.items() if component_of(name) == component]
            for component in COMPONENTS
        }
        norms.append({component: torch.nn.utils.get_total_norm(some).item() for component, some in gradients.items()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return dict(norms=norms, weights={name: p.detach().clone() for name, p in named.items()})


HALF = dict(mixed_precision="bf16_mixed")
# The bad microbatch of the last step, with two samples; its last patches are a video of the second sample.
BAD_MICROBATCH, BEFORE, BAD = 2, "2.0", "2.1"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: ("dense", name, {}) for name in ("DP2", "CP2", "PP2", "TP2+SP", "DP2, distributed optimizer")},
    "EP2": ("MoE", "EP2", {}), "bfloat16, distributed optimizer": ("dense", "DP2, distributed optimizer", HALF),
}  # fmt: skip


def named(batch: TokenBatch, number: int) -> TokenBatch:
    return replace(batch, sample_ids=tuple(f"{number}.{i}" for i, n in enumerate(batch.layout.lengths) if n))


def with_bad_pixels(batch: TokenBatch) -> TokenBatch:
    pixels = batch.vision.pixel_values.clone()
    pixels[-1] = torch.nan
    return replace(batch, vision=replace(batch.vision, pixel_values=pixels))


def tensors_of(run: Run) -> list[torch.Tensor]:
    """Return weights and moments."""
    weights = [p.detach().clone() for chunk in run.model for p in chunk.parameters()]
    return weights + [value.clone() for state in optimizer_states(run.optimizer) for value in state.values()]


def one_case(case: str, folders: dict[str, str]) -> dict[str, Any]:
    family, name, settings = CASES[case]
    rates = dict(optimizer_config_override_provider=Qwen3VLLearningRates(**TOWERS), train__train_iters=STEPS + 1)
    split = Split(folders[family], TOPOLOGIES[name], **settings | rates)
    run, rows = split.run, split.batches(CONTENT, "packed", steps=STEPS + 1)
    run.cfg.guard = GuardConfig(on_nan="skip")
    with followed(run, build_callbacks(run.cfg)) as shared:
        run.stream, norms, totals = rows, [], []
        for _ in range(STEPS):
            train_step(run)
            norms.append(dict(shared[COMPONENT_NORMS]))
            totals.append(shared[ENTRY]["grad_norm"])
        return dict(norms=norms, totals=totals, weights=split.exported()) | bad_step(run, rows)


def bad_step(run: Run, rows: Iterator[TokenBatch]) -> dict[str, Any]:
    """Train a step with a bad sample. Return whether it was skipped and changed nothing, and the messages."""
    before = tensors_of(run)
    rank, size = run.groups.dp.rank(), run.groups.dp.size()
    numbers = range(rank, MICROBATCHES, size)
    batches = [named(batch, number) for number, batch in zip(numbers, rows, strict=True)]
    batches = [
        with_bad_pixels(batch) if number == BAD_MICROBATCH else batch
        for number, batch in zip(numbers, batches, strict=True)
    ]
    run.stream = iter(batches)
    with messages("qwen3vl_bridge.training.guard") as said:
        entry = train_step(run)
    after = tensors_of(run)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    return dict(skipped="skipped" in entry, same=same, messages=said)


def all_cases(folders: dict[str, Path], references: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for case, (family, _, settings) in CASES.items():
        found[case] = one_case(case, folders)
        weights = found[case].pop("weights")
        found[case]["weight"] = None if settings else worst(weights, references[family]["weights"], scale=ADAM["lr"])
        one, other = of_all_ranks(found[case])
        found[case]["alike"] = all(one[key] == other[key] for key in ("norms", "totals", "skipped", "same"))
    return found


pytestmark = pytest.mark.slow

# Relative errors of norms, measured 2.1e-7, in bfloat16 1.5e-3, and of the total norm 1.0e-7. Error of weights after
# four steps, in units of the learning rate, measured 3.1e-4.
NORM, HALF_NORM, TOTAL, WEIGHT = 1e-6, 1e-2, 1e-6, 2e-3


@pytest.fixture(scope="module")
def references(untied_folder, moe_folder):
    folders = {"dense": untied_folder, "MoE": moe_folder}
    return folders, {family: train_reference(folder) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def found(references):
    return results_of_ranks(all_cases, 2, *references)


@pytest.mark.parametrize("case", CASES)
def test_component_learning_rates_and_norms_on_ranks_match_transformers(references, found, case):
    family, _, settings = CASES[case]
    reference, ours = references[1][family], found[case]
    assert ours["alike"]
    for step in range(STEPS):
        expected, norms = reference["norms"][step], ours["norms"][step]
        limit = HALF_NORM if settings is HALF else NORM
        errors = {
            component: abs(norms[component] - expected[component]) / max(expected[component], 1e-9)
            for component in COMPONENTS
        }
        assert max(errors.values()) <= limit, (case, step, errors)
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        assert abs(total / ours["totals"][step] - 1) <= TOTAL, (case, step, total)
    assert settings is HALF or ours["weight"] <= WEIGHT, (case, ours["weight"])


@pytest.mark.parametrize("case", CASES)
def test_guard_on_ranks_skips_step_and_names_sample_with_nan_loss(found, case):
    ours = found[case]
    assert ours["skipped"] and ours["same"] and len(ours["messages"]) == 1, ours
    (message,) = ours["messages"]
    assert message.startswith(f"step {STEPS + 1}: the loss is nan, expected a finite value; the step is skipped")
    # On processors with AMX, torch's bfloat16 GEMM with 80 columns leaks NaN to the row before: the last token of the
    # sample before.
    before = [[], [BEFORE]] if CASES[case][2] is HALF else [[]]
    names = re.findall(r"(\S+) \(nan\)", message)
    assert names in [[*some, BAD] for some in before] and message.endswith(f" {BAD} (nan)")
