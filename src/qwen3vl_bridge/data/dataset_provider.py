"""Conversations as a Megatron-Bridge dataset: one configuration for Megatron-Bridge's loop and for loops of ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.batch.token_layout import segment_multiple
from qwen3vl_bridge.data.chat_template import EmptyThinking
from qwen3vl_bridge.data.collation import Collator, VisionSettings, pad_token_id
from qwen3vl_bridge.data.encoding import Answers, Encoder, VisionLimits, load_processor
from qwen3vl_bridge.data.errors import Changed, DataError, Unreachable, check_choice
from qwen3vl_bridge.data.media.media_access import MediaAccess, UrlCache
from qwen3vl_bridge.data.packing.row_plan import PackedRows
from qwen3vl_bridge.data.packing.sample_sizes import Sizes, notes_of_job, sizes_of_job
from qwen3vl_bridge.data.row_loading import (
    Balance,
    BatchStream,
    Epoch,
    RowDataset,
    RowSettings,
    StreamedRows,
    check_assignment,
    check_position,
    one_pass,
)
from qwen3vl_bridge.data.samples import OnBad, OnLong, SampleFilter, Samples
from qwen3vl_bridge.data.schemas.record_schemas import Columns, schema_of
from qwen3vl_bridge.data.sources import HUB, expect_data
from qwen3vl_bridge.data.sources.hub import HubName, StreamedDataset
from qwen3vl_bridge.data.sources.mixture import MixedSet, Mixture, mixed_sets, open_mixture
from qwen3vl_bridge.data.sources.opening import ConversationSource, open_source, splits_in
from qwen3vl_bridge.models.flops import TowerCosts, tower_costs
from qwen3vl_bridge.parallel.collectives import gather_objects

import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
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
        on_long: a conversation longer than a row is an "error", or "drop" or "truncate" it (never within an image),
            counted and logged.
        on_bad: a conversation that cannot be read or encoded is an "error", or "drop" it, counted and logged.
        answers: train on "all" of an assistant's answers or the "last".
        empty_thinking: for chat templates that render "reasoning_content": whether the empty thinking block before an
            answer without reasoning is part of the "prompt" or is trained on ("train").
        reasoning_effort: for chat templates that read it, as Qwen3.8's: what the prompt asks for where it asks for
            thinking; None for the template's default.
        preserve_thinking: for chat templates that read it, as those of Qwen3.6 and 3.8: whether reasoning of answers
            before the last question is written, and trained on with them; None for the template's default.
        vision: limits for images and videos, where they differ from the checkpoint's processor.
        pixel_dtype: dtype of the pixel values in a batch.
        ignored_signal: number of a signal that data-loading processes ignore; set by `Qwen3VLConfigContainer`.
        rows_of_evaluation: number of rows per evaluation, always the first ones of the split; rows beyond its end have
            no loss. None: each evaluation continues after the previous one. Set by `Qwen3VLConfigContainer`.
    """

    # Settings of Megatron-Bridge that have no effect here, with the value that means "not set".
    unheard: ClassVar[dict[str, Any]] = {"data_sharding": True, "drop_last": True, "trust_remote_code": None}
    # Not settings: a run's checkpoints store it, and a resumed run is checked against it.
    position: ClassVar[Mapping[str, Any] | None] = None
    _expected: ClassVar[tuple[Mapping[str, Any], int] | None] = None
    # Nor this: the first epoch of training, when its rows have been built; None if it is not known.
    epoch: ClassVar[Epoch | None] = None

    hf_processor_path: str
    seq_length: int
    max_patches: int | None = None
    pack: bool = True
    pad_to_multiple_of: int | None = None
    on_long: OnLong = "error"
    on_bad: OnBad = "error"
    answers: Answers = "all"
    empty_thinking: EmptyThinking = "prompt"
    reasoning_effort: str | None = None
    preserve_thinking: bool | None = None
    vision: VisionLimits = field(default_factory=VisionLimits)
    pixel_dtype: torch.dtype = torch.float32
    ignored_signal: int | None = None
    rows_of_evaluation: int | None = None

    def finalize(self) -> None:
        """Check what can be checked without reading data; a ValueError for an invalid value."""
        super().finalize()
        choices = {"on_long": OnLong, "on_bad": OnBad, "answers": Answers, "empty_thinking": EmptyThinking}
        for name, kind in choices.items():
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
        """Refuse values of settings below their minimum; None is skipped."""
        for name, fewest in least.items():
            found = getattr(self, name)
            if found is not None and found < fewest:
                raise ValueError(f"{name} is {found!r}, expected at least {fewest}")

    @property
    def multiple(self) -> int:
        """The multiple to which each conversation is padded."""
        return self.pad_to_multiple_of or 1

    def shared_by(self, cp_size: int) -> Self:
        """These settings for rows that context-parallel ranks share (ValueError if they cannot)."""
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
        """When training rows are built, refuse others than those of the run that stored this position, at a row."""
        vars(self)["_expected"] = (position, row)

    def note_position(self, data: Mapping[str, Any], assignment: tuple[int, int] = (1, 1)) -> None:
        """Record the fingerprint of the rows that are built for training, and how they are assigned to ranks; a
        `ValueError` if they differ from the expected rows.
        """
        vars(self)["position"] = {"data": dict(data), "dealt": list(assignment)}
        if self._expected is None:
            return
        expected, row = self._expected
        vars(self)["_expected"] = None
        check_position(data, expected["data"])
        check_assignment(row, tuple(expected["dealt"]), assignment)

    def checkpoint(self) -> CheckpointSettings:
        """Processor and settings read from the checkpoint; a `DataError` if they are missing or unsuitable."""
        template = (self.empty_thinking, self.reasoning_effort, self.preserve_thinking)
        return _of_checkpoint(self.hf_processor_path, self.vision, self.answers, *template)

    def sample_filter(self) -> SampleFilter:
        """Decides which conversations become samples; raises like `checkpoint`."""
        encoder = self.checkpoint().encoder
        return SampleFilter(
            encoder, limit=self.seq_length, most_patches=self.max_patches, on_long=self.on_long, on_bad=self.on_bad
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
def _of_checkpoint(path: str, limits: VisionLimits, *encoding: Any) -> CheckpointSettings:
    """Cached: read once per process. `encoding`: what an `Encoder` is given beside the processor."""
    processor: Any = load_processor(path, limits)
    return CheckpointSettings(
        Encoder(processor, *encoding),
        VisionSettings.of_checkpoint(path, processor),
        pad_token_id(processor.tokenizer),
        tower_costs(AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()),
    )


@dataclass(kw_only=True)
class Qwen3VLConversationProvider(ConversationRows):
    """Dataset of packed or padded conversations with images and videos. `ConversationRows` has the other settings.

    Only the training split is shuffled. A "sample" of Megatron-Bridge's counters is a row.

    Attributes:
        path: a folder with `train.jsonl` and optionally `valid.jsonl` or `test.jsonl`, or with splits in other formats
            (see `splits_in`), or with training data only. Replaces the three paths below.
        train_path: training conversations, as for `open_source`.
        mixture: several data sets in one run, instead of `path` and `train_path`: a list of mappings with the fields of
            `MixedSet`, or a YAML file with one. Their validation and test splits are read one after the other.
        valid_path: the same for validation.
        test_path: the same for testing.
        media_root: folder of images and videos, or a list of folders that are searched in order; symbolic links may
            point from one into another. Default: the folder of each data file.
        url_cache: folder with downloaded files; None for the user's cache folder.
        schema_adapter: format of the records, by Megatron-Bridge's name for it, such as "cord_v2".
        columns: column names of the data set, where they differ from ours.
        streaming: read data sets of the hub while they are downloaded. Each data-loading process of each data-parallel
            rank reads its own part (some of the files) and packs its own rows; a resumed run rereads the current epoch
            of its parts from the start.
        stream_parts: number of parts of a stream, a multiple of data-parallel ranks x data-loading processes (at least
            1) x rows per microbatch; None for that product. Rows are the same for all whose product divides it.
        train_packing: folder with training rows packed by `qwen3vl data pack` with the same settings. None: every
            machine measures every conversation during training, which is too slow for millions of them.
        balance_over: the global batch size, to assign its rows to data-parallel ranks by their cost in both towers;
            None to assign them in order. A multiple of the number of data-parallel ranks.
        seed: seed of the order of training samples.
        window_size: number of conversations packed together when packing during training.
        dataloader_type: "single"; rows are numbered consecutively without end, so a run resumes exactly.
        rows_of_microbatch: set by `Qwen3VLConfigContainer` from `train`.
    """

    path: str | None = None
    train_path: str | None = None
    mixture: list[dict[str, Any]] | str | None = None
    valid_path: str | None = None
    test_path: str | None = None
    media_root: str | list[str] | None = None
    url_cache: str | None = None
    schema_adapter: str | None = None
    columns: Columns = field(default_factory=Columns)
    streaming: bool = False
    stream_parts: int | None = None
    train_packing: str | None = None
    balance_over: int | None = None
    seed: int = 1234
    window_size: int = 512
    dataloader_type: Any = "single"
    rows_of_microbatch: int | None = None

    def finalize(self) -> None:
        """Check what can be checked without reading data; a ValueError for an invalid value."""
        super().finalize()
        if self.dataloader_type != "single":
            raise ValueError(
                f"dataloader_type is {self.dataloader_type!r}, expected 'single': rows are in order already"
            )
        self.check_least(balance_over=1, window_size=1, stream_parts=1, **({"seed": 0} if self.streaming else {}))
        self._expect_paths()
        for split in SPLITS:
            given = {
                "dataset.path": None if self.path is None else splits_in(self.path).get(split),
                f"dataset.{split}_path": getattr(self, f"{split}_path"),
                "dataset.mixture": tuple(one.path for one in self.mixed(split)),
            }
            given = {name: found for name, found in given.items() if found}
            if len(set(given.values())) > 1:
                found = " and ".join(f"{found!r} by {name}" for name, found in given.items())
                raise ValueError(f"found data for {split} in {found}, expected one of these settings")
        wrong = {}
        if not self.pack:
            wrong |= dict.fromkeys(("train_packing", "balance_over"), "pack is off")
        if self.streaming:
            needed = "streaming is on; it needs samples by number"
            wrong |= dict.fromkeys(("train_packing", "balance_over", "mixture"), needed)
        else:
            wrong["stream_parts"] = "streaming is off"
        if self.train_packing is not None and self.window_size != type(self).window_size:
            wrong["window_size"] = "train_packing has its rows already"
        for name, problem in wrong.items():
            if (found := getattr(self, name)) is not None:
                raise ValueError(f"{name} is {found!r}, but {problem}")
        for path in (path for split in SPLITS for path in self._paths(split)):
            if path.startswith(HUB):
                HubName.of(path)
            elif self.streaming:
                raise ValueError(f"streaming is on, but {path} is not on the hub, expected {HUB}owner/name#split")
        MediaAccess.of(self.media_root)
        schema_of(self.schema_adapter, self.columns)

    def _expect_paths(self) -> None:
        if self.path is None and self.train_path is None and self.mixture is None:
            raise ValueError(
                "dataset.path is None, expected a folder with train.jsonl, or dataset.train_path with a file of "
                "conversations, or dataset.mixture with several data sets; set_paths of qwen3vl_recipes.paths sets all "
                "of a run's paths"
            )

    def check_paths(self) -> None:
        """Refuse data that are not there (ValueError), before anything is built, which takes a while."""
        self._expect_paths()
        names = (
            {"dataset.path (--data-path)": self.path}
            if self.path
            else {f"dataset.{split}_path": self.path_of(split) for split in SPLITS}
        )
        names |= {f"the path of {one.name} in dataset.mixture": one.path for one in self.mixed("train")}
        for name, path in names.items():
            if path:
                expect_data(name, path)

    def downloaded(self) -> UrlCache:
        """Access to the files that were downloaded before training."""
        return UrlCache(None if self.url_cache is None else Path(self.url_cache))

    def path_of(self, split: str) -> str | None:
        """Path of a split's conversations, or None if it has none."""
        own = getattr(self, f"{split}_path", None)
        return own if self.path is None else splits_in(self.path).get(split, own)

    def mixed(self, split: str) -> tuple[MixedSet, ...]:
        """The data sets of the mixture that have the given split; a ValueError for an invalid mixture."""
        if self.mixture is None:
            return ()
        sets = mixed_sets(self.mixture, self.media_root, self.schema_adapter, self.columns)
        return tuple(one for one in sets if one.path_of(split) is not None)

    def _paths(self, split: str) -> list[str]:
        """Paths of a split's data sets; of several in a mixture."""
        path = self.path_of(split)
        return [path] if path is not None else [str(one.path_of(split)) for one in self.mixed(split)]

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[RowDataset | None, RowDataset | None, RowDataset | None]:
        """Rows of each split for Megatron-Bridge's loop, of the requested lengths.

        Raises:
            DataError: files are missing or unreadable, or a stream has fewer files than parts.
            ValueError: rows or stream parts that cannot be divided over the ranks, or rows that differ from those that
                the run has trained on, that were packed, or that other processes have.
        """
        groups = context.pg_collection
        rows, ranks = (self, 1) if groups is None else (self.shared_by(groups.cp.size()), groups.dp.size())
        wanted = (context.train_samples, context.valid_samples, context.test_samples)
        train, valid, test = (
            rows._in_parts(rows.rows(split, length=length, ranks=ranks), ranks, groups=groups)
            if length and self._paths(split)
            else None
            for split, length in zip(SPLITS, wanted, strict=True)
        )
        for split, one in zip(SPLITS, (train, valid, test), strict=True):
            if groups is not None and one is not None and not self.streaming and torch.distributed.is_initialized():
                found = gather_objects(one.samples.file.fingerprint())
                other = next((rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]), None)
                if other is not None:
                    raise ValueError(
                        f"the data of the split {split!r} differ among the processes: found {found[other]} on rank "
                        f"{other}, expected {found[0]} as on rank 0. Every machine needs the same files, and the same "
                        "downloads: copy the folder url_cache, records and all"
                    )
        if train is not None:
            self.note_position(train.fingerprint(), train.assignment())
            vars(self)["epoch"] = self.epoch or train.epoch()
        return train, valid, test

    def stream(self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1) -> BatchStream:
        """Endless microbatches of a split, for a custom training loop. Its `state_dict` belongs in the checkpoint."""
        return BatchStream(
            self._in_parts(self.rows(split, ranks=dp_size), dp_size, micro_batch_size),
            dp_rank=dp_rank,
            dp_size=dp_size,
            micro_batch_size=micro_batch_size,
            num_workers=self.num_workers,
            ignored_signal=self.ignored_signal,
        )

    def evaluation(
        self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1
    ) -> Iterator[TokenBatch]:
        """Every row of a split once, in the file's order; arguments as for `stream`.

        Every rank reads all parts of a stream: ranks need equally many microbatches, a number known only at the end.
        """
        rows = self.rows(split, shuffle=False)
        return one_pass(rows, dp_rank=dp_rank, dp_size=dp_size, micro_batch_size=micro_batch_size)

    def count_epoch(self, cp_size: int = 1) -> Epoch:
        """Count the rows of the first epoch, for which this process measures every sample that is not packed.

        Raises:
            ValueError: a stream.
            DataError: files are missing, or samples are bad or too long and may not be dropped.
        """
        if self.streaming:
            raise ValueError("streaming is on: the rows of an epoch are not known before they are read")
        rows = self.shared_by(cp_size).rows("train", alone=True)
        epoch = rows.epoch(counted=True)
        assert epoch is not None  # it is no stream
        vars(self)["epoch"] = epoch
        return epoch

    def rows(
        self, split: str, *, length: int = 0, shuffle: bool | None = None, ranks: int = 1, alone: bool = False
    ) -> RowDataset:
        """Rows of a split ("train", "valid" or "test"), for data-parallel ranks; a ValueError if it has no path.

        Their `len` is `length`. By default only the training split is shuffled; others are not assigned by cost. If
        `alone`, sizes of samples are not shared with other processes, nor is what is dropped logged.
        """
        if not (paths := self._paths(split)):
            raise ValueError(f"the split {split!r} has no {split}_path; splits are {', '.join(SPLITS)}")
        shuffled = split == "train" if shuffle is None else shuffle
        seed = self.seed if shuffled else None
        packed = PackedRows(self.train_packing) if split == "train" and self.train_packing else None
        over = shuffled and self.balance_over
        balance = Balance(over, self.checkpoint().costs) if over else None
        settings = RowSettings(self.collator(), self.pack, seed, self.window_size, packed, balance)
        source = self._source(split, seed)
        sample_filter, sizes = self.sample_filter(), packed
        if sizes is None and not isinstance(source, StreamedDataset):
            roots = [one.media_root for one in self.mixed(split)] or [self.media_root]
            place = {"path": list(map(os.path.abspath, paths)), "media_root": roots}
            rules = {**place, "data": source.fingerprint(), **sample_filter.fingerprint()}
            sizes = Sizes(len(source)) if alone else sizes_of_job(len(source), rules)
        repeat = None if split == "train" else self.rows_of_evaluation
        samples = Samples(source, sample_filter, sizes, (lambda kind: 0) if alone else None)
        return RowDataset(samples, settings, length=length, ranks=ranks, repeat=repeat)

    def check_samples(self, cp_size: int = 1) -> None:
        """Refuse training data that cannot be trained on, before a model is built for them.

        They must exist, and fit rows that were packed before training. Otherwise, where samples may be dropped, those
        of the first window are measured until one is valid, usually the first. Data of the hub are not checked.
        """
        if any(path.startswith(HUB) for path in self._paths("train")):
            return
        if self.train_packing is not None:
            self.shared_by(cp_size).rows("train")
            return
        source = self._source("train", self.seed)
        if "drop" not in (self.on_bad, self.on_long):
            return
        strict = replace(self, on_bad="error", on_long="truncate" if self.on_long == "truncate" else "error")
        samples = Samples(source, strict.sample_filter())
        numbers = RowDataset(samples, RowSettings(self.collator())).order(self.seed).numbers(0, 0, self.window_size)
        problems = list[str]()
        for number in numbers:
            try:
                samples.size(number)
                return
            except (Changed, Unreachable):
                raise
            except DataError as error:
                problems.append(str(error))
        raise DataError(
            "the training data",
            f"found {len(numbers)} samples, all of which would be dropped as bad or too long, expected at least one "
            f"that can be trained on. The first: {'; '.join(problems[:3])}. `qwen3vl data inspect` shows the others",
        )

    def _in_parts(self, rows: RowDataset, ranks: int, micro_batch_size: int = 1, groups: Any = None) -> RowDataset:
        """The source divided into stream parts, if it is a stream."""
        if not self.streaming:
            return rows
        workers, micro = max(1, self.num_workers), self.rows_of_microbatch or micro_batch_size
        readers = ranks * workers * micro
        parts = self.stream_parts or readers
        if parts % readers:
            raise ValueError(
                f"dataset.stream_parts is {parts}, expected a multiple of {readers}: {ranks} data-parallel ranks x "
                f"{workers} data-loading processes x {micro} rows of a microbatch"
            )
        return StreamedRows(rows, parts, notes_of_job({"stream": rows.samples.file.fingerprint()}, groups))

    def _source(self, split: str, seed: int | None) -> ConversationSource | Mixture | StreamedDataset:
        path, addresses, schema_adapter = self.path_of(split), self.downloaded(), self.schema_adapter
        if path is None:
            return open_mixture(self.mixed(split), split, addresses)
        if not self.streaming:
            return open_source(
                path, self.media_root, addresses=addresses, schema_adapter=schema_adapter, columns=self.columns
            )
        return StreamedDataset.named(
            path,
            media_root=MediaAccess.of(self.media_root, addresses),
            seed=seed,
            # A row's samples are nearly always in its window or the previous one, and the plan is one window ahead.
            keep=4 * self.window_size,
            schema=schema_of(schema_adapter, self.columns),
        )
