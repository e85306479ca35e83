"""WebDatasets as a Megatron-Bridge dataset, read by energon: samples, task encoders, the provider and its streams.

Energon gives each data-parallel rank its own part of the samples, with a separate position. Folders are crude
(`CrudeWebdataset`, or a JSONL file): a sample has a record of ours in the part "json", in which an image or a video is
the name of another part of the same sample.

Samples that wait to be packed contain their files as stored, and are measured by the files' headers; pixels are
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

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.dataset_provider import ConversationRows
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import MediaAccess
from qwen3vl_bridge.data.packing.row_plan import best_fit
from qwen3vl_bridge.data.packing.sample_sizes import Left, notes_of_job
from qwen3vl_bridge.data.row_loading import check_share, ignoring, share_of_pass
from qwen3vl_bridge.data.samples import MeasuredConversation, SampleFilter
from qwen3vl_bridge.data.schemas.conversations import Conversation, conversation_of
from qwen3vl_bridge.data.schemas.placeholders import RATE
from qwen3vl_bridge.data.schemas.record_schemas import OURS, Columns, marked
from qwen3vl_bridge.io.parsing import parse_record

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

RECORD = "json"


@edataclass
class Parts(Sample):
    """A crude sample: contents of its files by extension."""

    parts: dict[str, Any]


@stateless
def _take_parts(sample: CrudeSample) -> Parts:
    """Collect the parts unchecked: errors are raised later, where the sample can be dropped."""
    parts = {name: value for name, value in sample.items() if not name.startswith("__")}
    return Parts(**basic_sample_keys(sample), parts=parts)


class _Named:
    """One of energon's sample readers, with the path of the file in its errors."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getitem__(self, index: int) -> Any:
        try:
            return self._reader[index]
        except (OSError, ValueError, AssertionError, IndexError, tarfile.TarError) as error:
            found, reader = f"energon does not read a sample of it: {type(error).__name__}: {error}", self._reader
            if isinstance(reader, IJsonlReader):
                file = reader.jsonl_path
            else:
                file = reader.shard_infos[bisect_right(reader.shard_count_cumsum, index) - 1].path
            raise DataError(str(file), f"{found}; expected it as 'energon prepare' found it") from error


def name_files(dataset: Any) -> Any:
    """Make a built dataset's errors name the file that it cannot read, with its folder, including errors in workers."""
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        dataset.join_readers = [_Named(reader) for reader in dataset.join_readers]  # pyright: ignore[reportAttributeAccessIssue]
    for inner in getattr(dataset, "datasets", ()):
        name_files(inner)
    return dataset


def place_of(sample: Sample) -> str:
    """Tar and key, for messages."""
    return ":".join([*(source.shard_name for source in (sample.__sources__ or ())[:1]), str(sample.__key__)])


def _conversation_of_sample(sample: Parts, sample_fps: float | None, columns: Columns) -> Conversation:
    """A sample's conversation, with its media as bytes."""
    place = place_of(sample)
    if RECORD not in sample.parts:
        found = ", ".join(sample.parts) or "none"
        raise DataError(place, f"found the parts {found}, expected {RECORD!r} among them")
    record = sample.parts[RECORD]
    if isinstance(record, (str, bytes)):
        try:
            record = parse_record(record)
        except ValueError as error:
            raise DataError(f"{place}: part {RECORD!r}", f"found what is not valid JSON ({error})") from error
    # Files by the names that a record may use: extensions, and full names with or without the folder in the tar.
    parts = {name: value for name, value in sample.parts.items() if name != RECORD}
    keys = {sample.__key__, sample.__key__.rpartition("/")[2]}
    files = {**{f"{key}.{name}": value for key in keys for name, value in parts.items()}, **parts}
    record = columns.messages_of(record, place)
    if sample_fps is not None:
        _set_rate(record, sample_fps)
    return conversation_of(record, place, MediaAccess(parts=files))


def _set_rate(record: Any, sample_fps: float) -> None:
    """Set the rate of lists of frames that have none. Invalid messages and parts are refused later."""
    messages = record.get("messages") if isinstance(record, dict) else None
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(part.get("video"), list) and part.get(RATE) is None:
                part[RATE] = sample_fps


@edataclass
class MeasuredSample(Sample):
    """A sample that waits to be packed: the conversation, with media as bytes, and its size."""

    measured: MeasuredConversation


