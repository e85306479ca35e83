"""Collate encoded samples into a `TokenBatch`, which contains everything that a training step needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import DocumentGroups, TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError

import torch
from torch import Tensor
from transformers import AutoConfig


def read_vision_settings(path: str | Path, processor: Any) -> VisionSettings:
    """Read a checkpoint's vision settings from its config.

    Raises:
        DataError: there is no config of a Qwen vision-language model, or it does not match the processor.
    """
    try:
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"found no config ({error})") from error
    vision: Any = getattr(config, "vision_config", None)
    if not hasattr(vision, "num_position_embeddings"):
        raise DataError(str(path), f"the config is of a {config.model_type!r} model, expected a vision-language model")
    for name, found, expected in (
        ("image_token_id", processor.image_token_id, config.image_token_id),
        ("video_token_id", processor.video_token_id, config.video_token_id),
        ("merge size", processor.image_processor.merge_size, vision.spatial_merge_size),
        ("patch size", processor.image_processor.patch_size, vision.patch_size),
        ("temporal patch size", processor.image_processor.temporal_patch_size, vision.temporal_patch_size),
    ):
        if found != expected:
            raise DataError(str(path), f"the {name} is {found} in the processor, expected {expected} as in config.json")
    return VisionSettings.from_config(config)


def pad_token_id(tokenizer: Any) -> int:
    """Return the id of the tokenizer's padding token, or else of its end-of-sequence token.

    Raises:
        DataError: the tokenizer has neither token.
    """
    for number in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if number is not None:
            return number
    raise DataError(
        type(tokenizer).__name__, "pad_token and eos_token are not set, expected one of them, to pad rows with"
    )


@dataclass(frozen=True)
class Collator:
    """Build a `TokenBatch` of padded or packed rows from encoded samples."""

    vision: VisionSettings
    pad_id: int  # token for padding
    seq_length: int  # length of a row
    multiple: int = 1  # must divide the padded length of each sample in a packed row, see `segment_multiple`
    pixel_dtype: torch.dtype = torch.float32  # dtype of the model
    objective: str = "sft"  # `objective.kind`: other values keep the documents of a sample together in a row
    answer_tokens: tuple[int, int] | None = None  # ids of the tokens "yes" and "no", for "reranker"

    def __post_init__(self) -> None:
        if self.seq_length < 1 or self.multiple < 1 or self.seq_length % self.multiple:
            raise ValueError(
                f"seq_length is {self.seq_length}, expected a multiple of {self.multiple}, to which samples are padded"
            )

    def collate_packed(self, samples: Sequence[EncodedSample]) -> TokenBatch:
        """Return a batch of one row with all samples one after the other; raise ValueError if they do not fit."""
        if self.objective == "sft":
            return self._build_batch(samples, self._packed_layout(samples))
        # A record has at least two documents, except for a reranker. An unreadable record is a single token, which
        # stands for each of them.
        records = [sample.documents if not sample.is_blank else (sample, sample) for sample in samples]
        documents = [document for record in records for document in record]
        batch = self._build_batch(documents, self._packed_layout(documents))
        logps = [sample.reference_logps for sample in samples if sample.reference_logps is not None]
        labels = [bool(sample.is_desirable) for sample in samples]
        groups = DocumentGroups(
            objective=self.objective,
            sizes=tuple(map(len, records)),
            is_desirable=torch.tensor(labels, dtype=torch.float64) if self.objective == "kto" else None,
            reference_logps=torch.tensor(logps, dtype=torch.float64) if logps else None,
            answer_tokens=self.answer_tokens,
        )
        return replace(batch, groups=groups)

    def _packed_layout(self, documents: Sequence[EncodedSample]) -> SequenceLayout:
        lengths = [len(document) for document in documents]
        return SequenceLayout.packed_row(lengths, multiple=self.multiple, total=self.seq_length)

    def collate_padded(self, samples: Sequence[EncodedSample]) -> TokenBatch:
        """Return a batch with one row per sample, padded to `seq_length`; raise ValueError if a sample is too long."""
        layout = SequenceLayout.padded_rows([len(sample) for sample in samples], self.seq_length)
        return self._build_batch(samples, layout)

    def _build_batch(self, samples: Sequence[EncodedSample], layout: SequenceLayout) -> TokenBatch:
        image_grids, pixels = self._concatenate_pixels(samples, "image_grid_thw", "pixel_values")
        video_grids, video_pixels = self._concatenate_pixels(samples, "video_grid_thw", "pixel_values_videos")
        return TokenBatch.build(
            layout.place_tokens([sample.input_ids for sample in samples], self.pad_id),
            layout.place_tokens([sample.labels for sample in samples], self.pad_id),
            layout.place_tokens([sample.loss_mask for sample in samples], 0),
            layout,
            self.vision,
            pixel_values=pixels,
            image_grid_thw=image_grids,
            pixel_values_videos=video_pixels,
            video_grid_thw=video_grids,
            sample_ids=tuple(sample.sample_id for sample in samples),
        )

    def _concatenate_pixels(
        self, samples: Sequence[EncodedSample], grids: str, pixels: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the concatenated grids and pixels of all samples; (None, None) if no sample has any.

        `grids` and `pixels` are the names of these fields of `EncodedSample`, for images or for videos.
        """
        with_grids = [sample for sample in samples if getattr(sample, grids) is not None]
        if not with_grids:
            return None, None
        values = [getattr(sample, pixels) for sample in with_grids]
        lengths = [len(each) for each in values]
        joined = torch.empty(sum(lengths), values[0].shape[1], dtype=self.pixel_dtype)
        for target, each in zip(joined.split(lengths), values, strict=True):
            target.copy_(each)  # cast while copying: the pixels are most of a batch
        return torch.cat([getattr(sample, grids) for sample in with_grids]), joined
