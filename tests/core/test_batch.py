"""The inputs of a rank (`TokenBatch.local`), compared with gathers of the full batch."""

from qwen3vl_bridge.core.layout import token_index

import numpy as np
import pytest
import torch

from tests.core.support import random_batch


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("cp", "sp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_token_batch_local_returns_tokens_that_token_index_assigns_to_rank(cp, sp, packed):
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
                    assert list(zip(rows.sources.tolist(), rows.targets.tolist(), strict=True)) == expected
                    if name == "deepstack" or sp_rank == 0:
                        slots_of[name] += rows.sources.tolist()
        for used in slots_of.values():
            assert sorted(used) == list(range(int((batch.vision_slot >= 0).sum())))


def test_token_batch_local_of_text_batch_has_no_vision_tokens():
    batch = random_batch(np.random.default_rng(0), 4, packed=True, pictures=False)
    share = batch.local(2, 1)
    assert batch.vision is None and share.vision is None
    assert not len(share.fuse.sources) and not len(share.deepstack.sources)


def test_token_batch_to_device_moves_nested_tensors():
    batch = random_batch(np.random.default_rng(0), 4, packed=True)
    for moved in (batch.to("meta"), batch.local(2, 0).to("meta")):
        assert moved.input_ids.device.type == moved.layout.cu_seqlens.device.type == "meta"
        assert moved.vision is not None and moved.vision.pixel_values.device.type == "meta"
        assert moved.vision.lengths == batch.vision.lengths
    assert moved.fuse.sources.device.type == "meta"
