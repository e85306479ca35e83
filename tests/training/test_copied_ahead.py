"""A run whose batches are copied to a GPU on a stream of their own goes on after the step that was saved.

What is ahead is the copy of a batch that a step has read, never the reading of the next one: a saved position of data
is that of the step. There is no GPU: tensors say that they are on one (`tests/host_waits`), so that the forward step
copies as it does there, and streams and events do nothing.
"""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.training import step
from qwen3vl_bridge.training.before_step import optimizers_of

import pytest
import torch

from tests.host_waits.counter import HostWaits
from tests.steps import Run, save, set_up, train_step

from .running import replicated

STEPS = 2  # before the run is saved, and after


@pytest.fixture
def copied(monkeypatch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    copy = step.copy_to_gpu

    def noted(inputs, device):
        assert device.type == "cuda"
        found.append(inputs.input_ids.clone())
        return copy(inputs, device)

    monkeypatch.setattr(step, "copy_to_gpu", noted)
    return found


def take_steps(run: Run) -> None:
    states = [list(vars(one).values()) for one in optimizers_of(run.optimizer)]
    with HostWaits(*run.model, states):
        for _ in range(STEPS):
            train_step(run)


def test_a_resumed_run_copies_what_was_not_trained_on(inputs, tmp_path: Path, copied):
    """By Megatron-Bridge's checkpoint of the run, and by the stream's own state, at every step."""
    rows = replicated(inputs, None).train.global_batch_size
    whole = replicated(inputs, None).dataset.stream("train")
    expected = [next(whole).input_ids for _ in range(2 * STEPS * rows)]
    for half in (1, 2):
        run = set_up(replicated(inputs, tmp_path))
        assert run.progress.step == (half - 1) * STEPS
        take_steps(run)
        done = half * STEPS * rows
        assert len(copied) == run.progress.consumed_train_samples == done
        save(run)
    assert all(torch.equal(one, other) for one, other in zip(copied, expected, strict=True))


def test_the_streams_own_position_is_that_of_the_step(inputs, copied):
    run = set_up(replicated(inputs, None), data=False)
    run.stream, rows = run.cfg.dataset.stream("train"), run.cfg.train.global_batch_size
    take_steps(run)
    resumed = run.cfg.dataset.stream("train")
    resumed.load_state_dict(run.stream.state_dict())
    following = next(resumed).input_ids
    assert len(copied) == STEPS * rows and not any(torch.equal(following, one) for one in copied)
    take_steps(run)
    assert torch.equal(copied[STEPS * rows], following)
