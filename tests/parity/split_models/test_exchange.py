"""Context-parallel ranks send each other the vision tokens that their own tokens use, and no others; counted in bytes.

That values and gradients are those of one process is in `test_on_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from qwen3vl_bridge.batch import PackedBatch, SequenceLayout, VisionWork, make_vision_inputs, vision_slots
from qwen3vl_bridge.batch.vision_sharding import assign_vision
from qwen3vl_bridge.models.flops import tower_costs
from qwen3vl_bridge.models.qwen3_vl.presets import config_dict
from qwen3vl_bridge.registry import dimensions_of

import pytest
import torch

from tests.forked import run_ranks
from tests.model.inputs.support import share_of

from .exchange_on_ranks import ROWS

PAGE = Path("docs/speed.md")


def encoders(batch: PackedBatch, frames: Sequence[Sequence[int]]) -> list[int]:
    """The rank that encodes each vision token of a batch, from the frames of each rank."""
    starts = [0, *accumulate(patches // 4 for patches in batch.vision.lengths)]
    found = [-1] * starts[-1]
    for rank, own in enumerate(frames):
        for frame in own:
            found[starts[frame] : starts[frame + 1]] = [rank] * (starts[frame + 1] - starts[frame])
    return found


def crossings(batch: PackedBatch, frames: Sequence[Sequence[int]]) -> list[int]:
    """Of each rank, how many vision tokens its own tokens use that another one encodes."""
    found, encoder = [], encoders(batch, frames)
    for rank in range(len(frames)):
        slots = share_of(batch.vision_slot, batch.layout.padded_lengths, len(frames), rank)
        found.append(sum(encoder[slot] != rank for slot in slots[slots >= 0].tolist()))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_sent_are_those_of_tokens_that_other_ranks_use(untied_folder, tmp_path, ranks):
    run_ranks("tests.parity.split_models.exchange_on_ranks", ranks, tmp_path / "found.pt", untied_folder)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    for rows in ROWS:
        batch, frames, width = (found[rows][0][name] for name in ("batch", "frames", "width"))
        sent = {kind: sum(one[kind] for one in found[rows]) for kind in ("forward", "backward")}
        gathered = (ranks - 1) * len(encoders(batch, frames)) * width
        print(ranks, rows, sent, gathered)
        assert sent["forward"] == sent["backward"] == sum(crossings(batch, frames)) * width
        assert f"| tiny, CP {ranks}, {rows} | {gathered:,} | {sent['forward']:,} |" in PAGE.read_text()


def row_of_16k() -> PackedBatch:
    """13 documents of four images of 256 tokens and some text; pixels have one value each."""
    image, lengths = 9, [1256] * 13
    ids = torch.zeros(1, 16384, dtype=torch.int64)
    for document in range(13):
        for first in (10, 300, 590, 880):
            ids[0, 1256 * document + first :][:256] = image
    grids = torch.tensor([(1, 32, 32)] * 52)
    return PackedBatch(
        input_ids=ids,
        labels=ids,
        loss_mask=torch.ones(ids.shape),
        position_ids=ids.expand(3, *ids.shape),
        vision_slot=vision_slots(ids, image, -1, 52 * 256),
        layout=SequenceLayout.packed_row(lengths, multiple=8, total=16384),
        vision=make_vision_inputs(
            torch.zeros(52 * 1024, 1), grids, None, None, num_position_embeddings=2304, spatial_merge_size=2
        ),
    )


def test_what_the_page_says_of_8b():
    """In bf16, from what `PackedBatch.local` says is sent."""
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
