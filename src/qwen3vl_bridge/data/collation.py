"""Collates encoded samples into a `TokenBatch` with everything that a training step needs, so that the device never
waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from qwen3vl_bridge.batch import SequenceLayout, TokenBatch, make_vision_inputs, mrope_positions, vision_slots
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError

import torch
from torch import Tensor
from transformers import AutoConfig


@dataclass(frozen=True)
class VisionSettings:
    """Settings of the model's config for images and videos in a row."""

    image_token_id: int
    video_token_id: int
    spatial_merge_size: int
    num_position_embeddings: int

    @classmethod
    def of_checkpoint(cls, path: str | Path, processor: Any) -> Self:
        """Read them from a checkpoint's config; `DataError` if there is none with vision, or the processor differs."""
        try:
            config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise DataError(str(path), f"found no config ({error})") from error
        vision: Any = getattr(config, "vision_config", None)
        if not hasattr(vision, "num_position_embeddings"):
            raise DataError(str(path), f"found the config of a {config.model_type!r}, expected one of Qwen3-VL")
        for name, found, expected in (
            ("image_token_id", processor.image_token_id, config.image_token_id),
            ("video_token_id", processor.video_token_id, config.video_token_id),
            ("merge size", processor.image_processor.merge_size, vision.spatial_merge_size),
            ("patch size", processor.image_processor.patch_size, vision.patch_size),
            ("temporal patch size", processor.image_processor.temporal_patch_size, vision.temporal_patch_size),
        ):
            if found != expected:
                raise DataError(str(path), f"the processor has the {name} {found}, but the config {expected}")
        return cls(
            config.image_token_id, config.video_token_id, vision.spatial_merge_size, vision.num_position_embeddings
        )


def pad_token_id(tokenizer: Any) -> int:
    """The token for padding: the tokenizer's own, else its end-of-sequence token, else a `DataError`."""
    for number in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if number is not None:
            return number
    raise DataError(type(tokenizer).__name__, "found neither a padding nor an end-of-sequence token to pad rows with")


@dataclass(frozen=True)
class Collator:
    """Lays samples out in rows."""

    vision: VisionSettings
    pad_id: int  # token for padding
    seq_length: int  # of a row
    multiple: int = 1  # of each sample's length in a packed row, as context and sequence parallelism require it
    pixel_dtype: torch.dtype = torch.float32  # the model's own

    def __post_init__(self) -> None:
        if self.seq_length < 1 or self.multiple < 1 or self.seq_length % self.multiple:
            raise ValueError(
                f"a row of {self.seq_length} tokens does not divide into the multiples of {self.multiple} "
                "that its samples are padded to"
            )

    def packed(self, samples: Sequence[EncodedSample]) -> TokenBatch:
        """One row of `seq_length` tokens with consecutive samples; `ValueError` if they are too long."""
        lengths = [len(sample) for sample in samples]
        layout = SequenceLayout.packed_row(lengths, multiple=self.multiple, total=self.seq_length)
        return self._batch(samples, layout)

    def padded(self, samples: Sequence[EncodedSample]) -> TokenBatch:
        """One row of `seq_length` tokens for each sample; `ValueError` if one is too long."""
        return self._batch(samples, SequenceLayout.rows([len(sample) for sample in samples], self.seq_length))

    def _batch(self, samples: Sequence[EncodedSample], layout: SequenceLayout) -> TokenBatch:
        ids = self._laid_out([sample.input_ids for sample in samples], layout, self.pad_id)
        images, pixels = self._pictures(samples, "image_grid_thw", "pixel_values")
        videos, frames = self._pictures(samples, "video_grid_thw", "pixel_values_videos")
        tokens, merge = (self.vision.image_token_id, self.vision.video_token_id), self.vision.spatial_merge_size
        num_image_tokens = int((images.prod(-1) // merge**2).sum()) if images is not None else 0
        position_ids = mrope_positions(
            ids, layout, images, videos, image_token_id=tokens[0], video_token_id=tokens[1], spatial_merge_size=merge
        )
        return TokenBatch(
            input_ids=ids,
            labels=self._laid_out([sample.labels for sample in samples], layout, self.pad_id),
            loss_mask=self._laid_out([sample.loss_mask for sample in samples], layout, 0),
            position_ids=position_ids,
            vision_slot=vision_slots(ids, *tokens, num_image_tokens),
            layout=layout,
            vision=make_vision_inputs(
                pixels,
                images,
                frames,
                videos,
                num_position_embeddings=self.vision.num_position_embeddings,
                spatial_merge_size=merge,
            ),
            sample_ids=tuple(sample.sample_id for sample in samples),
        )

    def _pictures(self, samples: Sequence[EncodedSample], grids: str, pixels: str) -> tuple[Tensor | None, ...]:
        """Grids and pixels of all samples, or None if no sample has any."""
        some = [sample for sample in samples if getattr(sample, grids) is not None]
        if not some:
            return None, None
        parts = [getattr(sample, pixels) for sample in some]
        lengths = [len(part) for part in parts]
        whole = torch.empty(sum(lengths), parts[0].shape[1], dtype=self.pixel_dtype)
        for place, part in zip(whole.split(lengths), parts, strict=True):
            place.copy_(part)  # cast while copying: the pixels are most of a batch
        return torch.cat([getattr(sample, grids) for sample in some]), whole

    @staticmethod
    def _laid_out(parts: Sequence[Tensor], layout: SequenceLayout, padding: int) -> Tensor:
        """[B, S], with the parts at their segments."""
        whole = parts[0].new_full((layout.total,), padding)
        whole[~layout.padding_mask()] = torch.cat(list(parts))
        return whole.view(layout.num_rows, -1)
