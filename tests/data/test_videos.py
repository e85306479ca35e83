"""Test frames, timestamps and tokens of videos against the processor, and invalid files."""

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data import videos as reading

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from tests.data.conftest import dialogue, picture


def clip(path, frames: int, rate: int = 10, size=(96, 128), times=None, codec=None, step=3):
    """Write a lossless .mkv video; each frame has one gray level, which identifies it."""
    height, width = size
    lossless = path.suffix == ".mkv" and codec is None
    pixels, codec = ("bgr0", "ffv1") if lossless else ("yuv420p", codec or "mpeg4")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options={"crf": "0"} if codec == "libx264" else {})
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), number * step % 256, np.uint8), "rgb24")
            frame.pts = number if times is None else times[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def ask(*parts) -> list:
    return dialogue([*parts, {"type": "text", "text": "Which?"}], "Seven.")


@pytest.mark.parametrize("frames", [1, 4, 7, 46, 100])
@pytest.mark.parametrize("rate", [10, 24])
def test_encoder_video_matches_transformers_processor(processor, encoder, read, tmp_path, frames, rate):
    """Equal except for the start and end tokens that transformers 5.12 leaves around a video."""
    clip(tmp_path / "a.mkv", frames, rate)
    conversation = read(ask({"type": "video", "video": "a.mkv"}, {"type": "video", "video": "a.mkv"}))
    sample = encoder(conversation)
    text = processor.apply_chat_template([{**message} for message in conversation.messages], tokenize=False)
    with av.open(str(tmp_path / "a.mkv")) as container:
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    metadata = [VideoMetadata(total_num_frames=frames, fps=rate, frames_indices=list(range(frames)))] * 2
    once = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    expected = processor(text=[once], videos=[decoded, decoded], video_metadata=metadata, return_tensors="pt")
    assert torch.equal(sample.input_ids, expected["input_ids"][0])
    assert torch.equal(sample.pixel_values_videos, expected["pixel_values_videos"])
    assert torch.equal(sample.video_grid_thw, expected["video_grid_thw"])
    assert encoder.size(conversation).tokens == len(sample)
    assert sample.pixel_values is None and sample.image_grid_thw is None
    labels = sample.labels[sample.loss_mask.bool()]
    assert processor.tokenizer.decode(labels) == "Seven.<|im_end|>"


def test_encoder_encodes_all_frames_of_frame_list(processor, encoder, read, tmp_path):
    names = [f"{number}.png" for number in range(46)]
    for number, name in enumerate(names):
        picture(tmp_path / name, 64, 64, seed=number)
    sample = encoder(read(ask({"type": "video", "video": names, "sample_fps": 2})))
    assert sample.video_grid_thw[0, 0] == 23
    text = processor.tokenizer.decode(sample.input_ids)
    assert "<0.2 seconds>" in text and "<22.2 seconds>" in text and text.count(" seconds>") == 23
    first = processor.video_processor(
        videos=[torch.stack([torch.from_numpy(np.array(Image.open(tmp_path / n))).permute(2, 0, 1) for n in names])],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert torch.equal(sample.pixel_values_videos, first["pixel_values_videos"])


@pytest.mark.parametrize("rates", [["1", None, 4], [1, None, "4.0"], ["1e0", None, "4"]])
def test_sample_fps_key_of_record_acts_like_sample_fps_of_video_parts(encoder, read, tmp_path, rates):
    for name in ("a.png", "b.png"):
        picture(tmp_path / name, 64, 64)
    clip(tmp_path / "c.mkv", 4)
    videos = [["a.png", "b.png"], "c.mkv", ["b.png", "a.png"]]
    own = [{"type": "video", "video": one} for one in videos]
    turns = ask({**own[0], "sample_fps": 1}, own[1], {**own[2], "sample_fps": 4})
    parts = read(turns)
    said = [{"role": "user", "content": [*[{"type": "video"}] * 3, turns[0]["content"][-1]]}, turns[1]]
    assert [video.fps for video in parts.videos[::2]] == [1, 4]
    beside = read({"messages": said, "videos": videos, "sample_fps": rates})
    assert beside.videos == parts.videos and torch.equal(encoder(beside).input_ids, encoder(parts).input_ids)
    asked = {"question": "Which?", "answer": "Seven.", "videos": videos, "sample_fps": rates}
    assert read(asked).videos == parts.videos
    # One for every list of frames; a part's own comes first.
    said[0]["content"][2] = {"type": "video", "sample_fps": "3"}
    found = read({"messages": said, "videos": videos, "sample_fps": "0.5"}).videos
    assert [video.fps for video in found[::2]] == [0.5, 3]
    text = encoder.processor.tokenizer.decode(encoder(beside).input_ids)
    assert "<0.5 seconds>" in text and "<0.1 seconds>" in text


@pytest.mark.parametrize(("videos", "rates", "problem"), [
    ([["a.png"], ["a.png"]], [1], r"found \[1\] under 'sample_fps' next to 2 videos .* each of the 2 videos"),
    ([["a.png"], "a.mp4"], [1, 2], r"found \[1, 2\] under 'sample_fps' next to 1 videos .* null for another video"),
    (["a.mp4"], 2, "found 2 under 'sample_fps' next to 0 videos that are lists of frames"),
    ([["a.png"]], None, "found None as the 'sample_fps' of a list of frames, expected the frames per second"),
    *(([["a.png"]], rate, f"found '{rate}' as the 'sample_fps'") for rate in ("two", "-1", "nan", "inf")),
    ([["a.png"]], 10**400, "found 1000.* as the 'sample_fps'"), ([["a.png"]], [True], "found True as the 'sample_fps'"),
    ([["a.png"]], {"a": 1}, "found {'a': 1} as the 'sample_fps'"),
])  # fmt: skip
def test_record_raises_if_sample_fps_is_invalid(read, tmp_path, videos, rates, problem):
    picture(tmp_path / "a.png", 32, 32), (tmp_path / "a.mp4").write_bytes(b"x")
    with pytest.raises(DataError, match=problem):
        read({"messages": dialogue("<video>" * len(videos), "Seven."), "videos": videos, "sample_fps": rates})


def test_sample_frames_times_equal_timestamps_in_file(processor, tmp_path):
    times = [0, 1, 2, 3, 50, 51, 52, 53]
    sampled = reading.sample_frames(clip(tmp_path / "a.mkv", 8, 10, times=times), processor.video_processor, "here")
    assert np.allclose([sampled.times[0], sampled.times[-1]], [0, 5.3], atol=0.01)
    assert all(min(abs(time - shown / 10) for shown in times) < 0.01 for time in sampled.times)


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_load_frames_applies_rotation_of_video(processor, tmp_path, turn):
    path, bright = tmp_path / "a.mp4", np.zeros((64, 128, 3), np.uint8)
    bright[:32, :64] = 255  # upper left
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "0"})
        stream.width, stream.height, stream.pix_fmt = 128, 64, "yuv420p"
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(bright, "rgb24")))
        container.mux(stream.encode())
    matrix = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[turn]
    a, b, c, d = (number << 16 for number in matrix)
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    data[at : at + 36] = b"".join(n.to_bytes(4, "big", signed=True) for n in (a, b, 0, c, d, 0, 0, 0, 1 << 30))
    path.write_bytes(data)
    sampled = reading.sample_frames(path, processor.video_processor, "here")
    frame = reading.load_frames(path, sampled, processor.video_processor, "here")[0, 0].float()
    height, width = frame.shape
    assert (height > width) == (turn in (90, 270))
    quarters = [frame[: height // 2, : width // 2], frame[: height // 2, width // 2 :]]
    quarters += [frame[height // 2 :, width // 2 :], frame[height // 2 :, : width // 2]]  # clockwise
    assert int(torch.stack([quarter.mean() for quarter in quarters]).argmax()) == turn // 90


def test_encoder_raises_if_frames_have_different_sizes(encoder, read, tmp_path):
    picture(tmp_path / "a.png", 64, 64), picture(tmp_path / "b.png", 64, 96)
    conversation = read(ask({"type": "video", "video": ["a.png", "b.png"], "sample_fps": 1}))
    with pytest.raises(DataError, match=r"jsonl:1: found frames of the sizes \[\(64, 64\), \(64, 96\)\], expected"):
        encoder(conversation)


@pytest.mark.parametrize("method", ["size", "__call__"])
@pytest.mark.parametrize(("content", "message"), [
    (b"", "does not decode as a video"), (b"no video", "does not decode as a video"),
    ("sound", "has no video frames, expected a video"),
    ("empty", "no frames|does not decode as a video|has no video frames"),
])  # fmt: skip
def test_encoder_raises_if_video_is_undecodable_or_empty(encoder, read, tmp_path, content, message, method):
    path = tmp_path / "a.mkv"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "sound":
        with av.open(str(path), "w") as container:
            stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), "s16", "mono")
            frame.sample_rate = 8000
            container.mux([*stream.encode(frame), *stream.encode()])
    else:
        with av.open(str(path), "w") as container:
            stream = container.add_stream("ffv1", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 64, "bgr0"
            container.start_encoding()
    conversation = read(ask({"type": "video", "video": "a.mkv"}))
    with pytest.raises(DataError, match=message) as caught:
        getattr(encoder, method)(conversation)
    assert str(caught.value).startswith("train.jsonl:1")


@pytest.mark.parametrize(("part", "message"), [
    ({"video": []}, "a video without frames, expected at least one"),
    ({"video": ["a.png"]}, "found None as the 'sample_fps' of a list of frames"),
    ({"video": ["a.png"], "sample_fps": 0}, "found 0 as the 'sample_fps'"),
    ({"video": 7}, "found 7 under 'video', expected a path or bytes"),
    ({"video": "a.mp4", "sample_fps": 2}, "found the keys type, video, sample_fps, expected"),
    ({"video": "b.mp4"}, "which does not exist"),
])  # fmt: skip
def test_record_raises_if_video_part_is_invalid(read, tmp_path, part, message):
    picture(tmp_path / "a.png", 32, 32), (tmp_path / "a.mp4").write_bytes(b"x")
    with pytest.raises(DataError, match=message):
        read(ask({"type": "video", **part}))


def test_sample_frames_from_bytes_equal_frames_from_file(processor, tmp_path):
    path = clip(tmp_path / "a.mkv", 12)
    rows = [reading.sample_frames(media, processor.video_processor, "here") for media in (path, path.read_bytes())]
    assert rows[0] == rows[1]
    loaded = [
        reading.load_frames(media, rows[0], processor.video_processor, "here") for media in (path, path.read_bytes())
    ]
    assert torch.equal(*loaded)
    assert rows[0].size == (96, 128)


def encoded(path, frames: int, times=None):
    """Write an H.264 video with frames that refer to later ones; each frame has one gray level."""
    return clip(path, frames, size=(64, 64), times=times, codec="libx264", step=5)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov"])
def test_sample_frames_takes_frame_rate_from_timestamps_not_header(processor, tmp_path, suffix):
    """Some containers have another rate in the header, from the settings of the encoder."""
    path = encoded(tmp_path / f"a.{suffix}", 20, times=[10 * number for number in range(20)])
    sampled = reading.sample_frames(path, processor.video_processor, "here")
    assert sampled.indices == tuple(range(20)) and np.allclose(sampled.times, range(20), atol=0.01)


def test_sample_frames_skips_frames_with_negative_timestamps(processor, tmp_path):
    path = encoded(tmp_path / "a.mp4", 24, times=[number - 10 for number in range(24)])
    sampled = reading.sample_frames(path, processor.video_processor, "here")
    frames = reading.load_frames(path, sampled, processor.video_processor, "here")
    assert max(sampled.indices) == 13 and len(frames) == len(sampled.times)
    assert abs(frames[-1].float().mean() - 23 * 5) < 3 and abs(frames[0].float().mean() - 10 * 5) < 3


def test_sample_frames_raises_if_videos_are_concatenated(processor, tmp_path):
    path = encoded(tmp_path / "a.ts", 20)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DataError, match=r"here: .*a.ts: timestamps go backwards \(dts -?\d+ after \d+\)"):
        reading.sample_frames(path, processor.video_processor, "here")


def test_sample_frames_raises_if_codec_is_unknown(processor, tmp_path):
    path = encoded(tmp_path / "a.mp4", 4)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"xxxx"))
    with pytest.raises(DataError, match=r"here: .*a.mp4 (has frames in a format|does not decode)"):
        reading.sample_frames(path, processor.video_processor, "here")


def test_video_in_answer_is_not_trained_on(processor, encoder, read, tmp_path):
    clip(tmp_path / "a.mkv", 12)
    sample = encoder(read(dialogue("Show.", [{"type": "video", "video": "a.mkv"}, {"type": "text", "text": "There."}])))
    assert sample.video_grid_thw is not None
    assert processor.tokenizer.decode(sample.labels[sample.loss_mask.bool()]) == "There.<|im_end|>"