@edataclass
class ReadySample(Sample):
    """A sample with its pixels."""

    encoded: EncodedSample


@edataclass
class EnergonBatch(Batch):
    """A microbatch with the keys from which energon restores batches."""

    packed: TokenBatch

    def pin_memory(self) -> EnergonBatch:
        """A copy in page-locked memory; called by energon's loaders if CUDA is available."""
        return replace(self, packed=self.packed.pin_memory())


class MeasuringTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Samples with their sizes, in energon's order."""

    decoder = None  # media stay bytes
    cookers = (Cooker(_take_parts),)

    def __init__(
        self,
        sample_filter: SampleFilter,
        collator: Collator,
        *,
        sample_fps: float | None = None,
        columns: Columns = OURS,
    ) -> None:
        """Set the filter, the collator, and how records are read: the rate of lists of frames without one (frames per
        second; None to refuse them), and the names of columns, if they differ from ours.
        """
        self.sample_filter, self.collator = sample_filter, collator
        self._sample_fps, self._columns = sample_fps, columns
        self._num_samples = self._left_out = self._counted = 0

    def build_train_datasets(self, *, datasets: Any, worker_config: WorkerConfig, **settings: Any) -> Any:
        """Energon's hook. A worker without samples is refused: energon would loop over its part forever."""
        self._prepare(datasets, worker_config)
        ranks, workers = worker_config.world_size, max(1, worker_config.num_workers)
        if self._num_samples < ranks * workers:
            expected = f"expected at least {ranks * workers}: one for each of {ranks} ranks x {workers} workers"
            raise DataError(_places(datasets), f"found {self._num_samples} samples, {expected}")
        return name_files(super().build_train_datasets(datasets=datasets, worker_config=worker_config, **settings))

    def build_val_datasets(self, *, datasets: Any, worker_config: WorkerConfig, **settings: Any) -> Any:
        """Energon's hook."""
        self._prepare(datasets, worker_config)
        return name_files(super().build_val_datasets(datasets=datasets, worker_config=worker_config, **settings))

    def _prepare(self, datasets: Sequence[Any], worker_config: WorkerConfig) -> None:
        """Refuse what cannot be read, count the samples, and raise errors, which energon would print, and go on."""
        worker_config.global_error_handler = reraise_exception
        for loaded in datasets:
            if loaded.aux:
                found = f"found auxiliary data ({', '.join(loaded.aux)})"
                raise DataError(_places([loaded]), f"{found}, expected media in the tars")
            dataset, kind = loaded.dataset, loaded.dataset.__sample_type__
            if not issubclass(kind, CrudeSample):
                found = f"found a {type(dataset).__name__} of {kind.__name__}"
                raise DataError(_places([loaded]), f"{found}, expected a CrudeWebdataset")
        # Of all ranks, in the subsets that a metadataset uses.
        every = [(loaded.dataset.subset, len(loaded.dataset)) for loaded in datasets]
        ranges = [subset.compute_subset(length) if subset else (0, length) for subset, length in every]
        self._num_samples = sum(end - start for start, end in ranges)

    @stateless
    def preencode_sample(self, sample: Parts) -> MeasuredSample:
        """A sample with its size; `SkipSample` if it is dropped."""
        read = partial(_conversation_of_sample, sample, self._sample_fps, self._columns)
        measured = self.sample_filter.measure(read, place_of(sample))
        self._left_out = 0 if measured else self._left_out + 1
        if measured is not None:
            return MeasuredSample.derive_from(sample, measured=measured)
        if self._left_out > self._num_samples:  # training would loop over the data forever
            raise DataError(
                place_of(sample), f"found {self._left_out} samples in a row that were dropped, expected a usable one"
            )
        raise SkipSample

    def select_samples_to_pack(self, samples: list[MeasuredSample]) -> list[list[MeasuredSample]]:
        """Assign samples to rows, by tokens and patches. No sample is left over, because energon would lose it."""
        sizes = [sample.measured.size.padded(self.collator.multiple) for sample in samples]
        lengths, patches = [size.tokens for size in sizes], [size.patches for size in sizes]
        rows = best_fit(lengths, self.collator.seq_length, patches, self.sample_filter.most_patches)
        return [[samples[number] for number in row] for row in rows]

    def encode_or_blank(self, sample: MeasuredSample) -> EncodedSample:
        """A sample with its pixels; one that is dropped only at this stage is replaced by one token."""
        measured = sample.measured
        return self.sample_filter.encode_or_blank(lambda: measured, measured.conversation.sample_id)


