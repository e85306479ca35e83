"""Dataset providers for conversations. One configuration serves Megatron-Bridge's training loop and custom loops."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

from qwen3vl_bridge.config.flops import TowerCosts, tower_costs
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import gather_objects
from qwen3vl_bridge.core.layout import segment_multiple
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.data.chat_template import EmptyThinking
from qwen3vl_bridge.data.collation import Collator, pad_token_id, read_vision_settings
from qwen3vl_bridge.data.conversations import Columns, find_schema
from qwen3vl_bridge.data.data_paths import HUB, check_data_paths, splits_in
from qwen3vl_bridge.data.encoding import Answers, Encoder, VisionLimits, check_choice, load_processor
from qwen3vl_bridge.data.errors import DataError, DataUnavailable, SampleSizeChanged, group_errors
from qwen3vl_bridge.data.hub import HubName, StreamedDataset
from qwen3vl_bridge.data.loading import (
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
from qwen3vl_bridge.data.media import MediaAccess, UrlCache, image_size
from qwen3vl_bridge.data.mixture import MixedSet, Mixture, open_mixture, read_mixture
from qwen3vl_bridge.data.objectives import columns_for
from qwen3vl_bridge.data.packing import PackedRows
from qwen3vl_bridge.data.pairs import read_reference_logps, reference_rules
from qwen3vl_bridge.data.samples import (
    ON_BAD_ADVICE,
    OnBad,
    OnLong,
    SampleFilter,
    Samples,
    Sizes,
    make_drop_counter,
    open_shared_sizes,
)
from qwen3vl_bridge.data.sources import ConversationSource, open_source

import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.utils.common_utils import get_rank_safe
from transformers import AutoConfig

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
# A check before a run reads blocks of consecutive records of each split, because Parquet is read by row group.
_BLOCKS, _BLOCK_RECORDS, _CHECK_SECONDS = 8, 250, 5.0
_MOST_KINDS = 10  # kinds of errors that a message lists
# Settings with which pairs of answers can be read: name, values, reason.
_GROUP_SETTINGS = (
    ("pack", (True,), "all documents of a record are in one packed row"),
    ("streaming", (False,), "records are read by number; download the data set"),
    ("on_long", ("error", "drop"), "a shortened document cannot be compared with others"),
)


@dataclass(kw_only=True)
class ConversationSettings(DatasetProvider):
    """Settings for encoding conversations and laying them out in rows.

    Attributes:
        hf_processor_path: folder or hub name of the Hugging Face checkpoint with the processor, the chat template and
            the config.
        seq_length: tokens of a row.
        max_patches: maximum number of patches in a row, which bounds the vision tower's memory; None for no limit. An
            image has a quarter as many tokens as patches.
        pack: pack several conversations per row by best fit (requires micro_batch_size 1); False: one conversation per
            row, padded.
        pad_to_multiple_of: each conversation of a packed row is padded to a multiple of this; None for the multiple
            that the run's context parallelism requires.
        on_long: what to do with a conversation that is longer than a row: "error", "drop", or "truncate" (never within
            an image). Dropped and truncated conversations are counted and logged.
        on_bad: what to do with a conversation that cannot be read or encoded: "error" or "drop". Dropped conversations
            are counted and logged.
        answers: train on "all" answers of a conversation, or only on the "last".
        empty_thinking: for chat templates that render "reasoning_content": whether the empty thinking block before an
            answer without reasoning is part of the "prompt" or is trained on ("train").
        reasoning_effort: passed to the chat template, such as Qwen3.8's, which writes it into prompts with thinking.
            None for the template's default.
        preserve_thinking: passed to the chat template, such as Qwen3.6's or Qwen3.8's. If True, answers before the last
            question keep their reasoning, which is then trained on. None for the template's default.
        vision: limits for images and videos, where they differ from the checkpoint's processor.
        pixel_dtype: dtype of the pixel values in a batch; None for `params_dtype`.
        params_dtype: dtype of the model's parameters, set by `Qwen3VLConfigContainer`; None for float32.
        ignored_signal: number of a signal that data-loading processes ignore; set by `Qwen3VLConfigContainer`.
        rows_of_evaluation: number of rows that each evaluation reads, always from the beginning of the split. If the
            split has fewer rows, the missing rows have no loss. None: each evaluation continues where the previous
            evaluation ended. Set by `Qwen3VLConfigContainer`.
    """

    # Settings of Megatron-Bridge that are ignored here, with their default.
    ignored_settings: ClassVar[dict[str, Any]] = {"data_sharding": True, "drop_last": True, "trust_remote_code": None}
    # State of an object, not settings: a ClassVar is no field of the dataclass. Methods set it with `vars(self)`,
    # because type checkers reject an assignment to the ClassVar of an object.
    # The position that checkpoints store, and that a resumed run is checked against. Set by `record_position`.
    position: ClassVar[Mapping[str, Any] | None] = None
    # Position and row of the resumed checkpoint. Set by `expect_position`, which the checkpoint manager calls when it
    # loads the checkpoint, before the data sets are built; `record_position` resets it to None.
    _expected: ClassVar[tuple[Mapping[str, Any], int] | None] = None
    # The first epoch of training; None if it is not known. Set by `build_datasets` and `count_epoch`.
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
    pixel_dtype: torch.dtype | None = None
    params_dtype: torch.dtype | None = None
    ignored_signal: int | None = None
    rows_of_evaluation: int | None = None

    def finalize(self) -> None:
        """Check everything that can be checked without reading data; raise ValueError for an invalid value."""
        super().finalize()
        choices = {"on_long": OnLong, "on_bad": OnBad, "answers": Answers, "empty_thinking": EmptyThinking}
        for name, kind in choices.items():
            check_choice(name, getattr(self, name), kind)
        self.check_minimum(seq_length=1, pad_to_multiple_of=1, max_patches=1, num_workers=0)
        for name, silent in self.ignored_settings.items():
            if (found := getattr(self, name)) != silent:
                raise ValueError(
                    f"dataset.{name} is {found!r}, expected {silent!r}: {type(self).__name__} ignores this setting"
                )
        if not self.pack and self.multiple != 1:
            raise ValueError(
                f"pad_to_multiple_of is {self.pad_to_multiple_of}, but pack is off; remove it, or turn pack on"
            )
        if self.seq_length % self.multiple:
            raise ValueError(
                f"seq_length is {self.seq_length}, expected a multiple of pad_to_multiple_of, {self.pad_to_multiple_of}"
            )

    def check_minimum(self, **least: int) -> None:
        """Raise ValueError if a setting is below its minimum, given as name=minimum. Settings of None are skipped."""
        for name, fewest in least.items():
            found = getattr(self, name)
            if found is not None and found < fewest:
                raise ValueError(f"{name} is {found!r}, expected at least {fewest}")

    @property
    def multiple(self) -> int:
        """Return `pad_to_multiple_of`, or 1 if it is None."""
        return self.pad_to_multiple_of or 1

    def for_context_parallel(self, cp_size: int) -> Self:
        """Return these settings for `cp_size` context-parallel ranks.

        If samples are packed and `pad_to_multiple_of` is None, set it to the multiple that the ranks require.

        Raises:
            ValueError: `seq_length` or `pad_to_multiple_of` does not fit the number of context-parallel ranks.
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
                f"context_parallel_size {cp_size}, or None to use {need}"
            )
        return replace(self, pad_to_multiple_of=self.pad_to_multiple_of or need)

    def expect_position(self, position: Mapping[str, Any], row: int) -> None:
        """Set the position that a resumed run continues from, so that `record_position` can check the training rows.

        `position` is the value that the checkpoint stores, and `row` the number of the next row.
        """
        vars(self)["_expected"] = (position, row)

    def record_position(self, data: Mapping[str, Any], assignment: tuple[int, int] = (1, 1)) -> None:
        """Store the fingerprint `data` of the training rows, and their assignment to ranks, in `self.position`.

        `assignment` is (number of rows that are assigned together, number of ranks).

        Raises:
            ValueError: the rows or their assignment differ from those of the run that is resumed (`expect_position`).
        """
        vars(self)["position"] = {"data": dict(data), "assigned": list(assignment)}
        if self._expected is None:
            return
        expected, row = self._expected
        vars(self)["_expected"] = None
        check_position(data, expected["data"])
        check_assignment(row, tuple(expected["assigned"]), assignment)

    def processor_settings(self) -> CheckpointSettings:
        """Read the encoder and other settings of the checkpoint `hf_processor_path`.

        Raises:
            DataError: files of the checkpoint are missing or unsuitable.
        """
        template = (self.empty_thinking, self.reasoning_effort, self.preserve_thinking)
        return _load_checkpoint_settings(self.hf_processor_path, self.vision, self.answers, *template)

    def sample_filter(self) -> SampleFilter:
        """Return the filter that decides which conversations become samples."""
        encoder = self.processor_settings().encoder
        return SampleFilter(
            encoder,
            limit=self.seq_length,
            most_patches=self.max_patches,
            on_long=self.on_long,
            on_bad=self.on_bad,
            multiple=self.multiple,
        )

    def collator(self) -> Collator:
        """Return the collator that builds batches from samples."""
        settings = self.processor_settings()
        dtype = self.pixel_dtype or self.params_dtype or torch.float32
        return Collator(settings.vision, settings.pad_id, self.seq_length, self.multiple, dtype)


