"""Layouts and batches at random."""

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings, make_vision_inputs, vision_slots

import numpy as np
import torch
from hypothesis import strategies as st

IMAGE, VIDEO = 90, 91
SETTINGS = VisionSettings(IMAGE, VIDEO, 2, 16)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[SequenceLayout, int, int]:
    """Return a layout with sizes of context and sequence parallelism that divide it."""
    cp, sp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4]))
    multiple = (1 if cp == 1 else 2 * cp) * sp
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    if draw(st.booleans()):
        seq_length = -(-max(lengths) // multiple) * multiple
        return SequenceLayout.padded_rows(lengths, seq_length), cp, sp
    packed = SequenceLayout.packed_row(lengths, multiple=multiple)
    total = packed.total + multiple * draw(st.integers(0, 3))
    return SequenceLayout.packed_row(lengths, multiple=multiple, total=total), cp, sp


def random_batch(random: np.random.Generator, multiple: int, packed: bool, pictures: bool = True) -> TokenBatch:
    lengths = random.integers(1, 30, random.integers(1, 5)).tolist()
    layout = (
        SequenceLayout.packed_row(lengths, multiple=multiple)
        if packed
        else SequenceLayout.padded_rows(lengths, -(-max(lengths) // multiple) * multiple)
    )
    shape = (layout.num_rows, layout.total // layout.num_rows)
    images = 4 if pictures else 0
    ids = torch.tensor(random.integers(0, 90, layout.total))
    ids[torch.tensor(random.permutation(layout.total)[:images])] = IMAGE
    images = int((ids == IMAGE).sum())
    vision = make_vision_inputs(
        torch.randn(4 * images, 3), torch.tensor([[1, 2, 2]]).expand(images, 3), None, None, SETTINGS
    )
    return TokenBatch(
        input_ids=ids.view(shape), labels=torch.tensor(random.integers(0, 90, shape)),
        loss_mask=torch.tensor(random.random(shape), dtype=torch.float32),
        position_ids=torch.tensor(random.integers(0, 90, (3, *shape))),
        vision_slot=vision_slots(ids, torch.tensor([[images, 2, 2]]), SETTINGS), layout=layout, vision=vision,
    )  # fmt: skip
