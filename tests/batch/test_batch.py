"""One rank's share of a batch: every tensor against the whole one, token by token."""

from qwen3vl_bridge.batch import PackedBatch, SequenceLayout, make_vision_inputs, token_index, vision_slots

import numpy as np
import pytest
import torch

IMAGE, VIDEO = 90, 91


def random_batch(random: np.random.Generator, multiple: int, packed: bool, pictures: bool = True) -> PackedBatch:
    lengths = random.integers(1, 30, random.integers(1, 5)).tolist()
    layout = (
        SequenceLayout.packed_row(lengths, multiple=multiple)
        if packed
        else SequenceLayout.rows(lengths, -(-max(lengths) // multiple) * multiple)
    )
    shape = (layout.num_rows, layout.total // layout.num_rows)
    images = 4 if pictures else 0
    ids = torch.tensor(random.integers(0, 90, layout.total))
    ids[torch.tensor(random.permutation(layout.total)[:images])] = IMAGE
    images = int((ids == IMAGE).sum())
    vision = make_vision_inputs(
        torch.randn(4 * images, 3), torch.tensor([[1, 2, 2]]).expand(images, 3), None, None,
        num_position_embeddings=16, spatial_merge_size=2,
    )  # fmt: skip
    return PackedBatch(
        input_ids=ids.view(shape), labels=torch.tensor(random.integers(0, 90, shape)),
        loss_mask=torch.tensor(random.random(shape), dtype=torch.float32),
        position_ids=torch.tensor(random.integers(0, 90, (3, *shape))),
        vision_slot=vision_slots(ids, IMAGE, VIDEO, images), layout=layout, vision=vision,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("cp", "sp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_a_share_is_a_gather_of_the_whole(cp, sp, packed):
    random = np.random.default_rng(10 * cp + sp)
    for _ in range(20):
        batch = random_batch(random, (1 if cp == 1 else 2 * cp) * sp, packed)
        slots_of = {"fuse": [], "deepstack": []}
        for cp_rank in range(cp):
            for sp_rank in range(sp):
                share = batch.local(cp, cp_rank, sp, sp_rank)
                held = {"fuse": token_index(batch.layout, cp, cp_rank)}
                held["deepstack"] = token_index(batch.layout, cp, cp_rank, sp, sp_rank)
                tokens = held["fuse"].T.numpy()  # [b, s]
                for name in ("input_ids", "labels", "loss_mask"):
                    expected = getattr(batch, name).numpy().ravel()[tokens]
                    np.testing.assert_array_equal(getattr(share, name).numpy(), expected)
                for axis in range(3):
                    expected = batch.position_ids[axis].numpy().ravel()[tokens]
                    np.testing.assert_array_equal(share.position_ids[axis].numpy(), expected)
                padding = batch.layout.padding_mask()[held["deepstack"].T]
                assert torch.equal(share.padding_mask, padding)
                assert share.vision is batch.vision and share.layout is batch.layout
                for name, index in held.items():
                    rows = getattr(share, name)
                    expected = [
                        (int(batch.vision_slot[token]), place)
                        for place, token in enumerate(index.flatten().tolist())
                        if batch.vision_slot[token] >= 0
                    ]
                    assert list(zip(rows.rows.tolist(), rows.positions.tolist(), strict=True)) == expected
                    if name == "deepstack" or sp_rank == 0:
                        slots_of[name] += rows.rows.tolist()
        for used in slots_of.values():
            assert sorted(used) == list(range(int((batch.vision_slot >= 0).sum())))


def test_without_pictures_there_is_nothing_to_fuse():
    batch = random_batch(np.random.default_rng(0), 4, packed=True, pictures=False)
    share = batch.local(2, 1)
    assert batch.vision is None and share.vision is None and share.fuse is None and share.deepstack is None


def test_to_moves_every_tensor():
    batch = random_batch(np.random.default_rng(0), 4, packed=True)
    for moved in (batch.to("meta"), batch.local(2, 0).to("meta")):
        assert moved.input_ids.device.type == moved.layout.cu_seqlens.device.type == "meta"
        assert moved.vision is not None and moved.vision.pixel_values.device.type == "meta"
        assert moved.vision.lengths == batch.vision.lengths
    assert moved.fuse.rows.device.type == "meta"
