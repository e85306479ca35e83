"""Vision indices against transformers' own, bit for bit, on random pictures."""

from qwen3vl_bridge.batch import frame_lengths, interpolation, make_vision_inputs, patch_positions, vision_slots

import numpy as np
import pytest
import torch
from transformers.vision_utils import (
    get_vision_bilinear_indices_and_weights,
    get_vision_cu_seqlens,
    get_vision_position_ids,
)

IMAGE, VIDEO = 90, 91


def random_grids(random: np.random.Generator, merge: int, most: int = 6, frames: int = 4) -> torch.Tensor:
    count = int(random.integers(1, most))
    sides = merge * random.integers(1, 40, (count, 2))
    return torch.tensor(np.concatenate([random.integers(1, frames, (count, 1)), sides], axis=1))


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_patches_lie_where_transformers_puts_them(merge):
    random = np.random.default_rng(merge)
    for _ in range(100):
        grids = random_grids(random, merge)
        torch.testing.assert_close(patch_positions(grids, merge), get_vision_position_ids(grids, merge), rtol=0, atol=0)


@pytest.mark.parametrize(("side", "merge"), [(48, 2), (4, 2), (7, 1), (16, 3)])
def test_interpolation_is_that_of_transformers_to_the_bit(side, merge):
    random = np.random.default_rng(side)
    for _ in range(100):
        grids = random_grids(random, merge)
        index, weight = interpolation(grids, side, merge)
        expected_index, expected_weight = get_vision_bilinear_indices_and_weights(grids, side, merge)
        assert index.dtype == torch.int64 and weight.dtype == torch.float32
        assert torch.equal(index, expected_index.long())
        assert torch.equal(weight, expected_weight)


def test_interpolation_of_every_side_up_to_200():
    """Every size rounds in its own way: take them all, with the released models' 48 x 48 table."""
    sides = torch.arange(2, 202, 2)
    grids = torch.stack((torch.ones_like(sides), sides, sides.flip(0)), dim=-1)
    index, weight = interpolation(grids, 48, 2)
    expected_index, expected_weight = get_vision_bilinear_indices_and_weights(grids, 48, 2)
    assert torch.equal(index, expected_index.long()) and torch.equal(weight, expected_weight)


@pytest.mark.parametrize("grid", [[1, 4, 6], [3, 4, 6], [1, 66, 64]])  # the last is too large to be kept
def test_results_are_the_callers_own(grid):
    """What is kept from one call to the next is never handed out, even for a single picture."""
    grids = torch.tensor([grid])
    for _ in range(2):
        index, weight = interpolation(grids, 8, 2)
        places = patch_positions(grids, 2)
        expected = (*get_vision_bilinear_indices_and_weights(grids, 8, 2), get_vision_position_ids(grids, 2))
        for found, right in zip((index, weight, places), expected, strict=True):
            assert torch.equal(found, right.to(found)) and found.is_contiguous()
            found.fill_(-1)


def test_what_is_kept_does_not_depend_on_defaults():
    """Models are often made under another default type or device; batches may be too."""
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


def test_no_pictures_have_no_patches():
    none = torch.zeros(0, 3, dtype=torch.int64)
    index, weight = interpolation(none, 8, 2)
    assert index.shape == weight.shape == (4, 0) and index.dtype == torch.int64 and weight.dtype == torch.float32
    assert patch_positions(none, 2).shape == (0, 2)


def test_slots_are_rows_of_images_then_videos():
    ids = torch.tensor([[1, IMAGE, IMAGE, 2, VIDEO], [VIDEO, 3, IMAGE, 4, 5]])
    assert vision_slots(ids, IMAGE, VIDEO, 3).tolist() == [-1, 0, 1, -1, 3, 4, -1, 2, -1, -1]
    assert vision_slots(torch.ones(2, 3), IMAGE, VIDEO, 0).tolist() == [-1] * 6
    with pytest.raises(ValueError, match="found 3 image tokens, expected 4"):
        vision_slots(ids, IMAGE, VIDEO, 4)


def test_slots_use_every_row_once():
    random = np.random.default_rng(0)
    for _ in range(100):
        ids = torch.tensor(random.choice([0, 1, IMAGE, VIDEO], size=(2, 30)))
        images, videos = int((ids == IMAGE).sum()), int((ids == VIDEO).sum())
        slots = vision_slots(ids, IMAGE, VIDEO, images)
        used = slots[slots >= 0]
        assert used.sort().values.tolist() == list(range(images + videos))
        assert torch.equal(slots[ids.flatten() == IMAGE], torch.arange(images))
        assert torch.equal(slots[ids.flatten() == VIDEO], torch.arange(images, images + videos))


def test_vision_inputs_are_images_then_videos():
    random = np.random.default_rng(1)
    for _ in range(30):
        images, videos = random_grids(random, 2, frames=2), random_grids(random, 2)
        pixels, clips = (torch.randn(int(grids.prod(-1).sum()), 3) for grids in (images, videos))
        both = torch.cat((images, videos))
        inputs = make_vision_inputs(pixels, images, clips, videos, num_position_embeddings=64, spatial_merge_size=2)
        assert inputs is not None
        assert torch.equal(inputs.pixel_values, torch.cat((pixels, clips)))
        assert torch.equal(inputs.cu_seqlens, get_vision_cu_seqlens(both))
        assert inputs.cu_seqlens.dtype == torch.int32
        assert inputs.lengths == tuple(frame_lengths(both).tolist()) == tuple(inputs.cu_seqlens.diff().tolist())
        assert torch.equal(inputs.position_ids, get_vision_position_ids(both, 2))
        index, weight = get_vision_bilinear_indices_and_weights(both, 8, 2)
        assert torch.equal(inputs.interpolation_index, index) and torch.equal(inputs.interpolation_weight, weight)


@pytest.mark.parametrize("kind", [0, 1])
def test_vision_inputs_of_one_kind_or_none(kind):
    arguments: list[torch.Tensor | None] = [None] * 4
    arguments[2 * kind : 2 * kind + 2] = torch.randn(8, 3), torch.tensor([[1, 2, 4]])
    inputs = make_vision_inputs(*arguments, num_position_embeddings=16, spatial_merge_size=2)
    assert inputs is not None and inputs.lengths == (8,) and inputs.pixel_values is arguments[2 * kind]
    empty = (torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64))
    for nothing in ((None,) * 4, (*empty, None, None), (*empty, *empty)):
        assert make_vision_inputs(*nothing, num_position_embeddings=16, spatial_merge_size=2) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pixel_values": None}, "image pixels: found 0 patches, expected 8 for 1 image grids"),
        ({"image_grid_thw": None}, "image pixels: found 8 patches, expected 0 for 0 image grids"),
        ({"pixel_values": torch.zeros(7, 3)}, "image pixels: found 7 patches, expected 8"),
        ({"pixel_values_videos": torch.zeros(4, 3)}, "video pixels: found 4 patches, expected 0"),
        ({"image_grid_thw": torch.tensor([[1, 8, 1]])}, "image 0: found a grid of 1 x 8 x 1 .* divisible by 2"),
        ({"video_grid_thw": torch.tensor([[1, 2, 4], [1, 3, 4]])}, "video 1: found a grid of 1 x 3 x 4"),
        ({"num_position_embeddings": 15}, "found 15 position embeddings, expected a square number"),
    ],
)
def test_pixels_and_grids_that_disagree_are_refused(changed, message):
    good = {
        "pixel_values": torch.zeros(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]]), "pixel_values_videos": None,
        "video_grid_thw": None, "num_position_embeddings": 16, "spatial_merge_size": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        make_vision_inputs(**{**good, **changed})
