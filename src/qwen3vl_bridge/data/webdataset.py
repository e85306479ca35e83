"""WebDatasets as a Megatron-Bridge dataset, read by energon: samples, task encoders, the provider and its streams.

Energon gives each data-parallel rank its own share of the samples, with its own position. The data must be a
`CrudeWebdataset`, or a JSONL file with energon's index. The file "json" of a sample contains its record, which names
other files of the same sample as images and videos.

Samples that wait to be packed contain their files as stored, and are measured by the headers of the files. Pixels are
computed when a row is needed. Errors stop the run, unless `on_bad` or `on_long` is set to drop such samples.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import batched
from typing import Any, ClassVar

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.files import parse_record
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.conversations import (
    DEFAULT_COLUMNS,
    Columns,
    Conversation,
    add_schema_name,
    parse_conversation,
)
from qwen3vl_bridge.data.dataset_provider import ConversationSettings
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.loading import check_dp_rank, iterate_one_pass, make_worker_init
from qwen3vl_bridge.data.media import MediaAccess
from qwen3vl_bridge.data.packing import best_fit
from qwen3vl_bridge.data.records import FPS_KEY
from qwen3vl_bridge.data.samples import DropReason, MeasuredConversation, SampleFilter, make_drop_counter

import torch
from megatron.bridge.data.base import DatasetBuildContext, validate_declarative_mapping
from megatron.bridge.data.energon.base_energon_datamodule import EnergonDataloader
from megatron.energon import (
    Batch,
    Cooker,
    CrudeSample,
    Sample,
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    reraise_exception,
    stateless,
)
from megatron.energon.flavors.jsonl.ijsonl_reader import IJsonlReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset

RECORD_FILE = "json"


@edataclass
class RawSample(Sample):
    """A sample as stored in a tar file: the contents of its files, by extension."""

    parts: dict[str, Any]


@stateless
def _collect_files(sample: CrudeSample) -> RawSample:
    """Return the files of a sample without checking them: errors are raised later, where the sample can be dropped."""
    parts = {name: value for name, value in sample.items() if not name.startswith("__")}
    return RawSample(**basic_sample_keys(sample), parts=parts)


class _ReaderWithPath:
    """Wrapper of an energon sample reader that adds the path of the file to errors."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getitem__(self, index: int) -> Any:
        try:
            return self._reader[index]
        except (OSError, ValueError, AssertionError, IndexError, tarfile.TarError) as error:
            found, reader = f"energon cannot read a sample: {type(error).__name__}: {error}", self._reader
            if isinstance(reader, IJsonlReader):
                file = reader.jsonl_path
            else:
                file = reader.shard_infos[bisect_right(reader.shard_count_cumsum, index) - 1].path
            raise DataError(str(file), f"{found}; the file may have changed since 'energon prepare'") from error


def add_paths_to_errors(dataset: Any) -> Any:
    """Wrap the readers of an energon dataset so that read errors name the file, also in workers; return the dataset."""
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        # pyright: ignore[reportAttributeAccessIssue]
        readers: Any = [_ReaderWithPath(reader) for reader in dataset.join_readers]
        dataset.join_readers = readers
    for inner in getattr(dataset, "datasets", ()):
        add_paths_to_errors(inner)
    return dataset


def sample_location(sample: Sample) -> str:
    """Return the tar file and key of a sample, for messages."""
    return ":".join([*(source.shard_name for source in (sample.__sources__ or ())[:1]), str(sample.__key__)])


def _parse_sample(sample: RawSample, sample_fps: float | None, columns: Columns) -> Conversation:
    """Return the conversation of a sample, with images and videos as bytes; raise DataError if it is invalid.

    `sample_fps` is the frame rate of lists of frames without a rate.
    """
    place = sample_location(sample)
    if RECORD_FILE not in sample.parts:
        found = ", ".join(sample.parts) or "none"
        raise DataError(place, f"found the files {found}, expected {RECORD_FILE!r} among them")
    record = sample.parts[RECORD_FILE]
    if isinstance(record, (str, bytes)):
        try:
            record = parse_record(record)
        except ValueError as error:
            raise DataError(f"{place}: file {RECORD_FILE!r}", f"found invalid JSON ({error})") from error
    # Files by the names that a record may use: extensions, and full names with or without the folder in the tar.
    parts = {name: value for name, value in sample.parts.items() if name != RECORD_FILE}
    keys = {sample.__key__, sample.__key__.rpartition("/")[2]}
    files = {**{f"{key}.{name}": value for key in keys for name, value in parts.items()}, **parts}
    record = columns.convert_record(record, place)
    if sample_fps is not None:
        _set_default_fps(record, sample_fps)
    return parse_conversation(record, place, MediaAccess(files=files))


