"""Vision inputs and rotary positions, compared with transformers on random images and conversations."""

from functools import partial
from types import SimpleNamespace

from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import (
    VisionSettings,
    frame_lengths,
    interpolation,
    make_vision_inputs,
    mrope_positions,
    patch_positions,
    vision_slots,
)

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import (
    get_vision_bilinear_indices_and_weights,
    get_vision_cu_seqlens,
    get_vision_position_ids,
)

IMAGE, VIDEO, START, END = 90, 91, 92, 93
MERGE = 2
SETTINGS = VisionSettings(IMAGE, VIDEO, MERGE, 64)


def random_grids(random: np.random.Generator, merge: int, most: int = 6, frames: int = 4) -> torch.Tensor:
    count = int(random.integers(1, most))
    sides = merge * random.integers(1, 40, (count, 2))
    return torch.tensor(np.concatenate([random.integers(1, frames, (count, 1)), sides], axis=1))


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_patch_positions_match_transformers(merge):
    random = np.random.default_rng(merge)
    for _ in range(100):
        grids = random_grids(random, merge)
        torch.testing.assert_close(patch_positions(grids, merge), get_vision_position_ids(grids, merge), rtol=0, atol=0)


@pytest.mark.parametrize(("side", "merge"), [(48, 2), (4, 2), (7, 1), (16, 3)])
def test_interpolation_of_random_grids_equals_transformers(side, merge):
    random = np.random.default_rng(side)
    for _ in range(100):
        grids = random_grids(random, merge)
        index, weight = interpolation(grids, side, merge)
        expected_index, expected_weight = get_vision_bilinear_indices_and_weights(grids, side, merge)
        assert index.dtype == torch.int64 and weight.dtype == torch.float32
        assert torch.equal(index, expected_index.long())
        assert torch.equal(weight, expected_weight)


def test_interpolation_of_grid_sides_up_to_200_equals_transformers():
    """Each size rounds differently. The table is 48 x 48, as in released models."""
    sides = torch.arange(2, 202, 2)
    grids = torch.stack((torch.ones_like(sides), sides, sides.flip(0)), dim=-1)
    index, weight = interpolation(grids, 48, 2)
    expected_index, expected_weight = get_vision_bilinear_indices_and_weights(grids, 48, 2)
    assert torch.equal(index, expected_index.long()) and torch.equal(weight, expected_weight)


@pytest.mark.parametrize("grid", [[1, 4, 6], [3, 4, 6], [1, 66, 64]])  # the last is too large to be kept
def test_interpolation_cache_is_unchanged_by_writes_to_results(grid):
    """Cached tensors are not returned, even for a single image."""
    grids = torch.tensor([grid])
    for _ in range(2):
        index, weight = interpolation(grids, 8, 2)
        places = patch_positions(grids, 2)
        expected = (*get_vision_bilinear_indices_and_weights(grids, 8, 2), get_vision_position_ids(grids, 2))
        for found, right in zip((index, weight, places), expected, strict=True):
            assert torch.equal(found, right.to(found)) and found.is_contiguous()
            found.fill_(-1)


