"""Run on ranks: runs that train adapters go on from checkpoints of one process, split over ranks.

torchrun --nproc_per_node 2 -m tests.training.adapters.peft_on_ranks OUTPUT JOBS DATA START OUT

JOBS is a JSON list of `Job`s. What runs save goes to OUT, and their losses and gradients' norms to OUTPUT.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.ranks import begin, leave
from tests.steps import save, set_up, train_step

from ..conftest import Inputs
from .peft_runs import CASES, DIST, peft_config

STEPS = 2
# The same rows, however they are split.
SETTINGS = dict(dataset__pad_to_multiple_of=8)


@dataclass(frozen=True)
class Job:
    name: str
    case: str
    hf: str = ""
    split: dict[str, int] = field(default_factory=dict)
    ckpt_format: str = DIST

    @property
    def began(self) -> Path:
        """Where the run of one process is, below the folder of all of them."""
        return Path(self.case) / self.ckpt_format


def go_on(job: Job, inputs: Inputs, start: Path, out: Path) -> list[dict[str, float]]:
    """Load what one process had after some steps, take as many more, save; what is logged of these."""
    settings = SETTINGS | {f"model__{name}": size for name, size in job.split.items()}
    cfg = peft_config(inputs, out / job.name, CASES[job.case](), job.ckpt_format, **settings)
    cfg.model.sequence_parallel = cfg.model.tensor_model_parallel_size > 1
    cfg.model.variable_seq_lengths = cfg.model.pipeline_model_parallel_size > 1
    cfg.checkpoint.load, cfg.checkpoint.ckpt_step = str(start / job.began), STEPS
    run = set_up(cfg)
    assert run.progress.step == STEPS
    entries = [train_step(run) for _ in range(STEPS)]
    save(run)
    return entries


def main(output: str, jobs: list[dict], data: str, start: str, out: str) -> None:
    found = {}
    for job in (Job(**one) for one in jobs):
        hf = Path(job.hf)
        found[job.name] = go_on(job, Inputs(hf, Path(data), hf), Path(start), Path(out))
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