def _set_default_fps(record: Any, sample_fps: float) -> None:
    """Set `sample_fps` for each list of frames that has no frame rate, in place. Skip invalid messages."""
    messages = record.get("messages") if isinstance(record, dict) else None
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(part.get("video"), list) and part.get(FPS_KEY) is None:
                part[FPS_KEY] = sample_fps


@edataclass
class MeasuredSample(Sample):
    """A sample that waits to be packed: the conversation, with media as bytes, and its size."""

    measured: MeasuredConversation


@edataclass
class ReadySample(Sample):
    """A sample with tokens and pixels, ready to be collated."""

    encoded: EncodedSample


@edataclass
class EnergonBatch(Batch):
    """A microbatch, with the keys that energon needs to restore it."""

    packed: TokenBatch

    def pin_memory(self) -> EnergonBatch:
        """Return a copy in page-locked memory. Energon's loaders call this if CUDA is available."""
        return replace(self, packed=self.packed.pin_memory())


class MeasuringTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Task encoder of energon that reads and measures samples, in energon's order, without computing pixels."""

    decoder = None  # media stay bytes
    cookers = (Cooker(_collect_files),)

    def __init__(
        self,
        sample_filter: SampleFilter,
        collator: Collator,
        *,
        sample_fps: float | None = None,
        columns: Columns = DEFAULT_COLUMNS,
    ) -> None:
        """Set how samples are read and collated.

        Args:
            sample_filter: decides which conversations become samples.
            collator: collates samples into rows.
            sample_fps: frames per second for lists of frames without a rate; None to raise for them.
            columns: names of the columns of the records, where they differ from the default names.
        """
        self.sample_filter, self.collator = sample_filter, collator
        self._sample_fps, self._columns = sample_fps, columns
        self._num_samples = self._left_out = self._counted = 0

    def build_train_datasets(self, *, datasets: Any, worker_config: WorkerConfig, **settings: Any) -> Any:
        """Build energon's datasets for training.

        Raises:
            DataError: there are fewer samples than workers. A worker without samples would loop forever.
        """
        self._prepare(datasets, worker_config)
        ranks, workers = worker_config.world_size, max(1, worker_config.num_workers)
        if self._num_samples < ranks * workers:
            expected = f"expected at least {ranks * workers}: one for each of {ranks} ranks x {workers} workers"
            raise DataError(_dataset_paths(datasets), f"found {self._num_samples} samples, {expected}")
        return add_paths_to_errors(
            super().build_train_datasets(datasets=datasets, worker_config=worker_config, **settings)
        )

    def build_val_datasets(self, *, datasets: Any, worker_config: WorkerConfig, **settings: Any) -> Any:
        """Build energon's datasets for validation."""
        self._prepare(datasets, worker_config)
        return add_paths_to_errors(
            super().build_val_datasets(datasets=datasets, worker_config=worker_config, **settings)
        )

    def _prepare(self, datasets: Sequence[Any], worker_config: WorkerConfig) -> None:
        """Check the datasets, count the samples, and make energon raise errors instead of printing them."""
        worker_config.global_error_handler = reraise_exception
        for loaded in datasets:
            if loaded.aux:
                found = f"found auxiliary data ({', '.join(loaded.aux)})"
                raise DataError(_dataset_paths([loaded]), f"{found}, expected images and videos in the tar files")
            dataset, kind = loaded.dataset, loaded.dataset.__sample_type__
            if not issubclass(kind, CrudeSample):
                found = f"found a {type(dataset).__name__} of {kind.__name__}"
                raise DataError(_dataset_paths([loaded]), f"{found}, expected a CrudeWebdataset")
        # Samples of all ranks. A metadataset may use only a subset of each dataset.
        every = [(loaded.dataset.subset, len(loaded.dataset)) for loaded in datasets]
        ranges = [subset.compute_subset(length) if subset else (0, length) for subset, length in every]
        self._num_samples = sum(end - start for start, end in ranges)

    @stateless
    def preencode_sample(self, sample: RawSample) -> MeasuredSample:
        """Return a sample with its size; raise SkipSample if it is dropped."""
        read = partial(_parse_sample, sample, self._sample_fps, self._columns)
        measured = self.sample_filter.measure(read, sample_location(sample))
        self._left_out = 0 if measured else self._left_out + 1
        if measured is not None:
            return MeasuredSample.derive_from(sample, measured=measured)
        if self._left_out > self._num_samples:  # training would loop over the data forever
            raise DataError(
                sample_location(sample),
                f"{self._left_out} consecutive samples were dropped, expected a valid one; see the log for the reasons",
            )
        raise SkipSample

    def select_samples_to_pack(self, samples: list[MeasuredSample]) -> list[list[MeasuredSample]]:
        """Return the samples of each row, packed by tokens and patches.

        Every sample is in a row, because energon would lose the others.
        """
        sizes = [sample.measured.size.padded(self.collator.multiple) for sample in samples]
        lengths, patches = [size.tokens for size in sizes], [size.patches for size in sizes]
        rows = best_fit(lengths, self.collator.seq_length, patches, self.sample_filter.most_patches)
        return [[samples[number] for number in row] for row in rows]

    def encode_or_blank(self, sample: MeasuredSample) -> EncodedSample:
        """Return the tokens and pixels of a sample. Replace a sample that turns out to be bad by a single token."""
        measured = sample.measured
        return self.sample_filter.encode_or_blank(lambda: measured, measured.conversation.sample_id)


