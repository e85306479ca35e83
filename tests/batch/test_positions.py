"""Rotary positions against transformers' own, on random conversations."""

from functools import partial
from types import SimpleNamespace

from qwen3vl_bridge.batch import SequenceLayout, mrope_positions

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

IMAGE, VIDEO, START, END = 90, 91, 92, 93
MERGE = 2

Sample = tuple[list[int], list[list[int]], list[list[int]]]


def reference(sample: Sample) -> torch.Tensor:
    """[3, S] positions of one sample alone, from transformers."""
    ids, images, videos = sample
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)),
        get_vision_position_ids=partial(Qwen3VLModel.get_vision_position_ids, None),
    )
    tokens = torch.tensor([ids])
    return Qwen3VLModel.get_rope_index(
        model,
        tokens,
        (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
    )[0][:, 0]


def random_sample(random: np.random.Generator) -> Sample:
    """Text, images and videos in any order, as the processor writes them: each run of vision tokens in brackets."""
    ids: list[int] = []
    grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    for _ in range(random.integers(1, 7)):
        kind = random.choice([0, IMAGE, VIDEO], p=[0.5, 0.3, 0.2])
        if kind == 0:
            ids += random.integers(0, 90, random.integers(1, 12)).tolist()
            continue
        height, width = (MERGE * random.integers(1, 6, 2)).tolist()
        count = int(random.integers(1, 4))
        grids[int(kind)].append([count, height, width])
        # A video's frames have brackets of their own; an image is one run whatever its grid.
        runs, length = (1, count) if kind == IMAGE else (count, 1)
        for _ in range(runs):
            ids += [START, *[int(kind)] * (length * height * width // MERGE**2), END]
    return ids, grids[IMAGE], grids[VIDEO]


def positions(rows: torch.Tensor, layout: SequenceLayout, samples: list[Sample]) -> torch.Tensor:
    images, videos = ([grid for sample in samples for grid in sample[i]] for i in (1, 2))
    return mrope_positions(
        rows, layout, torch.tensor(images) if images else None, torch.tensor(videos) if videos else None,
        image_token_id=IMAGE, video_token_id=VIDEO, spatial_merge_size=MERGE,
    )  # fmt: skip


def flat(layout: SequenceLayout, samples: list[Sample]) -> torch.Tensor:
    """[B, S] token ids laid out, padded with id 0."""
    ids = torch.zeros(layout.total, dtype=torch.int64)
    for sample, start in zip(samples, layout.cu_seqlens_padded.tolist(), strict=False):
        ids[start : start + len(sample[0])] = torch.tensor(sample[0])
    return ids.view(layout.num_rows, -1)


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_transformers_on_random_batches(seed):
    """4 x 150 batches of 1 to 5 samples, padded and packed: about 3,600 comparisons."""
    random = np.random.default_rng(seed)
    for _ in range(150):
        samples = [random_sample(random) for _ in range(random.integers(1, 6))]
        lengths = [len(sample[0]) for sample in samples]
        multiple = int(random.choice([1, 4, 8]))
        packed = SequenceLayout.packed_row(lengths, multiple=multiple)
        total = packed.total + multiple * int(random.integers(0, 3))
        for layout in (
            SequenceLayout.packed_row(lengths, multiple=multiple, total=total),
            SequenceLayout.rows(lengths, max(lengths) + int(random.integers(0, 4))),
        ):
            result = positions(flat(layout, samples), layout, samples)
            assert result.dtype == torch.int64 and result.shape == (3, layout.num_rows, layout.total // layout.num_rows)
            result = result.flatten(1)
            assert not result[:, layout.padding_mask()].any()
            for sample, start in zip(samples, layout.cu_seqlens_padded.tolist(), strict=False):
                torch.testing.assert_close(result[:, start : start + len(sample[0])], reference(sample), rtol=0, atol=0)


def test_text_counts_up_in_each_segment():
    layout = SequenceLayout.packed_row([3, 2], multiple=4)
    result = positions(torch.ones(1, 8, dtype=torch.int64), layout, [])
    assert result[:, 0].tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]] * 3


def test_neighbouring_pictures_need_no_token_between_them():
    """Transformers reads two pictures without a token between them as one; the grids say where one ends."""
    ids = [1] + [IMAGE] * 6
    result = positions(torch.tensor([ids]), SequenceLayout.rows([7], 7), [(ids, [[1, 2, 4], [1, 4, 4]], [])])
    assert result[:, 0].tolist() == [[0, 1, 1, 3, 3, 3, 3], [0, 1, 1, 3, 3, 4, 4], [0, 1, 2, 3, 4, 3, 4]]


I, V, S, E = IMAGE, VIDEO, START, END  # noqa: E741  one letter each, so that rows below read as rows


@pytest.mark.parametrize(
    ("ids", "lengths", "images", "videos", "message"),
    [
        ([S, I, I, E, 1, 1], [4, 2], [], [], "segment 0: 2 image tokens from token 1 on .* found 2 .* expected 0"),
        ([1, 1, S, I, I, E], [2, 4], [[1, 2, 2]], [], "segment 1: 1 image tokens from token 4 on .* expected 1 for 1"),
        ([S, I, E, S, I, E], [3, 3], [[1, 2, 2], [1, 2, 4]], [], "segment 1: images? 1 of 1 x 1 x 2 tokens found 1"),
        ([S, I, I, E, 1, 1], [6], [[1, 2, 4], [1, 2, 2]], [], "the batch: image 1 of 1 x 1 x 1 tokens found 0"),
        ([S, I, E, I, I, E], [6], [[1, 2, 6]], [], "segment 0: image 0 of 1 x 1 x 3 tokens found 1 .* expected 3"),
        ([1, 1, I, I, 1, 1], [3, 3], [[1, 2, 4]], [], "segment 0: image 0 .* found 1 image tokens in one run, exp.* 2"),
        ([S, V, V, E, 1, 1], [6], [], [[2, 2, 4]], "the batch: video frame 1 of 1 x 1 x 2 tokens found 0 .* found 2"),
        ([S, V, V, E, 1, 1], [6], [[1, 2, 4]], [], "the batch: image 0 of 1 x 1 x 2 tokens found 0 image tokens"),
        ([S, I, E, 1, 1, I], [5], [[1, 2, 2], [1, 2, 2]], [], "segment 1: image token at 5 is in padding"),
        ([S, I, I, E], [4], [[1, 2, 3]], [], "image 0: found a grid of 1 x 2 x 3 .* divisible by 2"),
        ([S, I, I, E], [4], [[0, 2, 4]], [], "image 0: found a grid of 0 x 2 x 4 patches, expected positive"),
    ],
)
def test_pictures_and_tokens_that_disagree_are_refused(ids, lengths, images, videos, message):
    layout = SequenceLayout.packed_row(lengths, total=len(ids))
    with pytest.raises(ValueError, match=message):
        positions(torch.tensor([ids]), layout, [(ids, images, videos)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"rows": torch.ones(1, 7, dtype=torch.int64)}, r"input_ids: found \[1, 7\], expected \[1, 8\]"),
        ({"rows": torch.ones(2, 4, dtype=torch.int64)}, r"input_ids: found \[2, 4\], expected \[1, 8\]"),
        ({"grid": torch.tensor([1, 2, 2])}, r"image grids: found \[3\] torch.int64, expected \[K, 3\] integers"),
        ({"grid": torch.ones(1, 3)}, r"image grids: found \[1, 3\] torch.float32, expected \[K, 3\] integers"),
    ],
)
def test_shapes_that_disagree_are_refused(call, message):
    rows = call.get("rows", torch.ones(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        mrope_positions(
            rows, SequenceLayout.packed_row([8]), call.get("grid"), None, image_token_id=IMAGE, video_token_id=VIDEO,
            spatial_merge_size=MERGE,
        )  # fmt: skip
