"""The checkpoint's own processor: tokenizer, chat template and image processor."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.huggingface import contents_of
from qwen3vl_bridge.data.errors import DataError

from transformers import AutoProcessor


@dataclass(unsafe_hash=True)  # not frozen, because Megatron-Bridge's launcher sets overridden fields
class VisionLimits:
    """Resolution and frame limits. None keeps the value of the checkpoint's processor.

    Attributes:
        image_min_pixels: smaller images are enlarged to this number of pixels.
        image_max_pixels: larger images are reduced to this number of pixels.
        video_min_pixels: the same for a video, summed over its frames.
        video_max_pixels: the same.
        video_fps: sampled frames per second.
        video_min_frames: minimum number of sampled frames (fewer if the video has fewer).
        video_max_frames: maximum number of sampled frames.
    """

    image_min_pixels: int | None = None
    image_max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    video_fps: float | None = None
    video_min_frames: int | None = None
    video_max_frames: int | None = None

    def put_on(self, processor: Any) -> None:
        """Apply these limits to a processor.

        Raises:
            ValueError: an invalid limit, or a minimum above its maximum.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value!r}, expected a positive number")
        for kind in ("image", "video"):
            reader = getattr(processor, f"{kind}_processor")
            edges = {"shortest_edge": reader.size["shortest_edge"], "longest_edge": reader.size["longest_edge"]}
            wanted = {"shortest_edge": f"{kind}_min_pixels", "longest_edge": f"{kind}_max_pixels"}
            edges |= {edge: value for edge, name in wanted.items() if (value := getattr(self, name)) is not None}
            if edges["shortest_edge"] > edges["longest_edge"]:
                raise ValueError(
                    f"{kind}s of {edges['shortest_edge']} pixels at least and {edges['longest_edge']} at most, "
                    f"expected {kind}_min_pixels up to {kind}_max_pixels"
                )
            reader.size = type(reader.size)(**edges)
        reader = processor.video_processor
        for name in ("fps", "min_frames", "max_frames"):
            if (value := getattr(self, f"video_{name}")) is not None:
                setattr(reader, name, value)
        if reader.min_frames > reader.max_frames:
            raise ValueError(f"video_min_frames is {reader.min_frames}, expected at most {reader.max_frames}")


def load_processor(path: str | Path, limits: VisionLimits | None = None) -> Any:
    """The processor of a checkpoint, a local folder or a hub name.

    Args:
        path: the checkpoint.
        limits: resolution and frame limits, where they differ from the checkpoint's.

    Raises:
        DataError: there is no processor, or it is not one of the supported families.
        ValueError: limits that contradict each other.
    """
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        what = f"; {contents_of(Path(path))}" if Path(path).exists() else ""
        raise DataError(str(path), f"found no processor{what} ({error})") from error
    check_processor(processor, str(path))
    if limits is not None:
        limits.put_on(processor)
    return processor


def check_processor(processor: Any, place: str) -> None:
    """Refuse a processor that lacks something that `Encoder` needs."""
    tokenizer: Any = getattr(processor, "tokenizer", None)
    images = getattr(processor, "image_processor", None)
    if not getattr(tokenizer, "is_fast", False) or not hasattr(images, "get_number_of_image_patches"):
        found = type(processor).__name__
        raise DataError(place, f"found {found}, expected a Qwen3VLProcessor with a fast tokenizer")
    if not hasattr(getattr(processor, "video_processor", None), "sample_frames"):
        raise DataError(place, "found no video processor, expected a Qwen3VLVideoProcessor")
    for name in ("image_token", "video_token"):
        token, number = getattr(processor, name), getattr(processor, f"{name}_id")
        if number is None or number == tokenizer.unk_token_id or tokenizer.encode(token) != [number]:
            raise DataError(place, f"{name} {token!r} has the id {number}, expected one that the tokenizer gives it")
    if not getattr(processor, "chat_template", None):
        raise DataError(place, "found no chat template, expected the one that the model was trained with")