class Qwen3VLTaskEncoder(MeasuringTaskEncoder):
    """Task encoder of energon that converts samples to `EnergonBatch`es, with rows packed by best fit, or padded.

    For energon's `get_train_dataset` and `get_val_dataset`. With `packing_buffer_size`, batch_size must be 1.
    """

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> ReadySample:
        """Return a sample with its pixels; raise SkipSample if it is dropped."""
        encoded = self.sample_filter.encode(lambda: sample.measured)
        if encoded is None:
            raise SkipSample
        return ReadySample.derive_from(sample, encoded=encoded)

    @stateless
    def pack_selected_samples(self, samples: list[ReadySample]) -> EnergonBatch:
        """Return one packed row; raise SkipSample if all of its samples have been dropped."""
        if not samples:
            raise SkipSample
        return self._lay_out(samples, self.collator.collate_packed([sample.encoded for sample in samples]))

    @stateless
    def batch(self, samples: list[Any]) -> EnergonBatch:
        """Return the packed row that `samples` contains, or a batch with one padded row for each sample."""
        if isinstance(samples[0], EnergonBatch):
            (row,) = samples
            return row
        return self._lay_out(samples, self.collator.collate_padded([sample.encoded for sample in samples]))

    def _lay_out(self, samples: Sequence[ReadySample], packed: TokenBatch) -> EnergonBatch:
        """Return a batch for energon, with the number of samples that this process dropped since its previous batch.

        `samples` are the samples of `packed`.
        """
        # Energon reads a buffer ahead, and does not read samples again that were dropped before.
        dropped = self.sample_filter.num_dropped
        new, self._counted = dropped - self._counted, dropped
        return EnergonBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=(),  # energon fills it in
            __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
            packed=replace(packed, newly_dropped=(new,) if new else ()),
        )


def _dataset_paths(datasets: Sequence[Any]) -> str:
    return ", ".join(str(path) for loaded in datasets for path in loaded.dataset.paths)


logger = logging.getLogger(__name__)

_PACKED_TOGETHER = 128
_ENERGON_SPLITS = {"train": "train", "valid": "val", "test": "test"}  # energon's names of splits
# Arguments of energon that our own settings replace, or that would decode media or end the data.
_RESERVED = {
    *("batch_size", "max_samples_per_sequence", "packing_buffer_size", "shuffle_buffer_size"),
    *("split_part", "task_encoder", "worker_config", "repeat", "handler", "decoder"),
    *("auto_decode", "image_decode", "av_decode", "video_decode_audio"),
}
_TRAINING_ARGUMENTS = ("virtual_epoch_length", "shuffle_over_epochs_multiplier", "batch_drop_last")
_RANK_ENTRIES = {"worker_config", "slice_offsets", "len"}  # keys of energon's description that differ between ranks


