"""Pictures with pixel limits of their own: sizes and pixels as transformers' image processor has them with those."""

import io

from qwen3vl_bridge.data import Conversation, DataError, open_source
from qwen3vl_bridge.data.schemas.conversations import PixelLimits

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ..conftest import picture, write

TOKEN = 32 * 32  # pixels
ANSWER = {"role": "assistant", "content": "7"}
sides = st.integers(min_value=1, max_value=300)
bounds = st.one_of(st.none(), st.integers(min_value=1, max_value=100 * TOKEN))
shown = st.lists(st.tuples(sides, sides, bounds, bounds), min_size=1, max_size=3)


def made(sizes) -> list[bytes]:
    files = []
    for seed, (height, width) in enumerate(sizes):
        file = io.BytesIO()
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file, "PNG")
        files.append(file.getvalue())
    return files


@given(shown)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sizes_and_pixels_are_those_of_the_image_processor(processor, encoder, case):
    """Each picture by itself with both limits, to the bit; and by its header as many tokens."""
    reader = processor.image_processor
    usual = reader.size["shortest_edge"], reader.size["longest_edge"]
    files = made([(height, width) for height, width, _, _ in case])
    own = [PixelLimits(least, most) for _, _, least, most in case]
    parts = [{"type": "image", "image": ""} for _ in case]
    limits = {n: limit for n, limit in enumerate(own) if limit != PixelLimits()}
    messages = ({"role": "user", "content": parts}, ANSWER)
    conversation = Conversation("x", messages, tuple(files), limits=limits)
    whole = [(limit[0] or usual[0], limit[1] or usual[1]) for limit in own]
    flat = any(max(h, w) / min(h, w) > 200 for h, w, _, _ in case)
    if flat or any(least > most or most < TOKEN for least, most in whole):
        for work in (encoder, encoder.size):
            with pytest.raises(DataError, match=r"^x: (image \d: found|the processor refuses it: .*aspect)"):
                work(conversation)
        return
    expected = [
        reader(images=[Image.open(io.BytesIO(file))], min_pixels=least, max_pixels=most, return_tensors="pt")
        for file, (least, most) in zip(files, whole, strict=True)
    ]
    sample, size = encoder(conversation), encoder.size(conversation)
    assert torch.equal(sample.image_grid_thw, torch.cat([one["image_grid_thw"] for one in expected]))
    assert torch.equal(sample.pixel_values, torch.cat([one["pixel_values"] for one in expected]))
    tokens = int((sample.input_ids == processor.image_token_id).sum())
    assert tokens * 4 == size.patches == len(sample.pixel_values)
    assert size.tokens == len(sample)


def user(*parts) -> list:
    return [{"role": "user", "content": list(parts)}, ANSWER]


def test_limits_are_read_from_lines_and_tables(encoder, tmp_path):
    picture(tmp_path / "7.png", 256, 256)
    part = {"type": "image", "image": "7.png"}
    parts = [part, {**part, "max_pixels": 4 * TOKEN}, {**part, "min_pixels": 100 * TOKEN, "max_pixels": 100 * TOKEN}]
    messages = [{"role": "user", "content": parts}, {**ANSWER, "content": [{"type": "text", "text": "7"}]}]
    write(tmp_path / "train.jsonl", [{"messages": messages}])
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "train.parquet")
    for name in ("train.jsonl", "train.parquet"):
        conversation = open_source(tmp_path / name)[0]
        assert all(set(part) == {"type", "image"} for part in conversation.messages[0]["content"])
        grids = encoder(conversation).image_grid_thw
        assert (grids.prod(-1) // 4).tolist() == [64, 4, 100]


@pytest.mark.parametrize(("beside", "message"), [
    ({"min_pixels": 9, "max_pixels": 8}, "found 'min_pixels' 9 beyond 'max_pixels' 8, expected it up to that"),
    ({"max_pixels": 0}, "found 0 under 'max_pixels', expected a number of pixels up to"),
    ({"max_pixels": -1}, "found -1 under 'max_pixels', expected a number of pixels"),
    ({"max_pixels": 1e5}, "found 100000.0 under 'max_pixels', expected a number of pixels"),
    ({"min_pixels": True}, "found true under 'min_pixels', expected a number of pixels"),
    ({"min_pixels": "64"}, "found \"64\" under 'min_pixels', expected a number of pixels"),
    ({"min_pixels": 10**12}, "found 1000000000000 under 'min_pixels', expected a number of pixels up to"),
    ({"resized_height": 64, "resized_width": 64}, "resized_width, expected 'type' and 'image', and 'min_pixels' and"),
])  # fmt: skip
def test_limits_that_are_none_are_refused(read, tmp_path, beside, message):
    picture(tmp_path / "7.png", 64, 64)
    with pytest.raises(DataError, match=message) as caught:
        read(user({"type": "image", "image": "7.png", **beside}))
    assert str(caught.value).startswith("train.jsonl:1: message 1, part 1: ")


@pytest.mark.parametrize(("beside", "message"), [
    ({"max_pixels": 1023}, "image 2: found 'max_pixels' 1023, expected at least 1024, the pixels of one token"),
    ({"min_pixels": 65 * TOKEN}, "image 2: found at least 66560 and at most 65536 pixels, where 'min_pixels' is"),
])  # fmt: skip
def test_limits_that_the_processor_cannot_keep_are_refused(encoder, read, tmp_path, beside, message):
    picture(tmp_path / "7.png", 64, 64)
    part = {"type": "image", "image": "7.png"}
    conversation = read(user(part, {**part, **beside}))
    for work in (encoder, encoder.size):
        with pytest.raises(DataError, match=f"^train.jsonl:1: {message}"):
            work(conversation)


@pytest.mark.parametrize("key", ["min_pixels", "total_pixels", "fps", "nframes", "resized_height", "video_start"])
def test_limits_of_one_video_are_refused(read, key):
    with pytest.raises(DataError, match=rf"part 1: found the keys type, video, {key}, .* all videos, in"):
        read(user({"type": "video", "video": "7.mkv", key: 4}))
