"""Run on ranks: runs that train adapters go on from checkpoints of one process, split over ranks.

torchrun --nproc_per_node 2 -m tests.training.peft_on_ranks JOBS

JOBS is a JSON list of `Job`s.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from qwen3vl_bridge.parallel.collectives import hear_all
from qwen3vl_bridge.training.small_loop import checkpoint
from qwen3vl_bridge.training.small_loop.loop import set_up, train_step

import torch

from tests.ranks import begin

from .conftest import Inputs
from .peft_runs import CASES, WITH_EXPERTS, peft_config

STEPS = 2
# The same rows, however they are split.
SETTINGS = dict(dataset__pad_to_multiple_of=8)


@dataclass(frozen=True)
class Job:
    """One split.

    Attributes:
        name: of it.
        case: of the adapters.
        split: settings of the model.
        load: format of the checkpoint to go on from.
        save: format of the one to write.
    """

    name: str
    case: str
    split: dict[str, int] = field(default_factory=dict)
    load: str = "fsdp_dtensor"
    save: str = "fsdp_dtensor"


def main(jobs: list[dict], dense: str, moe: str, data: str, start: str, out: str) -> None:
    """Load, take two steps, save; rank 0 writes down losses and gradient norms."""
    for one in (Job(**job) for job in jobs):
        settings = SETTINGS | {f"model__{name}": size for name, size in one.split.items()}
        hf = Path(moe if one.case in WITH_EXPERTS else dense)
        inputs = Inputs(hf, Path(data), hf)
        cfg = peft_config(inputs, Path(out) / one.name, CASES[one.case](), **settings)
        cfg.model.sequence_parallel = cfg.model.tensor_model_parallel_size > 1
        cfg.model.variable_seq_lengths = cfg.model.pipeline_model_parallel_size > 1
        cfg.checkpoint.load = str(Path(start) / one.case / one.load)
        run = set_up(cfg)
        entries = [train_step(run) for _ in range(STEPS)]
        run.cfg.checkpoint.ckpt_format = one.save
        checkpoint.save(cfg.checkpoint.save, run)
        if torch.distributed.get_rank() == 0:
            (Path(out) / f"{one.name}.json").write_text(json.dumps(entries))
        hear_all(None)


if __name__ == "__main__":
    begin()
    main(json.loads(sys.argv[1]), *sys.argv[2:])
    torch.distributed.destroy_process_group()
