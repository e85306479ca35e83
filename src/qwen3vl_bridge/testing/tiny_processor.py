"""A tiny Qwen3-VL processor: a tokenizer trained on the spot, a chat template, image and video processors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# In the released order. Their ids follow the byte-pair vocabulary. Decoding skips only the first group.
CONTROL_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
        *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
    )
)
MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
PATCH, TEMPORAL_PATCH, MERGE = 16, 2, 2
CELL = (PATCH * MERGE) ** 2  # pixels behind one vision token
_MEAN_STD = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def _corpus() -> Iterator[str]:
    """Yield the text from which the tokenizer learns its merges."""
    sentences = (
        "You are a helpful assistant that reads handwritten digits.",
        "Which digit is this?",
        "What number do you see in the picture?",
        "Describe the image. Describe the video.",
        "Is the first picture the same as the second one?",
        "The quick brown fox jumps over the lazy dog.",
        "I cannot tell; the writing is too faint.",
    )
    for sentence in sentences:
        yield f"system\n{sentence}\n"
        yield f"user\n{sentence}\n"
    for number, name in enumerate(DIGIT_NAMES):
        yield f"assistant\n{number}\n"
        yield f"assistant\nThis is the digit {number}, {name}.\n"
        yield f"<{number}.5 seconds>"


def make_tokenizer(vocab_size: int) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer with the Qwen special tokens.

    Args:
        vocab_size: Largest number of tokens, special tokens included.

    Returns:
        The tokenizer. Every call with the same size returns an equal one.
    """
    specials = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    specials += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    specials += [AddedToken("yes", special=False, normalized=False, single_word=True)]  # a reranker's answer
    trained = Qwen2Tokenizer().backend_tokenizer
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(specials), initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(_corpus(), trainer)
    model = json.loads(trained.to_str())["model"]
    model["vocab"].pop("<|endoftext|>", None)
    first = len(model["vocab"])
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        added_tokens_decoder={first + offset: token for offset, token in enumerate(specials)},
        model_max_length=4096,
    )


def make_processor(vocab_size: int) -> Qwen3VLProcessor:
    """Build tokenizer, chat template, image and video processor as one `Qwen3VLProcessor`.

    Args:
        vocab_size: Largest number of tokens of the tokenizer.

    Returns:
        A processor that can be saved with `save_pretrained` and loaded with `AutoProcessor`.
    """
    patches = {"patch_size": PATCH, "temporal_patch_size": TEMPORAL_PATCH, "merge_size": MERGE}
    images = Qwen2VLImageProcessor(size={"shortest_edge": CELL, "longest_edge": 64 * CELL}, **patches, **_MEAN_STD)
    videos = Qwen3VLVideoProcessor(
        size={"shortest_edge": 4 * CELL, "longest_edge": 256 * CELL}, max_frames=32, **patches, **_MEAN_STD
    )
    template = _TEMPLATE.read_text(encoding="utf-8").strip()
    return Qwen3VLProcessor(images, make_tokenizer(vocab_size), videos, chat_template=template)
