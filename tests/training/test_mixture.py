"""A mixture trained on two data-parallel ranks in Megatron-Bridge's loop: the rows of one rank, and an exact resume."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from tests.forked import run_ranks

from .mixture_on_ranks import ROWS, STEPS, Mixed, run

pytestmark = pytest.mark.slow

# Relative, of losses and gradients' norms of two ranks beside one in float32. Measured 6.8e-8 and less.
LIMIT = 1e-6
SHARES = {"weights": ({"weight": 1}, {"weight": 3}), "epochs": ({"epochs": 0.5}, {"epochs": 4})}


@pytest.fixture(scope="module")
def sets(inputs, tmp_path_factory):
    """By the kind of share: forty digits and eight conversations without pictures."""
    folder = tmp_path_factory.mktemp("talk")
    said = [[f"What is {n} and {n}?", f"It is {2 * n}."] for n in range(8)]
    talk = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in said
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in talk))
    places = ({"path": str(inputs.data / "train.jsonl"), "name": "digits"}, {"path": str(folder), "name": "talk"})
    return {
        kind: [{**place, **share} for place, share in zip(places, shares, strict=True)]
        for kind, shares in SHARES.items()
    }


@pytest.fixture(scope="module")
def found(inputs, sets, tmp_path_factory):
    """What runs on two ranks have found: each mixture in two halves, and one at once."""
    root, hf = tmp_path_factory.mktemp("mixed"), str(inputs.hf)
    cases = [Mixed("weights", hf, sets["weights"])]
    for kind, of_kind in sets.items():
        cases += [
            Mixed(f"{kind}, {half}", hf, of_kind, str(root / kind), stop)
            for half, stop in (("first", STEPS // 2), ("second", None))
        ]
    output = root / "found.pt"
    run_ranks("tests.training.mixture_on_ranks", 2, output, json.dumps([asdict(case) for case in cases]), timeout=400)
    return torch.load(output)


@pytest.mark.parametrize("kind", SHARES)
def test_two_ranks_train_on_the_rows_of_one_and_go_on_exactly(found, inputs, sets, kind):
    alone = run(Mixed(kind, str(inputs.hf), sets[kind]))
    first, second = found[f"{kind}, first"], found[f"{kind}, second"]
    assert [entry[0] for entry in alone["log"]] == list(range(1, STEPS + 1))
    # Rows: each rank its own, all of them those of one rank, whatever a loader has read ahead.
    wanted = range(STEPS * ROWS)
    assert set(first["rows"]) >= set(wanted[: len(wanted) // 2]) and set(second["rows"]) >= set(
        wanted[len(wanted) // 2 :]
    )
    for half in (first, second):
        one, other = map(set, half["by rank"])
        assert one and other and not one & other
        assert all(half["rows"][number] == alone["rows"][number] for number in half["rows"] if number in wanted)
    assert min(second["rows"]) == len(wanted) // 2  # it has read nothing again
    # Steps.
    halves = first["log"] + second["log"]
    worst = max(
        abs(a / b - 1)
        for entry, expected in zip(halves, alone["log"], strict=True)
        for a, b in zip(entry[1:], expected[1:], strict=True)
    )
    print(kind, "relative error", worst)
    assert [entry[0] for entry in halves] == list(range(1, STEPS + 1)) and worst <= LIMIT
    if kind in found:  # at once, on as many ranks: to the bit
        assert found[kind]["log"] == halves and found[kind]["rows"] == first["rows"] | second["rows"]


@pytest.mark.parametrize(("kind", "share"), [("weights", 3 / 4), ("epochs", 32 / 52)])
def test_the_rows_have_the_shares_that_are_set(found, kind, share):
    rows = found[f"{kind}, first"]["rows"] | found[f"{kind}, second"]["rows"]
    seen = Counter(name.partition("/")[0] for samples in rows.values() for name in samples)
    total = sum(seen.values())
    print(kind, seen)
    assert total > 48 and abs(seen["talk"] / total - share) < 0.1
