"""Run on ranks: mixtures trained in Megatron-Bridge's loop, at once and in two halves, and what each row held.

    torchrun --nproc_per_node N -m tests.training.mixture_on_ranks OUTPUT CASES

CASES is a JSON list of `Mixed`. Rank 0 writes what each has found to OUTPUT.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data import RowDataset

import torch.distributed as dist

from tests.ranks import begin, leave

from .conftest import Inputs
from .running import replicated, train

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
        """Its configuration. Rows of the same documents at any number of ranks."""
        cfg = replicated(
            Inputs(Path(self.hf), Path("none"), Path("unused")), None if self.save is None else Path(self.save),
            dataset__path=None, dataset__mixture=self.sets, dataset__window_size=16, dataset__pad_to_multiple_of=8,
            train__global_batch_size=ROWS, train__train_iters=STEPS, validation__eval_iters=0,
            checkpoint__save_interval=STEPS,
        )  # fmt: skip
        cfg.logger.tensorboard_dir = None
        return cfg


def run(case: Mixed) -> dict[str, Any]:
    """What was logged of each step, and by the number of each row that any rank has read, the samples in it."""
    with _reading() as rows:
        log = train(case.config(), stop_after=case.stop_after)
    ranks = [rows]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, rows)
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


def main(output: str, cases: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    leave({case["name"]: run(Mixed(**case)) for case in cases}, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]))