class Qwen3VLTaskEncoder(MeasuringTaskEncoder):
    """Converts samples to `EnergonBatch`es: rows packed by best fit, or padded.

    For energon's `get_train_dataset` and `get_val_dataset`. With `packing_buffer_size`, batch_size has to be 1.
    """

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> ReadySample:
        """A sample with its pixels; `SkipSample` if it is dropped."""
        encoded = self.sample_filter.encode(lambda: sample.measured)
        if encoded is None:
            raise SkipSample
        return ReadySample.derive_from(sample, encoded=encoded)

    @stateless
    def pack_selected_samples(self, samples: list[ReadySample]) -> EnergonBatch:
        """One packed row; `SkipSample` if all of its samples have been dropped."""
        if not samples:
            raise SkipSample
        return self._laid_out(samples, self.collator.packed([sample.encoded for sample in samples]))

    @stateless
    def batch(self, samples: list[Any]) -> EnergonBatch:
        """A packed row unchanged, or a padded row for each sample."""
        if isinstance(samples[0], EnergonBatch):
            (row,) = samples
            return row
        return self._laid_out(samples, self.collator.padded([sample.encoded for sample in samples]))

    def _laid_out(self, samples: Sequence[ReadySample], packed: TokenBatch) -> EnergonBatch:
        """A batch with the number of samples that this process has dropped since its previous batch: energon reads a
        buffer ahead, and does not read samples again that were dropped before.
        """
        dropped = self.sample_filter.num_dropped
        new, self._counted = dropped - self._counted, dropped
        return EnergonBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=(),  # energon fills it in
            __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
            packed=replace(packed, newly_dropped=(new,) if new else ()),
        )


def _places(datasets: Sequence[Any]) -> str:
    return ", ".join(str(path) for loaded in datasets for path in loaded.dataset.paths)


logger = logging.getLogger(__name__)

_PACKED_TOGETHER = 128
_PARTS = {"train": "train", "valid": "val", "test": "test"}  # energon's names of splits
# Arguments of energon's that other settings stand for, or that would decode media or end the data.
_TAKEN = {
    *("batch_size", "max_samples_per_sequence", "packing_buffer_size", "shuffle_buffer_size"),
    *("split_part", "task_encoder", "worker_config", "repeat", "handler", "decoder"),
    *("auto_decode", "image_decode", "av_decode", "video_decode_audio"),
}
_OF_TRAINING = ("virtual_epoch_length", "shuffle_over_epochs_multiplier", "batch_drop_last")
_OF_A_RANK = {"worker_config", "slice_offsets", "len"}  # entries of energon's descriptions that differ between ranks


