"""Adapters trained by one process go on over ranks, split in every way, as they would have gone on in one.

Run on ranks: -m tests.training.adapters.test_peft_on_ranks OUTPUT JOBS DATA START OUT, a JSON list of `Job`s.
"""

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration

import pytest
import torch

from tests.forked import run_ranks
from tests.ranks import begin, leave
from tests.steps import save, set_up, train_step

from ..conftest import Inputs
from ..running import stored
from .test_peft_run import CASES, DIST, FSDP, inputs_of, model_of, peft_config

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


pytestmark = pytest.mark.slow

JOBS = [
    Job("tensors", "trained mergers", split=dict(tensor_model_parallel_size=2)),
    Job("stages", "some layers", split=dict(pipeline_model_parallel_size=2)),
    Job("tokens", "DoRA", split=dict(context_parallel_size=2)),
    Job("rows", "DoRA"),
    Job("experts", "adapted experts", split=dict(expert_model_parallel_size=2)),
    Job("some experts", "experts of some layers", split=dict(expert_model_parallel_size=2)),
    Job("experts, tensors", "adapted experts", split=dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)),
    Job("shards", "trained mergers", ckpt_format=FSDP),
    Job("sections", "linear attention", split=dict(tensor_model_parallel_size=2)),
    Job(
        "sections, experts",
        "linear attention, adapted experts",
        split=dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=1),
    ),
    Job("linear attention, tokens", "linear attention, DoRA", split=dict(context_parallel_size=2)),
    Job("linear attention, shards", "linear attention", ckpt_format=FSDP),
]
# Relative: of the loss, of the gradients' norm, and of each tensor, adapters and moments, to how far it moved. Measured
# 1.0e-7, 4.3e-7 and 2.6e-6; that under Megatron-FSDP in bfloat16, 0, 7.6e-8 and 4.6e-7. Linear attention multiplies
# rounding errors: 1.5e-6, 3.2e-5 and 6.8e-4.
LIMITS = {"qwen3_vl": (1e-6, 2e-6, 1e-4), "qwen3_5": (1e-5, 2e-4, 4e-3)}


@pytest.fixture(scope="module")
def began(inputs, folders, tmp_path_factory):
    start, went = tmp_path_factory.mktemp("start"), {}
    for job in JOBS:
        if job.began in went:
            continue
        run = set_up(
            peft_config(
                inputs_of(job.case, inputs, folders), start / job.began, CASES[job.case](), job.ckpt_format, **SETTINGS
            )
        )
        for _ in range(2):
            went[job.began] = [train_step(run) for _ in range(STEPS)]
            save(run)
    return start, went


def test_two_ranks_go_on_as_one_would(began, inputs, folders, tmp_path):
    start, went = began
    jobs = [replace(job, hf=str(inputs_of(job.case, inputs, folders).hf)) for job in JOBS]
    given = (json.dumps([asdict(job) for job in jobs]), inputs.data, start, tmp_path)
    run_ranks("tests.training.adapters.test_peft_on_ranks", 2, tmp_path / "found.pt", *given)
    logs, worst = torch.load(tmp_path / "found.pt"), {}
    for job in JOBS:
        pairs = list(zip(logs[job.name], went[job.began], strict=True))
        loss, norm = (max(abs(a[name] / b[name] - 1) for a, b in pairs) for name in ("loss", "grad_norm"))
        before, after = (stored(find_iteration(start / job.began, step)) for step in (STEPS, 2 * STEPS))
        found = stored(tmp_path / job.name)
        assert found.keys() == after.keys()
        numbers = {key: t for key, t in after.items() if t.is_floating_point()}  # not random states
        moved = {key: ((found[key] - t).norm() / (t - before[key]).norm()).item() for key, t in numbers.items()}
        worst[job.name] = (loss, norm, max(moved.values()))
        print(
            f"{job.name}: loss {loss:.1e}, norm {norm:.1e}, moved {max(moved.values()):.1e}", max(moved, key=moved.get)
        )
    for job in JOBS:
        limits = LIMITS[model_of(job.case)[0]]
        assert all(found <= limit for found, limit in zip(worst[job.name], limits, strict=True)), (job, worst[job.name])


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
