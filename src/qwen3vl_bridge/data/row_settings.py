"""Settings shared by our data set configurations: encoding of conversations and layout of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Self

from qwen3vl_bridge.batch.token_layout import segment_multiple
from qwen3vl_bridge.data.chat_template import EmptyThinking
from qwen3vl_bridge.data.collation import Collator, VisionSettings, pad_token_id
from qwen3vl_bridge.data.encoding import Answers, Encoder, VisionLimits, load_processor
from qwen3vl_bridge.data.errors import check_choice
from qwen3vl_bridge.data.samples import OnBad, OnLong, SampleFilter
from qwen3vl_bridge.data.sources.fingerprints import check_assignment, check_position
from qwen3vl_bridge.models.flops import TowerCosts, tower_costs

import torch
from megatron.bridge.data.base import DatasetProvider
from transformers import AutoConfig

SPLITS = ("train", "valid", "test")


@dataclass(kw_only=True)
class ConversationRows(DatasetProvider):
    """Settings for encoding conversations and laying them out in rows.

    Attributes:
        hf_processor_path: the Hugging Face checkpoint, local or on the hub: its processor, chat template and config.
        seq_length: tokens of a row.
        max_patches: maximum number of patches in a row, which bounds the vision tower's memory; None for no limit. An
            image has a quarter as many tokens as patches.
        pack: pack several conversations per row by best fit (requires micro_batch_size 1); False: one conversation per
            row, padded.
        pad_to_multiple_of: each conversation of a packed row is padded to a multiple of this; None for the multiple
            that the run's context parallelism requires (see `shared_by`).
        on_long: what to do with a conversation longer than a row: "error", "drop" or "truncate" (never within an
            image). Dropped and truncated conversations are counted and logged.
        on_bad: what to do with a conversation that cannot be read or encoded: "error", or "drop", counted and logged.
        answers: which of an assistant's answers to train on, "all" or the "last".
        empty_thinking: for chat templates that render "reasoning_content": whether the empty thinking block before an
            answer without reasoning is part of the "prompt" or is trained on ("train").
        vision: resolution and frame limits for images and videos, where they differ from the checkpoint's processor.
        pixel_dtype: dtype of the pixel values in a batch.
        ignored_signal: number of a signal that data-loading processes ignore; set by `Qwen3VLConfigContainer` from
            `train.exit_signal_handler_for_dataloader`.
        rows_of_evaluation: number of rows per evaluation, always the first ones of the split; rows beyond its end have
            no loss. Set by `Qwen3VLConfigContainer` from `validation`. None: each evaluation continues after the
            previous one.
    """

    # Settings of Megatron-Bridge that have no effect here, with the value that means "not set".
    unheard: ClassVar[dict[str, Any]] = {"data_sharding": True, "drop_last": True, "trust_remote_code": None}
    # Not settings: a run's checkpoints store it, and a resumed run is checked against it.
    position: ClassVar[Mapping[str, Any] | None] = None
    _expected: ClassVar[tuple[Mapping[str, Any], int] | None] = None

    hf_processor_path: str
    seq_length: int
    max_patches: int | None = None
    pack: bool = True
    pad_to_multiple_of: int | None = None
    on_long: OnLong = "error"
    on_bad: OnBad = "error"
    answers: Answers = "all"
    empty_thinking: EmptyThinking = "prompt"
    vision: VisionLimits = field(default_factory=VisionLimits)
    pixel_dtype: torch.dtype = torch.float32
    ignored_signal: int | None = None
    rows_of_evaluation: int | None = None

    def finalize(self) -> None:
        """Check what can be checked without reading data.

        Raises:
            ValueError: a setting has an invalid value.
        """
        super().finalize()
        for name, kind in (
            *(("on_long", OnLong), ("on_bad", OnBad)),
            *(("answers", Answers), ("empty_thinking", EmptyThinking)),
        ):
            check_choice(name, getattr(self, name), kind)
        self.check_least(seq_length=1, pad_to_multiple_of=1, max_patches=1, num_workers=0)
        for name, silent in self.unheard.items():
            if (found := getattr(self, name)) != silent:
                raise ValueError(f"{name} is {found!r}, expected {silent!r}: this data set has no such setting")
        if not self.pack and self.multiple != 1:
            raise ValueError(f"pad_to_multiple_of is {self.pad_to_multiple_of}, but pack is off; it is for packed rows")
        if self.seq_length % self.multiple:
            raise ValueError(
                f"seq_length is {self.seq_length}, expected a multiple of pad_to_multiple_of, {self.pad_to_multiple_of}"
            )

    def check_least(self, **least: int) -> None:
        """Refuse values below their minimum; None is skipped.

        Args:
            least: minimum by name of the setting.

        Raises:
            ValueError: a value is below its minimum.
        """
        for name, fewest in least.items():
            found = getattr(self, name)
            if found is not None and found < fewest:
                raise ValueError(f"{name} is {found!r}, expected at least {fewest}")

    @property
    def multiple(self) -> int:
        """The multiple to which each conversation is padded."""
        return self.pad_to_multiple_of or 1

    def shared_by(self, cp_size: int) -> Self:
        """These settings for rows that are divided over context-parallel ranks; called by Megatron-Bridge.

        Args:
            cp_size: number of ranks that share a row.

        Raises:
            ValueError: rows or conversations that cannot be divided over the ranks.
        """
        need = segment_multiple(cp_size)
        if self.seq_length % need:
            raise ValueError(
                f"dataset.seq_length is {self.seq_length}, expected a multiple of {need} under "
                f"context_parallel_size {cp_size}"
            )
        if not self.pack:
            return self
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of % need:
            raise ValueError(
                f"dataset.pad_to_multiple_of is {self.pad_to_multiple_of}, expected a multiple of {need} under "
                f"context_parallel_size {cp_size}, or None to have that"
            )
        return replace(self, pad_to_multiple_of=self.pad_to_multiple_of or need)

    def expect_position(self, position: Mapping[str, Any], row: int) -> None:
        """When training rows are built, refuse rows other than those that a run has trained on.

        Args:
            position: the position stored by that run.
            row: number of rows that it has consumed.
        """
        vars(self)["_expected"] = (position, row)

    def note_position(self, data: Mapping[str, Any], assignment: tuple[int, int] = (1, 1)) -> None:
        """Record which rows are built for training.

        Args:
            data: what must be equal for a row's number to mean the same row.
            assignment: how many rows are assigned together, and to how many ranks.

        Raises:
            ValueError: they differ from the expected rows, or were assigned to another number of ranks while the run's
                position is within such rows.
        """
        vars(self)["position"] = {"data": dict(data), "dealt": list(assignment)}
        if self._expected is None:
            return
        expected, row = self._expected
        vars(self)["_expected"] = None
        check_position(data, expected["data"])
        check_assignment(row, tuple(expected["dealt"]), assignment)

    def checkpoint(self) -> CheckpointSettings:
        """Processor and settings read from the checkpoint.

        Raises:
            DataError: processor or config are missing or unsuitable.
        """
        return _of_checkpoint(self.hf_processor_path, self.answers, self.empty_thinking, self.vision)

    def sample_filter(self) -> SampleFilter:
        """Decides which conversations become samples; raises like `checkpoint`."""
        return SampleFilter(
            self.checkpoint().encoder,
            limit=self.seq_length,
            most_patches=self.max_patches,
            on_long=self.on_long,
            on_bad=self.on_bad,
        )

    def collator(self) -> Collator:
        """Lays out samples in rows; raises like `checkpoint`."""
        checkpoint = self.checkpoint()
        return Collator(checkpoint.vision, checkpoint.pad_id, self.seq_length, self.multiple, self.pixel_dtype)


@dataclass(frozen=True)
class CheckpointSettings:
    """What a checkpoint determines about encoding, layout and assignment to ranks."""

    encoder: Encoder
    vision: VisionSettings
    pad_id: int
    costs: TowerCosts


@cache
def _of_checkpoint(
    path: str, answers: Answers, empty_thinking: EmptyThinking, limits: VisionLimits
) -> CheckpointSettings:
    """Cached: read once per process."""
    processor: Any = load_processor(path, limits)
    return CheckpointSettings(
        Encoder(processor, answers, empty_thinking),
        VisionSettings.of_checkpoint(path, processor),
        pad_token_id(processor.tokenizer),
        tower_costs(AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()),
    )
