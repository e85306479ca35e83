"""Conversations as a Megatron-Bridge dataset: one configuration for Megatron-Bridge's loop and for ours.

What lives here: the configuration, and what each loop asks of it. What may not: settings of rows (`row_settings.py`),
reading, encoding, packing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.errors import Changed, DataError, Unreachable
from qwen3vl_bridge.data.loading.batch_stream import BatchStream, one_pass
from qwen3vl_bridge.data.loading.row_dataset import Balance, RowDataset, RowSettings
from qwen3vl_bridge.data.loading.streamed_rows import StreamedRows
from qwen3vl_bridge.data.media.images import MediaAccess
from qwen3vl_bridge.data.media.url_cache import UrlCache
from qwen3vl_bridge.data.packing.packed_rows import PackedRows
from qwen3vl_bridge.data.packing.shared_sizes import notes_of_job, sizes_of_job
from qwen3vl_bridge.data.processing.samples import Samples
from qwen3vl_bridge.data.row_settings import SPLITS, ConversationRows
from qwen3vl_bridge.data.schemas.columns import Columns, one_schema
from qwen3vl_bridge.data.schemas.named_schemas import named_schema
from qwen3vl_bridge.data.sources.fingerprints import check_alike
from qwen3vl_bridge.data.sources.hub import HUB, HubName
from qwen3vl_bridge.data.sources.hub_streaming import StreamedDataset
from qwen3vl_bridge.data.sources.mixture import MixedSet, mixed_sets, open_mixture
from qwen3vl_bridge.data.sources.opening import ConversationSource, open_source
from qwen3vl_bridge.data.sources.splits import splits_in
from qwen3vl_bridge.parallel.collectives import gather_objects

import torch
from megatron.bridge.data.base import DatasetBuildContext


@dataclass(kw_only=True)
class Qwen3VLConversationProvider(ConversationRows):
    """Rows of conversations with pictures. Settings beside these: `ConversationRows`.

    Only the training split is shuffled. A "sample" of Megatron-Bridge's counters is a row.

    Attributes:
        path: a folder with `train.jsonl`, and `valid.jsonl` or `test.jsonl` if there is validation data, or with splits
            in other kinds of files (see `data/sources/splits.py`), or training data alone; in place of the three
            paths below.
        train_path: conversations: a file of JSON or Parquet, a folder, or
            "hf://owner/name:configuration#split" (see `data/sources/opening.py`).
        mixture: several data sets in one run, in place of `path` and `train_path`: a list of {path, weight} or
            {path, epochs}, with name, media_root, schema_adapter and columns where they need them, or a YAML file with
            such a list (see `MixedSet` in `data/sources/mixture.py`). Their validation and test splits are read one
            after the other.
        valid_path: likewise, for validation, or None.
        test_path: likewise, or None.
        media_root: folder of the pictures, or several: a path is looked up in each, in their order, and links may lead
            from one into another; by default that of each file.
        allowed_urls: no setting any more. What addresses hold is downloaded before training: `qwen3vl data download`.
        url_cache: folder of what was downloaded; the user's own if None.
        schema_adapter: the records' format, by Megatron-Bridge's name for it, such as "cord_v2"; None for
            conversations (see `data/schemas/named_schemas.py`).
        columns: the records' own names for what is read, such as `columns.image=img`, and questions and answers made
            of several columns (see `data/schemas/columns.py`).
        streaming: read data sets of the hub as they are downloaded, instead of all of them first. Each data-loading
            process of each data-parallel rank reads a part of its own, some of the files, and packs its own rows; a
            resumed run reads once more what it had read of them.
        stream_parts: into how many parts a stream is divided, a multiple of the data-parallel ranks x data-loading
            processes (at least 1) x rows of a microbatch; their product if None. Rows are the same at all numbers of
            which it is a multiple.
        train_packing: folder with rows of the training split that `qwen3vl data pack` made, by these settings. Without
            it every machine measures every conversation while training begins and goes on, which is too much for
            millions of them.
        balance_over: rows of a global batch, so that they are assigned to data-parallel ranks by what they cost both
            towers; None to read them as they come. A multiple of the ranks.
        seed: of the order of the training split.
        window_size: conversations that are packed together, where they are packed as they are read.
        dataloader_type: rows are numbered without end, in order, so "single" resumes exactly.
        rows_of_microbatch: no setting of people's; a `Qwen3VLConfigContainer` sets it from `train`.
    """

    path: str | None = None
    train_path: str | None = None
    mixture: list[dict[str, Any]] | str | None = None
    valid_path: str | None = None
    test_path: str | None = None
    media_root: str | list[str] | None = None
    allowed_urls: tuple[str, ...] = ()
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
        """Check what can be checked without reading data.

        Raises:
            ValueError: a setting with a value it cannot have.
        """
        super().finalize()
        self._check_paths()
        if self.dataloader_type != "single":
            raise ValueError(
                f"dataloader_type is {self.dataloader_type!r}, expected 'single': rows are in order already"
            )
        self.check_least(balance_over=1, window_size=1, stream_parts=1)
        for name in ("train_packing", "balance_over"):
            if getattr(self, name) is not None and (not self.pack or self.streaming):
                refused = "streaming is on; it needs samples by number" if self.pack else "pack is off"
                raise ValueError(f"{name} is {getattr(self, name)!r}, but {refused}")
        paths = [path for split in SPLITS if (path := self.path_of(split))]
        if self.streaming:
            self.check_least(seed=0)
        elif self.stream_parts is not None:
            raise ValueError(f"stream_parts is {self.stream_parts}, but streaming is off; expected None")
        if self.streaming and self.mixture is not None:
            raise ValueError("streaming is on, but there is a dataset.mixture; it needs samples by number")
        if self.streaming and (wrong := [path for path in paths if not path.startswith(HUB)]):
            raise ValueError(f"streaming is on, but {wrong[0]} is not on the hub, expected {HUB}owner/name#split")
        for path in paths:
            if path.startswith(HUB):
                HubName.of(path)
        if self.train_packing is not None and self.window_size != type(self).window_size:
            raise ValueError(f"window_size is {self.window_size}, but train_packing has its rows already")
        if self.allowed_urls:
            raise ValueError(
                f"allowed_urls is {self.allowed_urls!r}, expected (): nothing is downloaded while training. Before it, "
                "qwen3vl data download --data PATH --allowed-urls URL does it, into the folder url_cache"
            )
        MediaAccess.of(self.media_root)
        one_schema(named_schema(self.schema_adapter), self.columns)

    def downloaded(self) -> UrlCache:
        """What was downloaded before training."""
        return UrlCache(None if self.url_cache is None else Path(self.url_cache))

    def path_of(self, split: str) -> str | None:
        """Where a split's conversations are, or None if it has none."""
        own = getattr(self, f"{split}_path", None)
        return own if self.path is None else splits_in(self.path).get(split, own)

    def mixed(self, split: str) -> tuple[MixedSet, ...]:
        """The sets of the mixture that have a split.

        Raises:
            ValueError: a mixture that is none.
        """
        if self.mixture is None:
            return ()
        sets = mixed_sets(self.mixture, self.media_root, self.schema_adapter, self.columns)
        return tuple(one for one in sets if one.path_of(split) is not None)

    def _check_paths(self) -> None:
        if self.mixture is not None:
            for name in ("path", "train_path"):
                if (given := getattr(self, name)) is not None:
                    raise ValueError(
                        f"dataset.{name} is {given!r}, and dataset.mixture is set; expected one of the two"
                    )
            for split in SPLITS:
                given, sets = getattr(self, f"{split}_path"), self.mixed(split)
                if given is not None and sets:
                    raise ValueError(
                        f"dataset.{split}_path is {given!r}, and {sets[0].name} of dataset.mixture has data for "
                        f"{split}; expected one of the two"
                    )
            return
        if self.path is None and self.train_path is None:
            raise ValueError(
                "dataset.path is None, expected a folder with train.jsonl, or dataset.train_path with a file of "
                "conversations, or dataset.mixture with several data sets"
            )
        for split in SPLITS:
            given, found = getattr(self, f"{split}_path"), self.path_of(split)
            if given != found and given is not None:
                raise ValueError(
                    f"dataset.path is {self.path!r}, which has {found} for {split}, and dataset.{split}_path is "
                    f"{given!r}; expected one of the two settings"
                )

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[RowDataset | StreamedRows | None, RowDataset | StreamedRows | None, RowDataset | StreamedRows | None]:
        """Rows of each split for Megatron-Bridge's loop, with as many as it asks for.

        Raises:
            DataError: files that are not there or cannot be read, or a stream of fewer files than parts.
            ValueError: rows that the context-parallel ranks could not share, that were packed by other settings, or
                that are others than the run has trained on or other processes have; parts of a stream that the
                processes could not share.
        """
        groups = context.pg_collection
        rows, ranks = (self, 1) if groups is None else (self.shared_by(groups.cp.size()), groups.dp.size())
        wanted = (context.train_samples, context.valid_samples, context.test_samples)
        train, valid, test = (
            rows._in_parts(rows.rows(split, length=length, ranks=ranks), ranks, groups=groups)
            if length and (self.path_of(split) or self.mixed(split))
            else None
            for split, length in zip(SPLITS, wanted, strict=True)
        )
        for split, one in zip(SPLITS, (train, valid, test), strict=True):
            if groups is not None and isinstance(one, RowDataset) and torch.distributed.is_initialized():
                check_alike(gather_objects(one.samples.file.fingerprint()), f"the data of the split {split!r}")
        if train is not None:
            self.note_position(train.fingerprint(), train.assignment())
        return train, valid, test

    def stream(self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1) -> BatchStream:
        """Microbatches without end, for a loop of ours. Its `state_dict` goes into the checkpoint.

        Args:
            split: "train", "valid" or "test".
            dp_rank: this data-parallel rank.
            dp_size: how many there are.
            micro_batch_size: rows of a microbatch.
        """
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
    ) -> Iterator[PackedBatch]:
        """Every row of a split once, in the file's order; arguments as for `stream`.

        Of a stream every rank reads all: they take equally many microbatches, and how many is known at its end.
        """
        rows = self.rows(split, shuffle=False)
        return one_pass(rows, dp_rank=dp_rank, dp_size=dp_size, micro_batch_size=micro_batch_size)

    def rows(
        self,
        split: str,
        *,
        length: int = 0,
        shuffle: bool | None = None,
        ranks: int = 1,
    ) -> RowDataset:
        """Rows of a split.

        Args:
            split: "train", "valid" or "test".
            length: what their `len` answers.
            shuffle: whether in random order; by default only the training split is. What is not, is not assigned
                either.
            ranks: data-parallel ranks.

        Raises:
            ValueError: a split that has no path, or rows that were packed by other settings.
            DataError: a file that is not there or cannot be read.
        """
        path, sets = self.path_of(split), self.mixed(split)
        if path is None and not sets:
            raise ValueError(f"the split {split!r} has no {split}_path; splits are {', '.join(SPLITS)}")
        shuffled = split == "train" if shuffle is None else shuffle
        seed = self.seed if shuffled else None
        packed = PackedRows(self.train_packing) if split == "train" and self.train_packing else None
        over = shuffled and self.balance_over
        settings = RowSettings(
            self.collator(),
            self.pack,
            seed,
            self.window_size,
            packed,
            Balance(over, self.checkpoint().costs) if over else None,
        )
        source = self._source(path, seed) if path is not None else open_mixture(sets, split, self.downloaded())
        sample_filter, sizes = self.sample_filter(), None if packed is None else packed.sizes()
        if sizes is None and not isinstance(source, StreamedDataset):
            paths = [path] if path is not None else [one.path_of(split) for one in sets]
            roots = [one.media_root for one in sets] or [self.media_root]
            place = {"path": [os.path.abspath(path) for path in paths if path], "media_root": roots}
            sizes = sizes_of_job(len(source), {**place, "data": source.fingerprint(), **sample_filter.fingerprint()})
        repeat = None if split == "train" else self.rows_of_evaluation
        return RowDataset(Samples(source, sample_filter, sizes), settings, length=length, ranks=ranks, repeat=repeat)

    def check_samples(self) -> None:
        """Refuse training data whose samples would all be dropped, before a model is built for them.

        Measures samples of the first window until one is good, which mostly is the first. Data of the hub, streams and
        rows that were packed before are not looked at.

        Raises:
            DataError: all samples of the window are bad or too long; a file that cannot be read.
            Unreachable: a picture was not downloaded.
        """
        sets = self.mixed("train")
        paths = [self.path_of("train")] if self.mixture is None else [one.path_of("train") for one in sets]
        is_dropping = "drop" in (self.on_bad, self.on_long)
        if not is_dropping or self.train_packing or any(path is None or path.startswith(HUB) for path in paths):
            return
        source = open_mixture(sets, "train", self.downloaded()) if sets else self._source(str(paths[0]), self.seed)
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

    def _in_parts(
        self, rows: RowDataset, ranks: int, micro_batch_size: int = 1, groups: Any = None
    ) -> RowDataset | StreamedRows:
        """Of a stream, those of its parts."""
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

    def _source(self, path: str, seed: int | None) -> ConversationSource | StreamedDataset:
        if not self.streaming:
            return open_source(
                path,
                self.media_root,
                addresses=self.downloaded(),
                schema_adapter=self.schema_adapter,
                columns=self.columns,
            )
        media = MediaAccess.of(self.media_root, self.downloaded())
        # A row's samples are nearly always of its window and the one before, and the plan is a window ahead.
        schema = one_schema(named_schema(self.schema_adapter), self.columns)
        how = {"seed": seed, "keep": 4 * self.window_size, "schema": schema}
        return StreamedDataset.named(path, media_root=media, **how)