@dataclass(kw_only=True)
class Qwen3VLEnergonProvider(ConversationRows):
    """Dataset of conversations from WebDatasets prepared by energon. `ConversationRows` has the other settings.

    A "sample" of Megatron-Bridge's counters is a row. It is no `EnergonDatasetConfig`: Megatron-Bridge makes the task
    encoder of those itself, of three kinds it knows.

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
        sample_fps: frames per second of videos given as lists of frames without this value; None to refuse them.
        columns: column names of the data, as in `Qwen3VLConversationProvider`.
        dataloader_type: "external": energon has its own loaders.
    """

    unheard: ClassVar[dict[str, Any]] = {**ConversationRows.unheard, "pin_memory": True}

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
        """Check what can be checked without reading data; a ValueError for invalid and ignored settings."""
        if self.num_workers and not self.persistent_workers:
            raise ValueError("persistent_workers is False, expected True: energon's workers always persist")
        super().finalize()
        if self.dataloader_type != "external":
            raise ValueError(f"dataloader_type is {self.dataloader_type!r}, expected 'external': energon has its own")
        self.check_least(micro_batch_size=1, shuffle_buffer_size=1, max_samples_per_sequence=1, packing_buffer_size=1)
        self.check_least(num_workers=0, num_val_workers=0, seed=0)
        if self.sample_fps is not None and not self.sample_fps > 0:
            raise ValueError(f"sample_fps is {self.sample_fps!r}, expected a positive number or None")
        self.columns.check()
        if self.pack and self.micro_batch_size != 1:
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size}, expected 1 where rows are packed: make the row longer"
            )
        if not self.pack and self.packing_buffer_size is not None:
            raise ValueError(
                f"packing_buffer_size is {self.packing_buffer_size}, but pack is off; it is for packed rows"
            )
        validate_declarative_mapping(self.dataset_kwargs, field_name="dataset_kwargs")
        if taken := _TAKEN & self.dataset_kwargs.keys():
            raise ValueError(
                f"dataset_kwargs has {', '.join(sorted(taken))}, expected none of them: the dataset has "
                "settings of its own for sizes, and media stay bytes"
            )

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[EnergonStream | None, Iterator[TokenBatch] | None, None]:
        """Batches of each split for Megatron-Bridge's loop, without end. Its checkpoints keep their position."""
        groups = context.pg_collection
        rows = self if groups is None else self.shared_by(groups.cp.size())
        dp_rank, dp_size = (0, 1) if groups is None else (groups.dp.rank(), groups.dp.size())
        train = valid = None
        if context.train_samples > 0:
            train = EnergonStream(rows, "train", dp_rank, dp_size, groups)
            self.note_position(train.fingerprint())
        if self.do_validation and context.valid_samples > 0:
            if self.rows_of_evaluation is None:
                valid = EnergonStream(rows, "valid", dp_rank, dp_size, groups)
            else:
                valid = rows._same_evaluations(self.rows_of_evaluation, dp_rank, dp_size)
        return train, valid, None

    def _same_evaluations(self, num_rows: int, dp_rank: int, dp_size: int) -> Iterator[TokenBatch]:
        """The same batches for each evaluation; a shorter split is filled with its last batch, without a loss."""
        while True:
            passed = self.evaluation("valid", dp_rank=dp_rank, dp_size=dp_size)
            batch = next(passed)
            for _ in range(num_rows // (dp_size * self.micro_batch_size)):
                yield batch
                batch = next(passed, None) or replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))

    def stream(self, split: str, *, dp_rank: int = 0, dp_size: int = 1) -> EnergonStream:
        """Microbatches of "train" or "valid" without end, for a custom training loop, whose checkpoints need each
        rank's `save_state`.
        """
        check_share(dp_rank, dp_size)
        if split not in ("train", "valid"):
            raise ValueError(f"found the split {split!r}, expected 'train' or 'valid': others have no stream")
        return EnergonStream(self, split, dp_rank, dp_size)

    def evaluation(self, split: str, *, dp_rank: int = 0, dp_size: int = 1) -> Iterator[TokenBatch]:
        """Every sample of a split ("test", too) once, with the same number of microbatches on every rank.

        Each rank reads all samples, but computes pixels only for its own rows. If the number of rows is not divisible,
        the last row is repeated without a loss.
        """
        check_share(dp_rank, dp_size)
        if split not in _PARTS:
            raise ValueError(f"found the split {split!r}, expected {' or '.join(map(repr, _PARTS))}")
        encoder, num_workers = self._task_encoder(MeasuringTaskEncoder), self.num_val_workers
        with _named(self.path):
            dataset = get_val_dataset(
                self.path,
                split_part=_PARTS[split],
                worker_config=WorkerConfig(
                    rank=0, world_size=1, num_workers=self.num_workers if num_workers is None else num_workers
                ),
                batch_size=None,  # pyright: ignore[reportArgumentType]  (energon's own check for it)
                task_encoder=encoder,
                **{name: value for name, value in self.dataset_kwargs.items() if name not in _OF_TRAINING},
            )
        samples: Iterator[MeasuredSample] = iter(self._undisturbed(get_loader(dataset)))
        rows = ([sample] for sample in samples)
        if self.pack:
            windows = batched(samples, self.packing_buffer_size or _PACKED_TOGETHER)
            rows = (row for window in windows for row in encoder.select_samples_to_pack(list(window)))

        def encode(rows: Sequence[list[MeasuredSample]]) -> TokenBatch:
            encoded = [encoder.encode_or_blank(sample) for row in rows for sample in row]
            return encoder.collator.packed(encoded) if self.pack else encoder.collator.padded(encoded)

        return share_of_pass(rows, encode, dp_rank, dp_size, self.micro_batch_size)

    def _task_encoder[Kind: MeasuringTaskEncoder](
        self, kind: type[Kind], note: Callable[[Left], int] | None = None
    ) -> Kind:
        sample_filter = self.sample_filter().noting(note) if note else self.sample_filter()
        return kind(sample_filter, self.collator(), sample_fps=self.sample_fps, columns=self.columns)

    def loader(self, split: str, dp_rank: int, dp_size: int, groups: Any = None) -> EnergonDataloader:
        """Energon's loader of "train" or "valid" for a data-parallel rank, in the form that Megatron-Bridge uses."""
        # The processes of a machine name the first samples that are dropped together.
        note = notes_of_job({"path": self.path, "split": split}, groups)
        num_workers = self.num_val_workers if split == "valid" else None
        workers = WorkerConfig(
            rank=dp_rank,
            world_size=dp_size,
            num_workers=self.num_workers if num_workers is None else num_workers,
            data_parallel_group=None if groups is None else groups.dp,
            seed_offset=self.seed,
        )
        with _named(self.path):
            dataset = get_train_dataset(
                self.path,
                split_part=_PARTS[split],
                worker_config=workers,
                batch_size=self.micro_batch_size,
                task_encoder=self._task_encoder(Qwen3VLTaskEncoder, note),
                packing_buffer_size=(self.packing_buffer_size or _PACKED_TOGETHER) if self.pack else None,
                shuffle_buffer_size=self.shuffle_buffer_size,
                max_samples_per_sequence=self.max_samples_per_sequence,
                **self.dataset_kwargs,
            )
            return EnergonDataloader(self._undisturbed(get_savable_loader(dataset, worker_config=workers)))

    def _undisturbed(self, loader: Any) -> Any:
        """One of energon's loaders, with the ignored signal; Megatron-Bridge's setting reaches only its own."""
        loader.worker_init_fn = ignoring(self.ignored_signal, loader.worker_init_fn)
        return loader

    def fingerprint(self, loader: EnergonDataloader, dp_size: int) -> dict[str, Any]:
        """What must be the same for a position of a loader to mean the same."""
        return {
            "data": marked(_digest(loader._dataloader.config()["dataset"]), self.columns),
            "ranks": dp_size,
            "workers": self.num_workers,
            "rows a microbatch": self.micro_batch_size,
            "seed": self.seed,
            "multiple": self.multiple,
            "sample_fps": self.sample_fps,
            **self.sample_filter().fingerprint(),
        }


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Add the folder to energon's error about a folder that it cannot read."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, AssertionError, KeyError, TypeError) as error:
        found = f"energon does not read it: {type(error).__name__}: {error}"
        raise DataError(path, f"{found}; expected a folder that 'energon prepare' has been run on") from error