def test_interpolation_cache_ignores_default_dtype_and_device():
    """Models are often built under another default dtype or device."""
    grids = torch.tensor([[1, 14, 22]])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            interpolation(grids, 48, 2), patch_positions(grids, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    index, weight = interpolation(grids, 48, 2)
    expected_index, expected_weight = get_vision_bilinear_indices_and_weights(grids, 48, 2)
    assert torch.equal(index, expected_index.long()) and torch.equal(weight, expected_weight)
    assert torch.equal(patch_positions(grids, 2), get_vision_position_ids(grids, 2))


def test_interpolation_returns_empty_tensors_if_there_are_no_grids():
    none = torch.zeros(0, 3, dtype=torch.int64)
    index, weight = interpolation(none, 8, 2)
    assert index.shape == weight.shape == (4, 0) and index.dtype == torch.int64 and weight.dtype == torch.float32
    assert patch_positions(none, 2).shape == (0, 2)


def test_vision_slots_of_image_tokens_come_before_those_of_video_tokens():
    ids = torch.tensor([[1, IMAGE, IMAGE, 2, VIDEO], [VIDEO, 3, IMAGE, 4, 5]])
    grids = torch.tensor([[1, 4, 2], [1, 2, 2]])
    assert vision_slots(ids, grids, SETTINGS).tolist() == [-1, 0, 1, -1, 3, 4, -1, 2, -1, -1]
    assert vision_slots(torch.ones(2, 3), None, SETTINGS).tolist() == [-1] * 6
    with pytest.raises(ValueError, match="found 3 image tokens, expected 4"):
        vision_slots(ids, torch.tensor([[1, 4, 4]]), SETTINGS)


def test_make_vision_inputs_matches_transformers():
    random = np.random.default_rng(1)
    for _ in range(30):
        images, videos = random_grids(random, 2, frames=2), random_grids(random, 2)
        pixels, clips = (torch.randn(int(grids.prod(-1).sum()), 3) for grids in (images, videos))
        both = torch.cat((images, videos))
        inputs = make_vision_inputs(pixels, images, clips, videos, SETTINGS)
        assert inputs is not None
        assert torch.equal(inputs.pixel_values, torch.cat((pixels, clips)))
        assert torch.equal(inputs.cu_seqlens, get_vision_cu_seqlens(both))
        assert inputs.cu_seqlens.dtype == torch.int32
        assert inputs.lengths == tuple(frame_lengths(both).tolist()) == tuple(inputs.cu_seqlens.diff().tolist())
        assert torch.equal(inputs.position_ids, get_vision_position_ids(both, 2))
        index, weight = get_vision_bilinear_indices_and_weights(both, 8, 2)
        assert torch.equal(inputs.interpolation_index, index) and torch.equal(inputs.interpolation_weight, weight)


@pytest.mark.parametrize("kind", [0, 1])
def test_make_vision_inputs_of_single_modality_keeps_given_pixels(kind):
    arguments: list[torch.Tensor | None] = [None] * 4
    arguments[2 * kind : 2 * kind + 2] = torch.randn(8, 3), torch.tensor([[1, 2, 4]])
    inputs = make_vision_inputs(*arguments, SETTINGS)
    assert inputs is not None and inputs.lengths == (8,) and inputs.pixel_values is arguments[2 * kind]
    empty = (torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64))
    for nothing in ((None,) * 4, (*empty, None, None), (*empty, *empty)):
        assert make_vision_inputs(*nothing, SETTINGS) is None


@pytest.mark.parametrize(("changed", "message"), [
    ({"pixel_values": None}, "image pixels: found 0 patches, expected 8 for 1 image grids"),
    ({"image_grid_thw": None}, "image pixels: found 8 patches, expected 0 for 0 image grids"),
    ({"pixel_values": torch.zeros(7, 3)}, "image pixels: found 7 patches, expected 8"),
    ({"pixel_values_videos": torch.zeros(4, 3)}, "video pixels: found 4 patches, expected 0"),
    ({"image_grid_thw": torch.tensor([[1, 8, 1]])}, "image 0: found a grid of 1 x 8 x 1 .* divisible by 2"),
    ({"video_grid_thw": torch.tensor([[1, 2, 4], [1, 3, 4]])}, "video 1: found a grid of 1 x 3 x 4"),
    ({"settings": VisionSettings(IMAGE, VIDEO, MERGE, 15)}, "found 15 position embeddings, expected a square number"),
])  # fmt: skip
def test_make_vision_inputs_raises_if_pixels_do_not_match_grids(changed, message):
    good = {
        "pixel_values": torch.zeros(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]]), "pixel_values_videos": None,
        "video_grid_thw": None, "settings": SETTINGS,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        make_vision_inputs(**{**good, **changed})


Sample = tuple[list[int], list[list[int]], list[list[int]]]


def reference(sample: Sample) -> torch.Tensor:
    """Return transformers' positions [3, S] of one sample."""
    ids, images, videos = sample
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)),
        get_vision_position_ids=partial(Qwen3VLModel.get_vision_position_ids, None),
    )
    tokens = torch.tensor([ids])
    return Qwen3VLModel.get_rope_index(
        model, tokens, (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
    )[0][:, 0]  # fmt: skip


def random_sample(random: np.random.Generator) -> Sample:
    """Return text, images and videos in random order, formatted as by the processor."""
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
        rows, layout, torch.tensor(images) if images else None, torch.tensor(videos) if videos else None, SETTINGS
    )


