"""Run on ranks: how many bytes of vision tokens context-parallel ranks send each other in a microbatch.

torchrun --nproc_per_node N -m tests.parity.split_models.exchange_on_ranks OUTPUT FOLDER

All ranks are context-parallel; FOLDER is a Hugging Face folder of a dense model.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

from qwen3vl_bridge.batch.vision_sharding import assign_vision

import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from tests.ranks import begin, leave

from ..on_ranks import Split
from ..topologies import Topology

CONTENT, ROWS = "mixed", ("packed", "padded")


def count(split: Split, rows: str) -> dict[str, Any]:
    """Bytes that this rank sends to others, forward and backward; the batch, and who encodes which of its frames."""
    model, sent = split.run.model[0], []
    exchange, rank = mappings.torch.distributed.all_to_all_single, dist.get_rank()

    def watched(output: Any, values: Any, **splits: Any) -> Any:
        others = sum(splits["input_split_sizes"]) - splits["input_split_sizes"][rank]
        sent.append(others * values[:1].nbytes if len(values) else 0)
        return exchange(output, values, **splits)

    config, groups = get_model_config(model), get_attr_wrapped_model(model, "pg_collection")
    batch, ranks = next(split.batches(CONTENT, rows, steps=1)), config.sequence_ranks(groups)
    inputs = batch.local(**ranks)
    with mock.patch.object(mappings.torch.distributed, "all_to_all_single", watched):
        (model(inputs=inputs) * inputs.loss_mask).sum().backward()
    forward, backward = sent
    frames = assign_vision(batch.vision, ranks["vision_work"], groups.cp.size()).frames
    width = (1 + len(config.deepstack_layers)) * config.hidden_size * 4  # float32
    return dict(batch=batch, frames=frames, width=width, forward=forward, backward=backward)


def main(output: str, folder: str) -> None:
    """Both kinds of rows; rank 0 writes what every rank has found."""
    ranks = int(os.environ["WORLD_SIZE"])
    split, found = Split(folder, Topology(ranks, dict(context_parallel_size=ranks))), {}
    for rows in ROWS:
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, count(split, rows))
        found[rows] = everyone
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:])
