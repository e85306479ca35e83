"""Context-parallel ranks send each other the vision tokens that their own tokens use, and no others; counted in bytes.

That values and gradients are those of one process is in `test_on_ranks.py`.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

from qwen3vl_bridge.config.flops import tower_costs
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.core.vision_sharding import VisionWork, assign_vision
from qwen3vl_bridge.models.qwen3_vl.presets import config_dict
from qwen3vl_bridge.registry import dimensions_of

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import of_all_ranks
from tests.models.inputs.support import share_of
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology

CONTENT, ROWS = "mixed", ("packed", "padded")


def count(split: Split, rows: str) -> dict[str, Any]:
    """Return the bytes that this rank sends in both passes, the batch, and the frames of each rank."""
    model, sent = split.run.model[0], []
    exchange, rank = mappings.torch.distributed.all_to_all_single, dist.get_rank()

    def watched(output: Any, values: Any, **splits: Any) -> Any:
        others = sum(splits["input_split_sizes"]) - splits["input_split_sizes"][rank]
        sent.append(others * values[:1].nbytes if len(values) else 0)
        return exchange(output, values, **splits)

    config, groups = get_model_config(model), get_attr_wrapped_model(model, "pg_collection")
    batch, ranks = next(split.batches(CONTENT, rows, steps=1)), config.local_arguments(groups)
    inputs = batch.local(**ranks)
    with mock.patch.object(mappings.torch.distributed, "all_to_all_single", watched):
        (model(inputs=inputs) * inputs.loss_mask).sum().backward()
    forward, backward = sent
    frames = assign_vision(batch.vision, ranks["vision_work"], groups.cp.size()).frames
    width = (1 + len(config.deepstack_layers)) * config.hidden_size * 4  # float32
    return dict(batch=batch, frames=frames, width=width, forward=forward, backward=backward)


def count_all(folder: Path, ranks: int) -> dict[str, list[dict[str, Any]]]:
    split = Split(folder, Topology(ranks, dict(context_parallel_size=ranks)))
    return {rows: of_all_ranks(count(split, rows)) for rows in ROWS}


PAGE = Path("benchmarks/results/README.md")


def encoders(batch: TokenBatch, frames: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank that encodes each vision token, from the frames of each rank."""
    starts = [0, *accumulate(patches // 4 for patches in batch.vision.lengths)]
    found = [-1] * starts[-1]
    for rank, own in enumerate(frames):
        for frame in own:
            found[starts[frame] : starts[frame + 1]] = [rank] * (starts[frame + 1] - starts[frame])
    return found


def crossings(batch: TokenBatch, frames: Sequence[Sequence[int]]) -> list[int]:
    """Return for each rank the number of vision tokens that it uses and another rank encodes."""
    found, encoder = [], encoders(batch, frames)
    for rank in range(len(frames)):
        slots = share_of(batch.vision_slot, batch.layout.padded_lengths, len(frames), rank)
        found.append(sum(encoder[slot] != rank for slot in slots[slots >= 0].tolist()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_vision_exchange_sends_only_tokens_that_ranks_use(untied_folder, ranks):
    found = results_of_ranks(count_all, ranks, untied_folder, ranks)
    for rows in ROWS:
        batch, frames, width = (found[rows][0][name] for name in ("batch", "frames", "width"))
        sent = {kind: sum(one[kind] for one in found[rows]) for kind in ("forward", "backward")}
        gathered = (ranks - 1) * len(encoders(batch, frames)) * width
        print(ranks, rows, sent, gathered)
        assert sent["forward"] == sent["backward"] == sum(crossings(batch, frames)) * width
        assert f"| tiny, CP {ranks}, {rows} | {gathered:,} | {sent['forward']:,} |" in PAGE.read_text()


def row_of_16k() -> TokenBatch:
    """13 documents of four images of 256 tokens and some text; pixels have one value each."""
    image, lengths = 9, [1256] * 13
    ids = torch.zeros(1, 16384, dtype=torch.int64)
    for document in range(13):
        for first in (10, 300, 590, 880):
            ids[0, 1256 * document + first :][:256] = image
    grids = torch.tensor([(1, 32, 32)] * 52)
    layout = SequenceLayout.packed_row(lengths, multiple=8, total=16384)
    return TokenBatch.build(
        ids, ids, torch.ones(ids.shape), layout, VisionSettings(image, -1, 2, 2304),
        pixel_values=torch.zeros(52 * 1024, 1), image_grid_thw=grids,
    )  # fmt: skip


def test_vision_exchange_bytes_of_8b_model_match_benchmark_page():
    """Bytes in bf16, from the exchanges of `TokenBatch.local`."""
    batch, ranks, config = row_of_16k(), 4, config_dict("8B")
    dimensions, costs = dimensions_of(config), tower_costs(config)
    width = 2 * dimensions["hidden"] * (1 + len(dimensions.indices["deepstack_mergers"]))
    work = VisionWork(costs.patch, costs.patch_pair, 4)
    exchanges = [batch.local(ranks, rank, vision_work=work).vision_exchange for rank in range(ranks)]
    others = [sum(one.received) - one.received[rank] for rank, one in enumerate(exchanges)]
    assert others == crossings(batch, assign_vision(batch.vision, work, ranks).frames)
    whole, sent = (ranks * 52 * 256 * width, sum(sum(one.received) for one in exchanges) * width)
    print(whole / ranks / 1e6, sent / ranks / 1e6, max(others) * width / 1e6, [one.received for one in exchanges])
    assert f"{whole / ranks / 1e6:.0f} MB" in PAGE.read_text() and f"{sent / ranks / 1e6:.0f} MB" in PAGE.read_text()