@dataclass(frozen=True)
class CheckpointSettings:
    """Encoder and settings from a Hugging Face checkpoint.

    `costs` gives the FLOPs of a sample, by which rows are assigned to ranks.
    """

    encoder: Encoder
    vision: VisionSettings
    pad_id: int
    costs: TowerCosts


@cache
def _load_checkpoint_settings(path: str, limits: VisionLimits, *encoding: Any) -> CheckpointSettings:
    """Return the settings of a checkpoint, cached per process. `encoding`: arguments of `Encoder` after the first."""
    processor: Any = load_processor(path, limits)
    return CheckpointSettings(
        Encoder(processor, *encoding),
        read_vision_settings(path, processor),
        pad_token_id(processor.tokenizer),
        tower_costs(AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()),
    )


@dataclass(kw_only=True)
class Qwen3VLConversationProvider(ConversationSettings):
    """Dataset of packed or padded conversations with images and videos. `ConversationSettings` has the other settings.

    Only the training split is shuffled. Where Megatron-Bridge counts samples, it counts rows of this dataset.

    Attributes:
        path: a folder with `train.jsonl` and optionally `valid.jsonl` or `test.jsonl`, or with splits in other formats
            (see `splits_in`), or with training data only. Replaces the three paths below.
        train_path: training conversations, as for `open_source`.
        mixture: several data sets in one run, instead of `path` and `train_path`: a list of mappings with the fields of
            `MixedSet`, or a YAML file with one. Their validation and test splits are read one after the other.
        valid_path: validation conversations, in the same formats.
        test_path: test conversations, in the same formats.
        media_root: folder of images and videos, or a list of folders that are searched in order; symbolic links may
            point from one into another. Default: the folder of each data file.
        url_cache: folder with downloaded files; None for the user's cache folder.
        schema_adapter: one of Megatron-Bridge's record formats, such as "cord_v2"; None for ours (docs/data.md).
        columns: column names of the data set, where they differ from the default names (docs/data.md).
        streaming: read data sets of the hub while they are downloaded. Each data-loading process of each data-parallel
            rank reads its own part (some of the files) and packs its own rows; a resumed run rereads the current epoch
            of its parts from the start.
        stream_parts: number of parts of a stream, a multiple of data-parallel ranks x data-loading processes (at least
            1) x rows per microbatch; None for that product. The rows depend only on the number of parts, so a run can
            resume with another number of ranks or processes if the product still divides it.
        train_packing: folder with training rows packed by `qwen3vl data pack` with the same settings. None: every
            machine measures every conversation during training, which is too slow for millions of them.
        balance_over: the global batch size, to assign its rows to data-parallel ranks by their cost in the vision tower
            and the language model; None to assign them in order. A multiple of the number of data-parallel ranks.
        seed: seed of the order of training samples.
        window_size: number of conversations packed together when packing during training.
        dataloader_type: must be "single": rows are numbered consecutively without end, so a run resumes exactly.
        rows_of_microbatch: rows of a microbatch; set by `Qwen3VLConfigContainer` from `train`.
        objective: kind of the records (docs/objectives.md); set by `Qwen3VLConfigContainer` from `objective.kind`.
        max_documents: maximum number of documents in a row, for objectives other than "sft"; None for no limit.
        reference_logps: folder with log-probabilities of the answers of pairs; set by `Qwen3VLConfigContainer` from
            `objective.reference_logps`.
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
    objective: str = "sft"
    max_documents: int | None = None
    reference_logps: str | None = None

    def finalize(self) -> None:
        """Check everything that can be checked without reading data; raise ValueError for an invalid value."""
        super().finalize()
        if self.dataloader_type != "single":
            raise ValueError(
                f"dataloader_type is {self.dataloader_type!r}, expected 'single': the data set orders its rows itself"
            )
        self.check_minimum(balance_over=1, window_size=1, stream_parts=1, **({"seed": 0} if self.streaming else {}))
        self._check_paths_are_set()
        for split in SPLITS:
            given = {
                "dataset.path": None if self.path is None else splits_in(self.path).get(split),
                f"dataset.{split}_path": getattr(self, f"{split}_path"),
                "dataset.mixture": tuple(one.path for one in self.mixture_sets(split)),
            }
            given = {name: found for name, found in given.items() if found}
            if len(set(given.values())) > 1:
                found = " and ".join(f"{found!r} by {name}" for name, found in given.items())
                raise ValueError(f"the split {split} is set to {found}; use only one of these settings")
        wrong = {}
        if not self.pack:
            wrong |= dict.fromkeys(("train_packing", "balance_over"), "pack is off; remove it, or turn pack on")
        if self.streaming:
            needed = "streaming is on, and this setting needs random access; remove it, or turn streaming off"
            wrong |= dict.fromkeys(("train_packing", "balance_over", "mixture"), needed)
        else:
            wrong["stream_parts"] = "streaming is off; remove it, or turn streaming on"
        if self.train_packing is not None and self.window_size != type(self).window_size:
            wrong["window_size"] = "train_packing already sets the rows; remove one of them"
        for name, problem in wrong.items():
            if (found := getattr(self, name)) is not None:
                raise ValueError(f"{name} is {found!r}, but {problem}")
        for name, allowed, why in _GROUP_SETTINGS if self.objective != "sft" else ():
            if (found := getattr(self, name)) not in allowed:
                expected = " or ".join(map(repr, allowed))
                raise ValueError(
                    f"dataset.{name} is {found!r} for objective.kind={self.objective}, expected {expected}: {why}"
                )
        for path in (path for split in SPLITS for path in self.paths_of(split)):
            if path.startswith(HUB):
                HubName.parse(path)
            elif self.streaming:
                raise ValueError(
                    f"streaming is on, but {path} is not on the hub; use {HUB}owner/name#split, or turn streaming off"
                )
        MediaAccess.from_settings(self.media_root)
        find_schema(self.schema_adapter, columns_for(self.objective, self.columns))

    def _check_paths_are_set(self) -> None:
        if self.path is None and self.train_path is None and self.mixture is None:
            raise ValueError(
                "dataset.path is None: set it to a folder with train.jsonl, or set dataset.train_path to a file of "
                "conversations, or dataset.mixture to several data sets; set_paths of qwen3vl_recipes.paths sets all "
                "paths of a run"
            )

    def collator(self) -> Collator:
        """Return the collator that builds batches from samples."""
        collator = replace(super().collator(), objective=self.objective)
        if self.objective != "reranker":
            return collator
        tokenizer = self.processor_settings().encoder.processor.tokenizer
        answers = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
        if any(len(ids) != 1 for ids in answers):
            raise DataError(
                str(self.hf_processor_path),
                "the tokenizer splits 'yes' or 'no' into several tokens, expected one token each; use the tokenizer of "
                "a Qwen3-VL model",
            )
        return replace(collator, answer_tokens=(answers[0][0], answers[1][0]))

    def sample_filter(self) -> SampleFilter:
        """Return the filter that decides which conversations become samples."""
        found = super().sample_filter()
        return found if self.max_documents is None else found.with_max_documents(self.max_documents)

    def check_paths(self) -> None:
        """Raise ValueError if no path of training data is set, or a data path does not exist."""
        self._check_paths_are_set()
        names = (
            {"dataset.path (--data-path)": self.path}
            if self.path
            else {f"dataset.{split}_path": self.path_of(split) for split in SPLITS}
        )
        names |= {f"the path of {one.name} in dataset.mixture": one.path for one in self.mixture_sets("train")}
        check_data_paths({name: path for name, path in names.items() if path})

    def make_url_cache(self) -> UrlCache:
        """Return the `UrlCache` of the files that were downloaded before training."""
        return UrlCache(None if self.url_cache is None else Path(self.url_cache))

    def path_of(self, split: str) -> str | None:
        """Return the path of the conversations of a split; None if no path is set, as for a mixture."""
        own = getattr(self, f"{split}_path", None)
        return own if self.path is None else splits_in(self.path).get(split, own)

    def mixture_sets(self, split: str) -> tuple[MixedSet, ...]:
        """Return the data sets of the mixture that have the given split; raise ValueError for an invalid mixture."""
        if self.mixture is None:
            return ()
        sets = read_mixture(self.mixture, self.media_root, self.schema_adapter, self.columns)
        sets = tuple(replace(one, columns=columns_for(self.objective, one.columns)) for one in sets)
        return tuple(one for one in sets if one.path_of(split) is not None)

    def paths_of(self, split: str) -> list[str]:
        """Return the paths of the data sets of a split: several for a mixture, none if the split has no data."""
        path = self.path_of(split)
        return [path] if path is not None else [str(one.path_of(split)) for one in self.mixture_sets(split)]

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[RowDataset | None, RowDataset | None, RowDataset | None]:
        """Return (training, validation, test) rows of the requested lengths, for Megatron-Bridge's loop.

        A split is None if no rows are requested or it has no data.

        Raises:
            DataError: files are missing or unreadable, or a stream has fewer files than parts.
            ValueError: rows or stream parts cannot be divided over the ranks. Or the data differ between processes, or
                from the data of the resumed run, or from the data that were packed before training.
        """
        groups = context.pg_collection
        settings, ranks = self, 1
        if groups is not None:
            settings, ranks = self.for_context_parallel(groups.cp.size()), groups.dp.size()
        wanted = (context.train_samples, context.valid_samples, context.test_samples)
        train, valid, test = (
            settings._divide_stream(settings.rows(split, length=length, ranks=ranks), ranks, groups=groups)
            if length and self.paths_of(split)
            else None
            for split, length in zip(SPLITS, wanted, strict=True)
        )
        for split, one in zip(SPLITS, (train, valid, test), strict=True):
            if groups is not None and one is not None and not self.streaming and torch.distributed.is_initialized():
                found = gather_objects(one.samples.source.fingerprint())
                other = next((rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]), None)
                if other is not None:
                    raise ValueError(
                        f"the data of the split {split!r} differ among the processes: found {found[other]} on rank "
                        f"{other}, expected {found[0]} as on rank 0. Every machine needs the same files and the same "
                        "downloads: copy the complete folder url_cache"
                    )
        if train is not None:
            self.record_position(train.fingerprint(), train.assignment())
            vars(self)["epoch"] = self.epoch or train.epoch()
        return train, valid, test

    def stream(self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1) -> BatchStream:
        """Return endless microbatches of a split for a custom loop. Save its `state_dict` with each checkpoint."""
        return BatchStream(
            self._divide_stream(self.rows(split, ranks=dp_size), dp_size, micro_batch_size),
            dp_rank=dp_rank,
            dp_size=dp_size,
            micro_batch_size=micro_batch_size,
            num_workers=self.num_workers,
            ignored_signal=self.ignored_signal,
        )

    def evaluation(
        self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1
    ) -> Iterator[TokenBatch]:
        """Yield the microbatches of one data-parallel rank in a single pass over a split, in the order of the file.

        Ranks take the rows in turn. If the data set is streamed, every rank reads all of it.
        """
        rows = self.rows(split, shuffle=False)
        return one_pass(rows, dp_rank=dp_rank, dp_size=dp_size, micro_batch_size=micro_batch_size)

    def count_epoch(self, cp_size: int = 1) -> Epoch:
        """Return the numbers of samples, rows and tokens in the first epoch.

        Unless rows were packed before training, this measures every sample.

        Raises:
            ValueError: the data set is streamed.
            DataError: files are missing, or samples are bad or too long and the settings do not drop them.
        """
        if self.streaming:
            raise ValueError(
                "streaming is on: the number of rows is known only after reading them. Set train.train_iters instead "
                "of train.num_epochs, or turn streaming off"
            )
        rows = self.for_context_parallel(cp_size).rows("train", alone=True)
        epoch = rows.epoch(counted=True)
        assert epoch is not None  # the data set is not streamed
        vars(self)["epoch"] = epoch
        return epoch

    def rows(
        self, split: str, *, length: int = 0, shuffle: bool | None = None, ranks: int = 1, alone: bool = False
    ) -> RowDataset:
        """Return the rows of a split for data-parallel ranks; raise ValueError if the split has no path.

        Args:
            split: "train", "valid" or "test".
            length: value of `len(rows)`, as requested by a training loop.
            shuffle: shuffle the samples; None to shuffle only the training split. Only shuffled rows are assigned by
                cost.
            ranks: number of data-parallel ranks.
            alone: do not share the sizes of samples with other processes, and do not log dropped samples.
        """
        if not (paths := self.paths_of(split)):
            raise ValueError(f"the split {split!r} has no data: set {split}_path; the splits are {', '.join(SPLITS)}")
        shuffled = split == "train" if shuffle is None else shuffle
        seed = self.seed if shuffled else None
        packed = PackedRows(self.train_packing) if split == "train" and self.train_packing else None
        over = shuffled and self.balance_over
        balance = Balance(over, self.processor_settings().costs) if over else None
        settings = RowSettings(self.collator(), self.pack, seed, self.window_size, packed, balance)
        source = self.open_split(split, seed)
        sample_filter, sizes = self.sample_filter(), None if packed is None else Sizes(known=packed.size)
        if sizes is None and not isinstance(source, StreamedDataset):
            roots = [one.media_root for one in self.mixture_sets(split)] or [self.media_root]
            place = {"path": list(map(os.path.abspath, paths)), "media_root": roots}
            rules = {**place, "data": source.fingerprint(), **sample_filter.fingerprint(), "multiple": self.multiple}
            sizes = Sizes(len(source)) if alone else open_shared_sizes(len(source), rules)
        repeat = None if split == "train" else self.rows_of_evaluation
        counter, logps = (lambda kind: 0) if alone else None, None
        if self.reference_logps is not None:
            logps = read_reference_logps(self.reference_logps, split, reference_rules(source, sample_filter))
        samples = Samples(source, sample_filter, sizes, counter, logps)
        return RowDataset(samples, settings, length=length, ranks=ranks, repeat=repeat)

    def check_samples(self, cp_size: int = 1, evaluated: Mapping[str, int] | None = None) -> None:
        """Raise DataError on rank 0 if the data cannot be used. Call it before the model is built.

        Files must exist. Rows that were packed before training must fit the files. Without such rows, read up to 2,000
        records of each split and name all bad ones: in the error, or in a warning if they are dropped. At least one
        training record of the first window must be valid. Data on the hub are not checked.

        Args:
            cp_size: number of context-parallel ranks.
            evaluated: number of rows that an evaluation reads from the splits "valid" and "test"; None for all.
        """
        # Only rank 0 reads, so that a thousand processes do not open the same images. The other ranks wait for it when
        # they create the process group, and torchrun ends them when rank 0 fails. `build_datasets` finds files that
        # differ on another machine.
        if get_rank_safe() != 0:
            return
        for split in SPLITS:
            paths, rows = self.paths_of(split), None if evaluated is None else evaluated.get(split)
            if rows == 0 or not paths or any(path.startswith(HUB) for path in paths):
                continue
            if split == "train" and self.train_packing is not None:
                self.for_context_parallel(cp_size).rows("train")
                continue
            source = self.open_split(split, self.seed)
            assert isinstance(source, Sized)  # only data of the hub are streamed
            # Packing measures all records of a window, and a row has at least one.
            first = None if rows is None else max(rows, self.window_size) if self.pack else rows
            self._read_records(split, source, first)
            if split == "train" and "drop" in (self.on_bad, self.on_long):
                self._check_first_window(source)

    def _read_records(self, split: str, source: Any, first: int | None) -> None:
        """Read blocks of records of a split; if some cannot be used, raise DataError, or warn if `on_bad` drops them.

        The blocks are spread over the first `first` records of the split, or over all records if `first` is None.
        """
        length = len(source)
        total = min(length, first or length)
        in_order = (
            source.order(None).sample_numbers(0, 0, total) if first and isinstance(source, Mixture) else range(total)
        )
        errors, read, begun = list[tuple[str, DataError]](), 0, time.monotonic()
        for block in range(_BLOCKS):
            start, end = (number * total // _BLOCKS for number in (block, block + 1))
            for number in in_order[start : min(end, start + _BLOCK_RECORDS)]:
                if time.monotonic() - begun > _CHECK_SECONDS * (block + 1) / _BLOCKS:
                    break  # reading is slow: read fewer records of each block
                name, read = source.sample_id(number), read + 1
                try:
                    for image in chain.from_iterable(document.images for document in source[number].documents):
                        image_size(image, name)
                except DataError as error:
                    errors.append((name, error))
        stopping = [one for one in errors if self.on_bad == "error" or isinstance(one[1], DataUnavailable)]
        if not (found := stopping or errors):
            return
        lines = group_errors([(name, str(error), error.problem) for name, error in found], _MOST_KINDS)
        records = f"{len(found):,} of {read:,} records" + (f", of {length:,} in all," if read < length else "")
        if stopping:
            are_droppable = any(not isinstance(error, DataUnavailable) for _, error in stopping)
            advice = ON_BAD_ADVICE if are_droppable else ""
            raise DataError(
                f"{split} data", f"{records} cannot be used{advice}:" + "".join(map("\n  {}".format, lines))
            )
        words = f"{split} data: {records} cannot be used and are left out (dataset.on_bad is 'drop'):\n  %s"
        logger.warning(words, "\n  ".join(lines))

    def _check_first_window(self, source: Any) -> None:
        """Raise DataError if no sample of the first training window is valid. Stop at the first valid sample."""
        strict = replace(self, on_bad="error", on_long="truncate" if self.on_long == "truncate" else "error")
        samples = Samples(source, strict.sample_filter())
        numbers = (
            RowDataset(samples, RowSettings(self.collator())).order(self.seed).sample_numbers(0, 0, self.window_size)
        )
        problems = list[str]()
        for number in numbers:
            try:
                samples.size(number)
                return
            except (SampleSizeChanged, DataUnavailable):
                raise
            except DataError as error:
                problems.append(str(error).removesuffix(ON_BAD_ADVICE))
        raise DataError(
            "the training data",
            f"all of the first {len(numbers)} samples would be dropped as bad or too long, expected at least one "
            f"that can be trained on. The first errors: {'; '.join(problems[:3])}. `qwen3vl data inspect` shows the "
            f"others",
        )

    def _divide_stream(self, rows: RowDataset, ranks: int, micro_batch_size: int = 1, groups: Any = None) -> RowDataset:
        """Return the rows, divided into stream parts if the data set is streamed.

        Raises:
            ValueError: `stream_parts` is not a multiple of ranks x data-loading processes x rows of a microbatch.
        """
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
        return StreamedRows(rows, parts, make_drop_counter({"stream": rows.samples.source.fingerprint()}, groups))

    def open_split(self, split: str, seed: int | None) -> ConversationSource | Mixture | StreamedDataset:
        """Open the conversations of a split. `seed` shuffles a stream; None keeps its order."""
        path, url_cache, schema_adapter = self.path_of(split), self.make_url_cache(), self.schema_adapter
        columns = columns_for(self.objective, self.columns)
        if path is None:
            return open_mixture(self.mixture_sets(split), split, url_cache)
        if not self.streaming:
            return open_source(
                path, self.media_root, url_cache=url_cache, schema_adapter=schema_adapter, columns=columns
            )
        return StreamedDataset.from_hub(
            path,
            media_root=MediaAccess.from_settings(self.media_root, url_cache),
            seed=seed,
            # The samples of a row are nearly always from the row's window or the previous one, and rows are planned
            # one window ahead.
            keep=4 * self.window_size,
            schema=find_schema(schema_adapter, self.columns),
        )