@dataclass(kw_only=True)
class Qwen3VLEnergonProvider(ConversationSettings):
    """Dataset of conversations from WebDatasets prepared by energon. `ConversationSettings` has the other settings.

    Where Megatron-Bridge counts samples, it counts rows of this dataset. The class does not derive from
    `EnergonDatasetConfig`, because Megatron-Bridge creates task encoders for such classes, and knows only three kinds.

    Attributes:
        path: a folder with ".nv-meta", a JSONL file with energon's index, or a metadataset's YAML.
        micro_batch_size: rows of a microbatch, as `train.micro_batch_size`; 1 for packed rows.
        num_val_workers: processes that read validation data; None for `num_workers`.
        shuffle_buffer_size: size of each worker's shuffle buffer, in samples.
        max_samples_per_sequence: number of consecutive samples read before switching to another tar file; None for
            complete files.
        packing_buffer_size: number of samples per worker that are packed together and kept in memory; None for 128.
        do_validation: whether to provide a validation split.
        dataset_kwargs: additional arguments for energon's `get_train_dataset`, such as "split_config".
        seed: seed of the order of samples.
        sample_fps: frames per second of videos given as lists of frames without this value; None to raise for them.
        columns: column names of the data, where they differ from the default names (docs/data.md).
        dataloader_type: must be "external": energon has its own loaders.
    """

    ignored_settings: ClassVar[dict[str, Any]] = {**ConversationSettings.ignored_settings, "pin_memory": True}

    path: str
    micro_batch_size: int = 1
    num_val_workers: int | None = None
    shuffle_buffer_size: int = 100
    max_samples_per_sequence: int | None = None
    packing_buffer_size: int | None = None
    do_validation: bool = True
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    sample_fps: float | None = None
    columns: Columns = field(default_factory=Columns)
    dataloader_type: Any = "external"

    def finalize(self) -> None:
        """Check what can be checked without reading data; raise ValueError for invalid or ignored settings."""
        if self.num_workers and not self.persistent_workers:
            raise ValueError("persistent_workers is False, expected True: energon's workers always persist")
        super().finalize()
        if self.dataloader_type != "external":
            raise ValueError(
                f"dataloader_type is {self.dataloader_type!r}, expected 'external': energon has its own loaders"
            )
        self.check_minimum(micro_batch_size=1, shuffle_buffer_size=1, max_samples_per_sequence=1, packing_buffer_size=1)
        self.check_minimum(num_workers=0, num_val_workers=0, seed=0)
        if self.sample_fps is not None and not self.sample_fps > 0:
            raise ValueError(f"sample_fps is {self.sample_fps!r}, expected a positive number or None")
        self.columns.check()
        if self.pack and self.micro_batch_size != 1:
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size}, expected 1 with packing: increase seq_length instead"
            )
        if not self.pack and self.packing_buffer_size is not None:
            raise ValueError(
                f"packing_buffer_size is {self.packing_buffer_size}, but pack is off; remove it, or turn pack on"
            )
        validate_declarative_mapping(self.dataset_kwargs, field_name="dataset_kwargs")
        if taken := _RESERVED & self.dataset_kwargs.keys():
            raise ValueError(
                f"dataset_kwargs sets {', '.join(sorted(taken))}: remove these keys, and use the settings of the "
                "dataset instead; energon does not decode media here"
            )

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[EnergonStream | None, Iterator[TokenBatch] | None, None]:
        """Return (training, validation, None): endless batches for Megatron-Bridge's loop, which saves the position."""
        groups = context.pg_collection
        rows = self if groups is None else self.for_context_parallel(groups.cp.size())
        dp_rank, dp_size = (0, 1) if groups is None else (groups.dp.rank(), groups.dp.size())
        train = valid = None
        if context.train_samples > 0:
            train = EnergonStream(rows, "train", dp_rank, dp_size, groups)
            self.record_position(train.fingerprint())
        if self.do_validation and context.valid_samples > 0:
            if self.rows_of_evaluation is None:
                valid = EnergonStream(rows, "valid", dp_rank, dp_size, groups)
            else:
                valid = rows._repeat_evaluation(self.rows_of_evaluation, dp_rank, dp_size)
        return train, valid, None

    def _repeat_evaluation(self, num_rows: int, dp_rank: int, dp_size: int) -> Iterator[TokenBatch]:
        """Yield the microbatches of endless evaluations, which are all equal. Each evaluation has `num_rows` rows.

        If the split is shorter than an evaluation, its last batch is repeated without a loss.
        """
        while True:
            passed = self.evaluation("valid", dp_rank=dp_rank, dp_size=dp_size)
            batch = next(passed)
            for _ in range(num_rows // (dp_size * self.micro_batch_size)):
                yield batch
                batch = next(passed, None) or replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))

    def stream(self, split: str, *, dp_rank: int = 0, dp_size: int = 1) -> EnergonStream:
        """Return endless microbatches of "train" or "valid" for a custom loop.

        Save the result of `EnergonStream.save_state` of each rank with checkpoints.
        """
        check_dp_rank(dp_rank, dp_size)
        if split not in ("train", "valid"):
            raise ValueError(f"found the split {split!r}, expected 'train' or 'valid': other splits have no stream")
        return EnergonStream(self, split, dp_rank, dp_size)

    def evaluation(self, split: str, *, dp_rank: int = 0, dp_size: int = 1) -> Iterator[TokenBatch]:
        """Yield the microbatches of one rank in a single pass over a split: "train", "valid" or "test".

        Each rank reads all samples, but computes pixels only for its own rows. Every rank gets the same number of
        microbatches: if the rows do not divide evenly, the last row is repeated without a loss.
        """
        check_dp_rank(dp_rank, dp_size)
        if split not in _ENERGON_SPLITS:
            raise ValueError(f"found the split {split!r}, expected {' or '.join(map(repr, _ENERGON_SPLITS))}")
        encoder, num_workers = self._task_encoder(MeasuringTaskEncoder), self.num_val_workers
        with _add_path_to_error(self.path):
            dataset = get_val_dataset(
                self.path,
                split_part=_ENERGON_SPLITS[split],
                worker_config=WorkerConfig(
                    rank=0, world_size=1, num_workers=self.num_workers if num_workers is None else num_workers
                ),
                batch_size=None,  # pyright: ignore[reportArgumentType]  (energon's own check for it)
                task_encoder=encoder,
                **{name: value for name, value in self.dataset_kwargs.items() if name not in _TRAINING_ARGUMENTS},
            )
        samples: Iterator[MeasuredSample] = iter(self._ignore_signal(get_loader(dataset)))
        rows = ([sample] for sample in samples)
        if self.pack:
            windows = batched(samples, self.packing_buffer_size or _PACKED_TOGETHER)
            rows = (row for window in windows for row in encoder.select_samples_to_pack(list(window)))

        def encode(rows: Sequence[list[MeasuredSample]]) -> TokenBatch:
            encoded = [encoder.encode_or_blank(sample) for row in rows for sample in row]
            return encoder.collator.collate_packed(encoded) if self.pack else encoder.collator.collate_padded(encoded)

        return iterate_one_pass(rows, encode, dp_rank, dp_size, self.micro_batch_size)

    def _task_encoder[Kind: MeasuringTaskEncoder](
        self, kind: type[Kind], counter: Callable[[DropReason], int] | None = None
    ) -> Kind:
        sample_filter = self.sample_filter().with_counter(counter) if counter else self.sample_filter()
        return kind(sample_filter, self.collator(), sample_fps=self.sample_fps, columns=self.columns)

    def loader(self, split: str, dp_rank: int, dp_size: int, groups: Any = None) -> WebDatasetLoader:
        """Return energon's loader of "train" or "valid" for one data-parallel rank, wrapped for Megatron-Bridge."""
        # Count dropped samples over the processes of a machine, so that only the first ones are named in the log.
        counter = make_drop_counter({"path": self.path, "split": split}, groups)
        num_workers = self.num_val_workers if split == "valid" else None
        workers = WorkerConfig(
            rank=dp_rank,
            world_size=dp_size,
            num_workers=self.num_workers if num_workers is None else num_workers,
            data_parallel_group=None if groups is None else groups.dp,
            seed_offset=self.seed,
        )
        with _add_path_to_error(self.path):
            dataset = get_train_dataset(
                self.path,
                split_part=_ENERGON_SPLITS[split],
                worker_config=workers,
                batch_size=self.micro_batch_size,
                task_encoder=self._task_encoder(Qwen3VLTaskEncoder, counter),
                packing_buffer_size=(self.packing_buffer_size or _PACKED_TOGETHER) if self.pack else None,
                shuffle_buffer_size=self.shuffle_buffer_size,
                max_samples_per_sequence=self.max_samples_per_sequence,
                **self.dataset_kwargs,
            )
            return WebDatasetLoader(self._ignore_signal(get_savable_loader(dataset, worker_config=workers)))

    def _ignore_signal(self, loader: Any) -> Any:
        """Make the workers of a loader ignore the signal `ignored_signal`, and return the loader.

        Megatron-Bridge does this only for its own loaders.
        """
        loader.worker_init_fn = make_worker_init(self.ignored_signal, loader.worker_init_fn)
        return loader

    def fingerprint(self, loader: WebDatasetLoader, dp_size: int) -> dict[str, Any]:
        """Return the data and settings that must not change for a saved position of a loader to stay valid."""
        return {
            "data": add_schema_name(_config_digest(loader.source.config()["dataset"]), self.columns),
            "ranks": dp_size,
            "workers": self.num_workers,
            "rows a microbatch": self.micro_batch_size,
            "seed": self.seed,
            "multiple": self.multiple,
            "sample_fps": self.sample_fps,
            **self.sample_filter().fingerprint(),
        }


