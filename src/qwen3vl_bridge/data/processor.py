"""The checkpoint's own processor: tokenizer, chat template and image processor.

What lives here: loading it, and refusing one that `encode.py` could not work with. What may not: using it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from .errors import DataError


def load_processor(path: str | Path) -> Any:
    """The processor of a checkpoint, a local folder or a hub name.

    Raises:
        DataError: there is none, or it is none of Qwen3-VL's kind.
    """
    try:
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"found no processor ({error})") from error
    check_processor(processor, str(path))
    return processor


def check_processor(processor: Any, place: str) -> None:
    """Refuses a processor that lacks what an `Encoder` asks of it."""
    tokenizer: Any = getattr(processor, "tokenizer", None)
    images = getattr(processor, "image_processor", None)
    if not getattr(tokenizer, "is_fast", False) or not hasattr(images, "get_number_of_image_patches"):
        found = type(processor).__name__
        raise DataError(place, f"found {found}, expected a Qwen3VLProcessor with a fast tokenizer")
    for name in ("image_token", "video_token"):
        token, number = getattr(processor, name), getattr(processor, f"{name}_id")
        if number is None or number == tokenizer.unk_token_id or tokenizer.encode(token) != [number]:
            raise DataError(place, f"{name} {token!r} has the id {number}, expected one that the tokenizer gives it")
    if not getattr(processor, "chat_template", None):
        raise DataError(place, "found no chat template, expected the one that the model was trained with")