def _digest(config: Any) -> str:
    """A short hash of energon's description of a dataset, without what may change, such as its path."""

    def steady(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {key: steady(inner) for key, inner in value.items() if key[0] != "_" and key not in _OF_A_RANK}
            return {**kept, **{key: sorted(kept[key]) for key in ("sample_excludes",) if key in kept}}
        return [steady(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    return hashlib.sha256(json.dumps(steady(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


class EnergonStream(Iterator[TokenBatch]):
    """Infinite stream of this rank's microbatches."""

    def __init__(
        self, provider: Qwen3VLEnergonProvider, split: str, dp_rank: int, dp_size: int, groups: Any = None
    ) -> None:
        """Start at the first sample of a split ("train" or "valid"); `groups` are those of Megatron's processes."""
        self._make_loader = partial(provider.loader, split, dp_rank, dp_size, groups)
        self._loader, self._begun = self._make_loader(), False
        self._fingerprint = provider.fingerprint(self._loader, dp_size)

    def __next__(self) -> TokenBatch:
        """The next microbatch; a `DataError` at a sample that cannot be trained on."""
        self._begun = True
        try:
            batch = next(self._loader)
        except DataError as error:
            raise error.without_traceback() from None
        return batch.packed

    def fingerprint(self) -> dict[str, Any]:
        """What has to be equal for a saved position to be valid."""
        return dict(self._fingerprint)

    def save_state(self) -> Any:
        """Energon's own state of this rank; Megatron-Bridge's checkpoints save it in one file per rank."""
        return self._loader.save_state()

    def restore_state(self, state: Any) -> None:
        """Continue from a state of `save_state`, in a stream with the same settings (ValueError)."""
        if self._begun:
            self._loader, self._begun = self._make_loader(), False
        try:
            self._loader.restore_state(state)
        except AssertionError as error:
            raise ValueError(
                f"energon refuses the position: {error}; expected the settings it was saved with"
            ) from error