def flat(layout: SequenceLayout, samples: list[Sample]) -> torch.Tensor:
    """Return token ids [B, S], padded with id 0."""
    ids = torch.zeros(layout.total, dtype=torch.int64)
    for sample, start in zip(samples, layout.cu_seqlens_padded.tolist(), strict=False):
        ids[start : start + len(sample[0])] = torch.tensor(sample[0])
    return ids.view(layout.num_rows, -1)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_mrope_positions_of_random_batches_equal_transformers(seed):
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
            SequenceLayout.padded_rows(lengths, max(lengths) + int(random.integers(0, 4))),
        ):
            result = positions(flat(layout, samples), layout, samples)
            assert result.dtype == torch.int64 and result.shape == (3, layout.num_rows, layout.total // layout.num_rows)
            result = result.flatten(1)
            assert not result[:, layout.padding_mask()].any()
            for sample, start in zip(samples, layout.cu_seqlens_padded.tolist(), strict=False):
                torch.testing.assert_close(result[:, start : start + len(sample[0])], reference(sample), rtol=0, atol=0)


def test_mrope_positions_separate_adjacent_images_by_their_grids():
    """Transformers reads two adjacent images as one; here the grids separate them."""
    ids = [1] + [IMAGE] * 6
    result = positions(torch.tensor([ids]), SequenceLayout.padded_rows([7], 7), [(ids, [[1, 2, 4], [1, 4, 4]], [])])
    assert result[:, 0].tolist() == [[0, 1, 1, 3, 3, 3, 3], [0, 1, 1, 3, 3, 4, 4], [0, 1, 2, 3, 4, 3, 4]]


I, V, S, E = IMAGE, VIDEO, START, END  # noqa: E741  one letter each, so that rows below read as rows


@pytest.mark.parametrize(("ids", "lengths", "images", "videos", "message"), [
    ([S, I, I, E, 1, 1], [4, 2], [], [], "found 2 image tokens in the batch, expected 0 for 0 images"),
    ([1, 1, S, I, I, E], [2, 4], [[1, 2, 2]], [], "found 2 image tokens .* expected 1 for 1 images"),
    ([S, I, E, S, I, E], [3, 3], [[1, 2, 2], [1, 2, 4]], [], "found 2 image tokens .* expected 3 for 2 images"),
    ([S, I, I, E, 1, 1], [6], [[1, 2, 4], [1, 2, 2]], [], "found 2 image tokens .* expected 3 for 2 images"),
    ([S, I, E, I, I, E], [6], [[1, 2, 6]], [], r"segment 0: .* image 0 \(1 x 1 x 3\) .* token 1 .* expected 3"),
    ([1, 1, I, I, 1, 1], [3, 3], [[1, 2, 4]], [], "segment 0: .* image 0 .* at token 2 .* expected 2 consecutive"),
    ([S, V, V, E, 1, 1], [6], [], [[2, 2, 4]], "found 2 video tokens .* expected 4 for 2 video frames"),
    ([S, V, V, E, 1, 1], [6], [[1, 2, 4]], [], "found 0 image tokens .* expected 2 for 1 images"),
    ([S, I, E, 1, 1, I], [5], [[1, 2, 2]] * 2, [], "segment 1: .* image 1 .* token 5 .* before the padding"),
    ([S, I, I, E], [4], [[1, 2, 3]], [], "image 0: found a grid of 1 x 2 x 3 .* divisible by 2"),
    ([S, I, I, E], [4], [[0, 2, 4]], [], "image 0: found a grid of 0 x 2 x 4 patches, expected positive"),
])  # fmt: skip
def test_mrope_positions_raises_if_vision_tokens_do_not_fit_grids(ids, lengths, images, videos, message):
    layout = SequenceLayout.packed_row(lengths, total=len(ids))
    with pytest.raises(ValueError, match=message):
        positions(torch.tensor([ids]), layout, [(ids, images, videos)])


@pytest.mark.parametrize(("call", "message"), [
    ({"rows": torch.ones(1, 7, dtype=torch.int64)}, r"input_ids: found \[1, 7\], expected \[1, 8\]"),
    ({"rows": torch.ones(2, 4, dtype=torch.int64)}, r"input_ids: found \[2, 4\], expected \[1, 8\]"),
    ({"grid": torch.tensor([1, 2, 2])}, r"image grids: found \[3\] torch.int64, expected \[K, 3\] integers"),
    ({"grid": torch.ones(1, 3)}, r"image grids: found \[1, 3\] torch.float32, expected \[K, 3\] integers"),
])  # fmt: skip
def test_mrope_positions_raises_if_shapes_do_not_match(call, message):
    rows = call.get("rows", torch.ones(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        mrope_positions(rows, SequenceLayout.packed_row([8]), call.get("grid"), None, SETTINGS)
