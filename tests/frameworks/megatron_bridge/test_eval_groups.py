"""Megatron-Bridge's `eval_cp_context`: other process groups raise, and leave the settings unchanged."""

import copy
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
import torch.distributed as dist
from megatron.bridge.training.eval_context_parallel_rebinding import eval_cp_context
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from tests.helpers.forked import results_of_ranks
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology


def evaluate(folder: Path) -> dict[str, Any]:
    split = Split(folder, Topology(2, dict(context_parallel_size=2)))
    (chunk,) = split.run.model
    config, train = get_model_config(chunk), get_attr_wrapped_model(chunk, "pg_collection")
    batch = next(split.batches("mixed", "packed", steps=1))

    def loss() -> float:
        inputs = batch.local(**config.local_arguments(get_attr_wrapped_model(chunk, "pg_collection")))
        with torch.no_grad():
            return (chunk(inputs=inputs) * inputs.loss_mask).sum().item()

    alone, same = copy.copy(train), copy.copy(train)
    alone.cp = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    before, said = loss(), []
    for groups in (alone, same):
        try:
            with eval_cp_context(split.run.model, groups, train):
                said.append("no error")
        except ValueError as error:
            said.append(str(error))
    unchanged = config.context_parallel_size, get_attr_wrapped_model(chunk, "pg_collection") is train
    return dict(said=said, unchanged=unchanged, losses=(before, loss()))


@pytest.mark.slow
def test_eval_cp_context_raises_if_it_would_replace_process_groups(untied_folder):
    """Groups of the same ranks too: the vision tower would be given one."""
    found = results_of_ranks(evaluate, 2, untied_folder)
    for said, wanted in zip(found["said"], ("[0]", "[0, 1]"), strict=True):
        assert f"ranks [0, 1] and cannot change to ranks {wanted}" in said
    assert found["unchanged"] == (2, True)
    assert len(set(found["losses"])) == 1
