"""Read the timestamps of videos, and load the frames that a processor samples.

Each frame is resized right after decoding, so that only resized frames are kept in memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media import FrameList, Media, Video, check_pixels, describe, image_size, load_image

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import SizeDict
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

# FFmpeg's names of formats that contain the video themselves. Playlists and stream descriptions (hls, concat, dash,
# sdp) make it open other files, also outside the media root, or the network.
_KINDS = "mov,matroska,avi,mpeg,mpegts,mpegvideo,flv,ogg,asf,gif,ivf,mxf,nut,m4v,h264,hevc,mjpeg,yuv4mpegpipe"
# A file may claim any number of frames.
_MOST_FRAMES = 1 << 20


@dataclass(frozen=True)
class SampledFrames:
    """The frames to sample from a video: their indices, their timestamps, and their size after resizing."""

    grid: tuple[int, int, int]  # (frames, height, width) in patches
    size: tuple[int, int]  # height and width in pixels of resized frames
    indices: tuple[int, ...]  # of the sampled frames
    times: tuple[float, ...]  # their timestamps in seconds

    def frame_times(self) -> list[float]:
        """Return the timestamp of each temporal patch in seconds: the mean of its first and last frame.

        Source: transformers, `Qwen3VLProcessor._calculate_timestamps`.
        """
        several = -(-len(self.times) // self.grid[0])
        times = [*self.times, *[self.times[-1]] * (several * self.grid[0] - len(self.times))]
        return [(times[at] + times[at + several - 1]) / 2 for at in range(0, len(times), several)]


def sample_frames(video: Video, processor: Any, place: str) -> SampledFrames:
    """Return which frames a Qwen3VLVideoProcessor samples from a video, without decoding them.

    If the video is given as a list of frames, all frames are sampled.

    Raises:
        DataError: the file is not a video, has no frames, or frames that are too small or too large.
    """
    if isinstance(video, FrameList):
        sizes = {image_size(frame, place) for frame in video.frames}
        if len(sizes) != 1:
            raise DataError(place, f"found frames of the sizes {sorted(sizes)}, expected one size")
        (height, width), times = sizes.pop(), [number / video.fps for number in range(len(video.frames))]
        indices = range(len(times))
    else:
        height, width, rate, shown = _read_timestamps(video, place)
        wanted = processor.sample_frames(VideoMetadata(total_num_frames=len(shown), fps=rate), fps=processor.fps)
        indices = [int(index) for index in wanted]
        times = [shown[index] for index in indices]
    try:
        size = smart_resize(
            num_frames=len(times),
            height=height,
            width=width,
            temporal_factor=processor.temporal_patch_size,
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
    except ValueError as error:
        raise DataError(
            place, f"the processor does not accept a video of {width} x {height} pixels: {error}"
        ) from error
    grid = (-(-len(times) // processor.temporal_patch_size), *(side // processor.patch_size for side in size))
    return SampledFrames(grid, size, tuple(indices), tuple(times))


def load_frames(video: Video, sampled: SampledFrames, processor: Any, place: str) -> Tensor:
    """Return the sampled frames after resizing, [frames, 3, height, width] uint8.

    Raises:
        DataError: a frame does not decode.
    """
    if isinstance(video, FrameList):
        frames: Iterator[np.ndarray] = (np.asarray(load_image(frame, place)) for frame in video.frames)
    else:
        frames = _decode_frames(video, sampled.indices, place)
    small = [
        # Newer releases (5.23) have a `resize` for Qwen3-VL that computes the size again, and expects a video.
        BaseVideoProcessor.resize(
            processor,
            torch.from_numpy(np.array(frame)).permute(2, 0, 1).unsqueeze(0),
            size=SizeDict(*sampled.size),
            resample=processor.resample,
        )
        for frame in frames
    ]
    return torch.cat(small)


@contextmanager
def _open_container(video: Media, place: str) -> Iterator[Any]:
    """Open a video file with PyAV; raise DataError if it cannot be opened or has no video stream."""
    try:
        import av
    except ImportError:
        raise DataError(
            place, "found a video, but PyAV, which decodes videos, is missing: install qwen3vl-bridge[video]"
        ) from None
    try:
        name = str(video) if isinstance(video, Path) else io.BytesIO(video)
        with av.open(name, container_options={"format_whitelist": _KINDS}) as container:
            if not container.streams.video:
                raise DataError(place, f"{describe(video)} has no video frames, expected a video")
            yield container
    except DataError:
        raise
    except Exception as error:  # each of FFmpeg's decoders has its own
        problem = f"{describe(video)} does not decode as a video: {error}"
        raise DataError(place, f"{problem}; expected one of the kinds {_KINDS}") from error


def _read_timestamps(video: Media, place: str) -> tuple[int, int, float, Sequence[float]]:
    """Return height, width, frames per second, and the timestamp of each frame in seconds since the first frame."""
    name = describe(video)
    with _open_container(video, place) as container:
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise DataError(place, f"{name} has frames in a format that this FFmpeg does not decode. Re-encode it.")
        check_pixels(stream.width, stream.height, name, place)
        rate = stream.average_rate or stream.guessed_rate
        first = next(container.decode(stream), None)
        if first is None:
            raise DataError(place, f"{name} has no frames, expected at least one")
        height, width = _rotate_upright(np.empty((first.height, first.width)), first).shape
    shown, before = [], None
    # Timestamps are read from packets; the number of frames in a header is often missing or wrong.
    with _open_container(video, place) as container:
        stream = container.streams.video[0]
        for packet in container.demux(stream):
            if packet.dts is not None:
                if before is not None and packet.dts < before:
                    found = f"dts {packet.dts} after {before}"
                    raise DataError(
                        place, f"{name}: timestamps go backwards ({found}), as in concatenated videos. Re-encode it."
                    )
                before = packet.dts
            if packet.size and packet.pts is not None and not packet.is_discard:
                shown.append(packet.pts)
            if len(shown) > _MOST_FRAMES:
                raise DataError(place, f"{name} has over {_MOST_FRAMES:,} frames, expected fewer. Split it.")
        if not shown:
            raise DataError(place, f"{name} has no timestamps. Re-encode it.")
        shown.sort()
        seconds = [float((time - shown[0]) * stream.time_base) for time in shown]
    # For a constant frame rate, timestamps from frame indices have no rounding; otherwise the header's rate is
    # meaningless.
    if rate and all(abs(time - number / float(rate)) < 0.5 / float(rate) for number, time in enumerate(seconds)):
        return height, width, float(rate), [number / float(rate) for number in range(len(seconds))]
    if not seconds[-1]:
        raise DataError(place, f"{name} has no usable frame rate: its timestamps are equal. Re-encode it.")
    return height, width, (len(seconds) - 1) / seconds[-1], seconds


def _decode_frames(video: Media, indices: Sequence[int], place: str) -> Iterator[np.ndarray]:
    """Yield the frames at `indices` in RGB, [height, width, 3] uint8, in order."""
    with _open_container(video, place) as container:
        wanted, number = list(indices), 0
        for frame in container.decode(video=0):
            while wanted and wanted[0] == number:
                yield _rotate_upright(frame.to_ndarray(format="rgb24"), frame)
                wanted.pop(0)
            number += 1
            if not wanted:
                return
        raise DataError(place, f"{describe(video)} ends after {number} frames, before frame {wanted[0]}. Re-encode it.")


def _rotate_upright(image: np.ndarray, frame: Any) -> np.ndarray:
    """Return an image rotated as a player shows it, because phones store upright recordings sideways."""
    return np.rot90(image, round(frame.rotation / 90))