@contextmanager
def _add_path_to_error(path: str) -> Iterator[None]:
    """Convert energon's errors in the `with` block to DataError with the path of the data."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, AssertionError, KeyError, TypeError) as error:
        found = f"energon cannot read it: {type(error).__name__}: {error}"
        raise DataError(path, f"{found}; expected a folder that 'energon prepare' has been run on") from error


def _config_digest(config: Any) -> str:
    """Return a short hash of energon's description of a dataset, without paths and other values that may change."""

    def steady(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {key: steady(inner) for key, inner in value.items() if key[0] != "_" and key not in _RANK_ENTRIES}
            return {**kept, **{key: sorted(kept[key]) for key in ("sample_excludes",) if key in kept}}
        return [steady(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    return hashlib.sha256(json.dumps(steady(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


class WebDatasetLoader(EnergonDataloader):
    """Megatron-Bridge's wrapper of energon's data loader. The attribute `source` is energon's loader."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.source = source


class EnergonStream(Iterator[TokenBatch]):
    """Endless iterator over the microbatches of one data-parallel rank."""

    def __init__(
        self, provider: Qwen3VLEnergonProvider, split: str, dp_rank: int, dp_size: int, groups: Any = None
    ) -> None:
        """Start at the first sample of a split ("train" or "valid"). `groups` are Megatron's process groups."""
        self._make_loader = partial(provider.loader, split, dp_rank, dp_size, groups)
        self._loader, self._begun = self._make_loader(), False
        self._fingerprint = provider.fingerprint(self._loader, dp_size)

    def __next__(self) -> TokenBatch:
        """Return the next microbatch; raise DataError if a sample cannot be trained on."""
        self._begun = True
        try:
            batch = next(self._loader)
        except DataError as error:
            raise error.without_traceback() from None
        return batch.packed

    def fingerprint(self) -> dict[str, Any]:
        """Return the data and settings that must not change for a saved position to stay valid."""
        return dict(self._fingerprint)

    def save_state(self) -> Any:
        """Return energon's state of this rank. Megatron-Bridge's checkpoints store it in one file per rank."""
        return self._loader.save_state()

    def restore_state(self, state: Any) -> None:
        """Continue from a state of `save_state`; raise ValueError if it is from a stream with other settings."""
        if self._begun:
            self._loader, self._begun = self._make_loader(), False
        try:
            self._loader.restore_state(state)
        except AssertionError as error:
            raise ValueError(f"energon rejects the position: {error}; use the settings of the saved run") from error
