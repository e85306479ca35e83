"""Samples cut short, samples that prove bad, and which answers are trained on."""

import re

from qwen3vl_bridge.data import BatchStream, DataError, Encoder, JsonLines, load_processor, one_pass
from qwen3vl_bridge.data.encoding import VisionLimits

import numpy as np
import pytest
import torch

from ..conftest import picture, random_record, write
from ..media.test_video import clip


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_a_sample_is_cut_between_pictures(encoder, processor, tmp_path):
    """At every limit: the beginning of the whole sample, all of a picture or nothing of it, and its pixels with it."""
    clip(tmp_path / "a.mkv", 12, size=(64, 64))
    random = np.random.default_rng(1)
    records = [random_record(tmp_path, number, random) for number in range(6)]
    films = [{"type": "video", "video": "a.mkv"}] * 2
    records[0]["messages"] += [{"role": "user", "content": films}, answer("Seven. Seven. Seven.")]
    file = JsonLines(write(tmp_path / "train.jsonl", records))
    cut = 0
    for conversation in (file[index] for index in range(6)):
        whole = encoder(conversation)
        first = int(whole.loss_mask.nonzero()[0]) + 2
        for limit in range(first - 1, len(whole) + 2, 3):
            if limit < first:
                with pytest.raises(DataError, match=r"jsonl:\d: found \d+ tokens, and no answer among the first \d+"):
                    encoder(conversation, limit)
                continue
            sample = encoder(conversation, limit)
            length = len(sample)
            assert length <= limit and encoder.size(conversation, limit).tokens == length
            assert torch.equal(sample.input_ids, whole.input_ids[:length])
            assert torch.equal(sample.loss_mask[:-1], whole.loss_mask[: length - 1]) and sample.loss_mask[-1] == 0
            cut += length < len(whole)
            for kind, grids, pixels in (
                ("image", "image_grid_thw", "pixel_values"),
                ("video", "video_grid_thw", "pixel_values_videos"),
            ):
                found = getattr(sample, grids)
                count = 0 if found is None else int(found.prod(-1).sum())
                assert count == 4 * int((sample.input_ids == getattr(processor, f"{kind}_token_id")).sum())
                if found is not None:
                    assert torch.equal(found, getattr(whole, grids)[: len(found)])
                    assert torch.equal(getattr(sample, pixels), getattr(whole, pixels)[:count])
            if length < min(limit, len(whole)):  # only a picture, or a video with its times, leaves room
                follows = processor.tokenizer.decode(whole.input_ids[length : length + 10])
                assert re.match(r"<\|vision_start\|>|<0\.\d seconds>", follows), follows
    assert cut > 30


def test_a_long_sample_is_cut_and_counted(make_rows, caplog):
    rows = make_rows(seq_length=64, seed=None, on_long="truncate", on_bad="drop")()
    batches = list(one_pass(rows))
    assert all(batch.input_ids.shape == (1, 64) for batch in batches)
    cut, dropped = rows.samples.sample_filter.num_truncated, rows.samples.sample_filter.num_dropped
    assert cut > 4 and dropped == 0
    assert len({name for batch in batches for name in batch.sample_ids}) == 40 - dropped
    assert any(f"expected at most 64: cut, {min(cut, 4)} so far" in message for message in caplog.messages)


@pytest.mark.parametrize("pack", [True, False])
def test_bad_samples_are_dropped_and_counted(make_rows, tmp_path, caplog, pack):
    """One that cannot be read is planned around; one that breaks off only when it is decoded leaves one token."""
    random = np.random.default_rng(1)
    records = [random_record(tmp_path, number, random) for number in range(10)]
    seen = picture(tmp_path / "broken.png", 64, 64)
    seen.write_bytes(seen.read_bytes()[:-2000])
    question = {"role": "user", "content": [{"type": "image", "image": "broken.jpg"}]}
    records[3] = {"messages": [question, answer("Seven.")]}
    broken = picture(tmp_path / "broken.jpg", 64, 64)
    broken.write_bytes(broken.read_bytes()[:-400])
    path = write(tmp_path / "train.jsonl", [*records, {"messages": []}])
    with pytest.raises(DataError, match=r"train.jsonl:11: found an empty list"):
        list(one_pass(make_rows(path, seed=None, pack=pack)()))
    rows = make_rows(path, seed=None, pack=pack, on_bad="drop")()
    batches = list(one_pass(rows))
    names = [name for batch in batches for name in batch.sample_ids]
    assert sorted(names) == sorted(f"train.jsonl:{line}" for line in range(1, 11))
    assert rows.samples.sample_filter.num_dropped == 2
    assert any(
        "train.jsonl:11: found an empty list" in text and "dropped, 1 so far" in text for text in caplog.messages
    )
    assert any("train.jsonl:4: " in text and "left blank (1)" in text for text in caplog.messages)
    assert batches[-1].dropped == (1,) and sum(sum(batch.unreadable) for batch in batches) == 1
    batch = next(batch for batch in batches if "train.jsonl:4" in batch.sample_ids)
    assert batch.layout.lengths[batch.sample_ids.index("train.jsonl:4")] == 1


def test_the_last_answer_alone(processor, read):
    conversation = read(
        [{"role": "user", "content": "?"}, answer("one"), {"role": "user", "content": "?"}, answer("two")]
    )
    found = {}
    for answers in ("all", "last"):
        sample = Encoder(processor, answers)(conversation)
        found[answers] = processor.tokenizer.decode(sample.labels[sample.loss_mask.bool()])
    assert found == {"all": "one<|im_end|>two<|im_end|>", "last": "two<|im_end|>"}
    with pytest.raises(ValueError, match="answers is 'first', expected 'all' or 'last'"):
        Encoder(processor, "first")


def test_limits_are_put_on_the_processor(processor, tmp_path):
    processor.save_pretrained(tmp_path / "hf")
    limits = VisionLimits(image_max_pixels=64 * 64, video_fps=1, video_max_frames=8, video_max_pixels=8 * 64 * 64)
    encoder = Encoder(load_processor(tmp_path / "hf", limits))
    picture(tmp_path / "a.png", 128, 128), clip(tmp_path / "a.mkv", 100, size=(128, 128))
    parts = [{"type": "image", "image": "a.png"}, {"type": "video", "video": "a.mkv"}]
    file = JsonLines(write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": parts}, answer("7")]}]))
    sample = encoder(file[0])
    assert sample.image_grid_thw.tolist() == [[1, 4, 4]] and sample.video_grid_thw.tolist() == [[4, 4, 4]]
    for wrong, message in (
        ({"video_fps": 0}, "video_fps is 0, expected a positive number"),
        ({"image_min_pixels": 10**9}, "images of 1000000000 pixels at least and .* at most"),
        ({"video_min_frames": 100}, "video_min_frames is 100, expected at most 32"),
    ):
        with pytest.raises(ValueError, match=message):
            load_processor(tmp_path / "hf", VisionLimits(**wrong))


def test_a_stream_that_met_a_bad_sample_stays_before_it(make_rows, tmp_path):
    """Asked again it says so again; it does not go on with a position that is not its own."""
    random = np.random.default_rng(1)
    records = [random_record(tmp_path, number, random) for number in range(6)]
    path = write(tmp_path / "train.jsonl", [*records[:3], {"messages": []}, *records[3:]])
    stream = BatchStream(make_rows(path, seed=None, pack=False, window_size=1)())
    for _ in range(3):
        next(stream)
    for _ in range(2):
        with pytest.raises(DataError, match=r"train.jsonl:4: found an empty list"):
            next(stream)
    assert stream.state_dict()["row"] == 3
