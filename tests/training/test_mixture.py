"""A mixture on two data-parallel ranks in Megatron-Bridge's loop: rows as on one rank, and bit-exact resume."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.data import RowDataset

import pytest
import torch.distributed as dist

from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import of_all_ranks
from tests.training.running import configured, train

STEPS, ROWS = 4, 4  # and rows of a step
LOGGED = ("step", "loss", "grad_norm", "trained_tokens")


@dataclass
class Mixed:
    name: str
    hf: str
    sets: list[dict[str, Any]]
    save: str | None = None
    stop_after: int | None = None

    def config(self) -> Any:
        settings = dict(
            dataset__path=None, dataset__mixture=self.sets, dataset__window_size=16, dataset__pad_to_multiple_of=8,
            train__global_batch_size=ROWS, train__train_iters=STEPS, validation__eval_iters=0,
            checkpoint__save_interval=STEPS,
        )  # fmt: skip
        return configured(self.hf, "none", self.hf, self.save, settings, distributed=True)


def run(case: Mixed) -> dict[str, Any]:
    """Return the log of each step, and the samples of each row that any rank has read, by row number."""
    with _reading() as rows:
        log = train(case.config(), stop_after=case.stop_after)
    ranks = of_all_ranks(rows) if dist.is_initialized() else [rows]
    found = {number: samples for each in ranks for number, samples in each.items()}
    return {"log": [[entry[name] for name in LOGGED] for entry in log], "rows": found, "by rank": ranks}


@contextlib.contextmanager
def _reading() -> Iterator[dict[int, list[str]]]:
    rows, read = {}, RowDataset.__getitem__

    def noted(self: RowDataset, number: int) -> Any:
        row = read(self, number)
        rows[number] = [sample.sample_id for sample in row.samples]
        return row

    RowDataset.__getitem__ = noted
    try:
        yield rows
    finally:
        RowDataset.__getitem__ = read


def run_all(cases: list[Mixed]) -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    return {case.name: run(case) for case in cases}


pytestmark = pytest.mark.slow

# Relative, of losses and gradients' norms of two ranks beside one in float32. Measured 6.8e-8 and less.
LIMIT = 1e-6
SHARES = {"weights": ({"weight": 1}, {"weight": 3}), "epochs": ({"epochs": 0.5}, {"epochs": 4})}


@pytest.fixture(scope="module")
def sets(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("talk")
    with (folder / "train.jsonl").open("w") as file:
        for n in range(8):
            asked = {"role": "user", "content": f"What is {n} and {n}?"}
            answered = {"role": "assistant", "content": f"It is {2 * n}."}
            file.write(json.dumps({"messages": [asked, answered]}) + "\n")
    places = ({"path": str(inputs.data / "train.jsonl"), "name": "digits"}, {"path": str(folder), "name": "talk"})
    return {
        kind: [{**place, **share} for place, share in zip(places, shares, strict=True)]
        for kind, shares in SHARES.items()
    }


@pytest.fixture(scope="module")
def found(inputs, sets, tmp_path_factory):
    root, hf = tmp_path_factory.mktemp("mixed"), str(inputs.hf)
    cases = [Mixed("weights", hf, sets["weights"])]
    for kind, of_kind in sets.items():
        cases += [
            Mixed(f"{kind}, {half}", hf, of_kind, str(root / kind), stop)
            for half, stop in (("first", STEPS // 2), ("second", None))
        ]
    return results_of_ranks(run_all, 2, cases, timeout=400)


@pytest.mark.parametrize("kind", SHARES)
def test_mixture_run_resumed_on_two_ranks_matches_one_rank(found, inputs, sets, kind):
    alone = run(Mixed(kind, str(inputs.hf), sets[kind]))
    first, second = found[f"{kind}, first"], found[f"{kind}, second"]
    assert [entry[0] for entry in alone["log"]] == list(range(1, STEPS + 1))
    # Rows: ranks read different rows, together those of one rank, even if a loader reads ahead.
    wanted = range(STEPS * ROWS)
    middle = len(wanted) // 2
    assert set(first["rows"]) >= set(wanted[:middle]) and set(second["rows"]) >= set(wanted[middle:])
    for half in (first, second):
        one, other = map(set, half["by rank"])
        assert one and other and not one & other
        assert all(half["rows"][number] == alone["rows"][number] for number in half["rows"] if number in wanted)
    assert min(second["rows"]) == middle  # no row is read again
    # Steps.
    halves = first["log"] + second["log"]
    worst = max(
        abs(a / b - 1)
        for entry, expected in zip(halves, alone["log"], strict=True)
        for a, b in zip(entry[1:], expected[1:], strict=True)
    )
    print(kind, "relative error", worst)
    assert [entry[0] for entry in halves] == list(range(1, STEPS + 1)) and worst <= LIMIT
    if kind in found:  # unbroken run on as many ranks: equal to the bit
        assert found[kind]["log"] == halves and found[kind]["rows"] == first["rows"] | second["rows"]


@pytest.mark.parametrize(("kind", "share"), [("weights", 3 / 4), ("epochs", 32 / 52)])
def test_mixture_samples_have_configured_shares(found, kind, share):
    rows = found[f"{kind}, first"]["rows"] | found[f"{kind}, second"]["rows"]
    seen = Counter(name.partition("/")[0] for samples in rows.values() for name in samples)
    total = sum(seen.values())
    print(kind, seen)
    assert total > 48 and abs(seen["talk"] / total - share) < 0.1
