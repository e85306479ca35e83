"""What our data sets have in common as Megatron-Bridge configurations: how conversations become rows.

What lives here: these settings, their checks, and what a checkpoint says about reading and laying out. What may not:
where conversations come from (`provider.py`, `data/energon/provider.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Self

from qwen3vl_bridge.batch.token_layout import segment_multiple
from qwen3vl_bridge.data.choices import check_choice
from qwen3vl_bridge.data.processing.collation import Collator, VisionSettings, pad_token_id
from qwen3vl_bridge.data.processing.encoding import Answers, Encoder
from qwen3vl_bridge.data.processing.filtering import OnBad, OnLong, SampleFilter
from qwen3vl_bridge.data.processing.processor import VisionLimits, load_processor
from qwen3vl_bridge.data.processing.thinking import EmptyThinking
from qwen3vl_bridge.data.sources.fingerprints import check_assignment, check_position
from qwen3vl_bridge.models.common.flops import TowerCosts, tower_costs

import torch
from megatron.bridge.data.base import DatasetProvider
from transformers import AutoConfig

SPLITS = ("train", "valid", "test")


@dataclass(kw_only=True)
class ConversationRows(DatasetProvider):
    """How conversations become rows.

    Attributes:
        hf_processor_path: the Hugging Face checkpoint, local or on the hub: its processor, chat template and config.
        seq_length: tokens of a row.
        max_patches: patches of pictures and videos in a row, so that the vision tower has its bound too; None for no
            bound. A picture's tokens are a quarter of its patches.
        pack: several conversations in a row, best-fit, with micro_batch_size 1; otherwise one in each, padded.
        pad_to_multiple_of: each conversation of a packed row is padded to a multiple of this; None for what the run's
            context parallelism needs, see `shared_by`.
        on_long: what to do with a conversation longer than a row: "error"; or "drop" it, or "truncate" it without
            cutting a picture, counted and reported.
        on_bad: what to do with one that cannot be read or encoded: "error", or "drop", counted and reported.
        answers: which of an assistant's answers to train on, "all" or the "last".
        empty_thinking: whether a block of thinking that the chat template writes empty, before an answer without
            reasoning, belongs to the "prompt", or is to "train" on; for templates that read "reasoning_content".
        vision: how much is seen of pictures and videos, where not as the checkpoint says.
        pixel_dtype: what pixels leave as.
        ignored_signal: number of a signal that processes which read ahead leave to the one they read for; a
            `Qwen3VLConfigContainer` sets it from `train.exit_signal_handler_for_dataloader`.
        rows_of_evaluation: so many rows an evaluation reads, the first ones each time, those behind the split's end
            without loss; a `Qwen3VLConfigContainer` sets it from `validation`. None to go on where the last one ended.
    """

    # Settings of Megatron-Bridge that mean nothing here, with the value that says nothing.
    unheard: ClassVar[dict[str, Any]] = {"data_sharding": True, "drop_last": True, "trust_remote_code": None}
    # No settings: a run's checkpoints keep it, and expect it of a run that goes on.
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
            ValueError: a setting with a value it cannot have.
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
        """Refuse settings that are less than they may be; None is no number.

        Args:
            least: by name.

        Raises:
            ValueError: one is less.
        """
        for name, fewest in least.items():
            found = getattr(self, name)
            if found is not None and found < fewest:
                raise ValueError(f"{name} is {found!r}, expected at least {fewest}")

    @property
    def multiple(self) -> int:
        """What each conversation is padded to a multiple of."""
        return self.pad_to_multiple_of or 1

    def shared_by(self, cp_size: int) -> Self:
        """These settings for rows that context-parallel ranks share, as Megatron-Bridge asks for them.

        Args:
            cp_size: how many ranks share a row.

        Raises:
            ValueError: rows, or the conversations in them, that could not be shared out.
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
        """Refuse, when they are built, other rows than those that a run has trained on.

        Args:
            position: of that run.
            row: how many rows it has taken.
        """
        vars(self)["_expected"] = (position, row)

    def note_position(self, data: Mapping[str, Any], assignment: tuple[int, int] = (1, 1)) -> None:
        """Say what the rows are that are built for training.

        Args:
            data: what must be the same for a row's number to mean the same row.
            assignment: how many rows are assigned together, and to how many ranks.

        Raises:
            ValueError: they are others than is expected, or were assigned to another number of ranks and the run
                stands in the middle of such rows.
        """
        vars(self)["position"] = {"data": dict(data), "dealt": list(assignment)}
        if self._expected is None:
            return
        expected, row = self._expected
        vars(self)["_expected"] = None
        check_position(data, expected["data"])
        check_assignment(row, tuple(expected["dealt"]), assignment)

    def checkpoint(self) -> CheckpointSettings:
        """What the checkpoint says.

        Raises:
            DataError: no processor, no config, or some that don't fit.
        """
        return _of_checkpoint(self.hf_processor_path, self.answers, self.empty_thinking, self.vision)

    def sample_filter(self) -> SampleFilter:
        """Which conversations become samples; raises as `checkpoint`."""
        return SampleFilter(
            self.checkpoint().encoder,
            limit=self.seq_length,
            most_patches=self.max_patches,
            on_long=self.on_long,
            on_bad=self.on_bad,
        )

    def collator(self) -> Collator:
        """How they are laid out; raises as `checkpoint`."""
        checkpoint = self.checkpoint()
        return Collator(checkpoint.vision, checkpoint.pad_id, self.seq_length, self.multiple, self.pixel_dtype)


@dataclass(frozen=True)
class CheckpointSettings:
    """What a checkpoint says about encoding, laying out and assigning."""

    encoder: Encoder
    vision: VisionSettings
    pad_id: int
    costs: TowerCosts


@cache
def _of_checkpoint(
    path: str, answers: Answers, empty_thinking: EmptyThinking, limits: VisionLimits
) -> CheckpointSettings:
    """Read once a process."""
    processor: Any = load_processor(path, limits)
    return CheckpointSettings(
        Encoder(processor, answers, empty_thinking),
        VisionSettings.of_checkpoint(path, processor),
        pad_token_id(processor.tokenizer),
        tower_costs(AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()),
    )
