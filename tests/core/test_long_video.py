"""A video of two hours at one frame per second, in a row of 256K tokens on 32 context-parallel ranks."""

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.core.vision_sharding import VisionWork

import pytest
import torch

from tests.core.test_vision_inputs import END, IMAGE, MERGE, START, VIDEO, reference

SECONDS, PATCHES_OF_FRAME, SIDE, FEATURES = 7200, 256, 16, 4
FRAMES = SECONDS // 2  # two frames are a temporal patch
TIMESTAMP = list(range(1, 7))  # tokens such as "<7199.5 seconds>"
RANKS, ROW = 32, 262_144
SETTINGS = VisionSettings(IMAGE, VIDEO, MERGE, 2304)


@pytest.fixture(scope="module")
def sample():
    """Return token ids, image grids and video grids: a question, the video with its timestamps, and an answer."""
    tokens = PATCHES_OF_FRAME // MERGE**2
    frame = [*TIMESTAMP, START, *[VIDEO] * tokens, END]
    return [*range(10, 60), *frame * FRAMES, *range(10, 80)], [], [[FRAMES, SIDE, SIDE]]


@pytest.fixture(scope="module")
def batch(sample):
    ids, _, grids = sample
    layout = SequenceLayout.packed_row([len(ids)], multiple=2 * RANKS, total=ROW)
    tokens = torch.zeros(1, ROW, dtype=torch.int64)
    tokens[0, : len(ids)] = torch.tensor(ids)
    return TokenBatch.build(
        tokens, tokens, torch.ones(1, ROW), layout, SETTINGS,
        pixel_values_videos=torch.zeros(FRAMES * PATCHES_OF_FRAME, FEATURES, dtype=torch.bfloat16),
        video_grid_thw=torch.tensor(grids),
    )  # fmt: skip


def test_mrope_positions_of_two_hour_video_equal_transformers(sample, batch):
    ids = sample[0]
    assert len(ids) > 250_000
    assert torch.equal(batch.position_ids[:, 0, : len(ids)], reference(sample))


def test_batch_local_divides_frames_of_two_hour_video_over_ranks(batch):
    """Each rank encodes about 1 / 32 of the frames, and holds only their pixels."""
    work, tokens, frames = VisionWork(1.0, 1e-4, MERGE**2), 0, []
    for rank in (0, 13, RANKS - 1):
        local = batch.local(RANKS, rank, vision_work=work, with_next_tokens=True)
        tokens += local.input_ids.numel()
        frames.append(len(local.vision.lengths))
        assert local.vision.pixel_values.untyped_storage().nbytes() <= 1.02 / RANKS * batch.vision.pixel_values.nbytes
    assert tokens == 3 * ROW // RANKS
    assert max(frames) - min(frames) <= 1 and abs(sum(frames) - 3 * FRAMES / RANKS) <= 3
