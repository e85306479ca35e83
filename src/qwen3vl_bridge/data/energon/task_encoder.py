"""Energon's task encoder for Qwen3-VL: converts samples of a WebDataset to packed rows.

Crude folders (`CrudeWebdataset`, or a JSONL file) have a record of ours in the part "json", in which an image or a
video is the name of another part of the same sample. In Megatron-Bridge's ChatML folders (`ChatMLWebdataset`) images
stay bytes, which their own decoder converts to float tensors.

Samples that wait to be packed contain their files as stored, and are measured by the files' headers; pixels are
computed when a row is needed. Energon prints errors and continues; here they stop the run, unless `on_bad` or `on_long`
is set to drop such samples.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import tarfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import MediaAccess
from qwen3vl_bridge.data.packing.row_plan import best_fit
from qwen3vl_bridge.data.samples import MeasuredConversation, SampleFilter
from qwen3vl_bridge.data.schemas.conversations import Conversation, conversation_of
from qwen3vl_bridge.data.schemas.placeholders import RATE
from qwen3vl_bridge.data.schemas.record_schemas import Schema, read_by
from qwen3vl_bridge.io.parsing import parse_record

from megatron.energon import (
    Batch,
    Cooker,
    CrudeSample,
    DefaultCrudeJsonlDatasetFactory,
    DefaultDecoderWebdatasetFactory,
    Sample,
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    stateless,
)
from megatron.energon.flavors.jsonl.ijsonl_reader import IJsonlReader
from megatron.energon.flavors.webdataset.field_access import FieldAccessError
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset

RECORD = "json"
_CHATML = {"conversation", "imgs", "videos"}
_BESIDE_TURNS = ("system", "tools")
_PICKLE = b"\x80"  # no image or video file begins with this byte


@edataclass
class Parts(Sample):
    """A crude sample: contents of its files by extension."""

    parts: dict[str, Any]


@stateless
def _take_parts(sample: CrudeSample) -> Parts:
    """Collect the parts unchecked: errors are raised later, where the sample can be dropped."""
    parts = {name: value for name, value in sample.items() if not name.startswith("__")}
    return Parts(**basic_sample_keys(sample), parts=parts)


class _RecordsAlone:
    """Energon's decoder of ChatML folders: decodes records, because field maps may use their fields, but not media."""

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        decoded = dict(sample)
        for name in sample:
            if name.endswith(RECORD):
                with suppress(ValueError, TypeError):  # reported later, where the sample can be dropped
                    decoded[name] = parse_record(sample[name])
        return decoded

    def config(self) -> dict[str, Any]:
        return {"decoder": type(self).__name__}


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


def _conversation_of_sample(sample: Sample, sample_fps: float | None, columns: Schema | None) -> Conversation:
    """The conversation of `Parts` or a ChatML sample, with its media as bytes."""
    place = place_of(sample)
    if isinstance(sample, Parts):
        if RECORD not in sample.parts:
            found = ", ".join(sample.parts) or "none"
            raise DataError(place, f"found the parts {found}, expected {RECORD!r} among them")
        record = _decoded(sample.parts[RECORD], f"{place}: part {RECORD!r}")
        # Files by the names that a record may use: extensions, and full names with or without the folder in the tar.
        parts = {name: value for name, value in sample.parts.items() if name != RECORD}
        keys = {sample.__key__, sample.__key__.rpartition("/")[2]}
        files = {**{f"{key}.{name}": value for key in keys for name, value in parts.items()}, **parts}
    else:
        if columns is not None:
            raise DataError(place, f"found a schema {columns.name}, expected none: ChatML's own names are read")
        record, files = _chatml_record(sample, place), {}
    record = read_by(columns, record, place)
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


def _chatml_record(sample: Any, place: str) -> dict[str, Any]:
    """A ChatML sample as a record in our format, with media as bytes in separate keys."""
    if getattr(sample, "audio", None) is not None:
        raise DataError(place, "found audio, expected only images and videos")
    payload = _decoded(sample.conversation, f"{place}: 'conversation'")
    payload = payload if isinstance(payload, dict) else {"conversation": payload}
    names = ("conversations", "messages", "conversation")
    turns = next((payload[name] for name in names if payload.get(name) is not None), None)
    # Other keys about media contain file names from before they were added to the tar, so they are not read.
    record = {key: payload[key] for key in _BESIDE_TURNS if key in payload}
    record["messages"] = turns
    tools = getattr(sample, "tools", None)
    if tools is not None:
        record["tools"] = _decoded(tools, f"{place}: 'tools'")
    images, videos = (_media(getattr(sample, name), f"{place}: {name!r}") for name in ("imgs", "videos"))
    if any(isinstance(video, list) for video in videos):
        record[RATE] = payload.get(RATE)
    # Set even if empty: a placeholder without an image is an error in this format.
    return {**record, "images": images, "videos": videos}


def _media(value: Any, place: str) -> list[Any]:
    """The media of one file, or of the pickled list of files in ChatML folders."""
    if isinstance(value, bytes) and value.startswith(_PICKLE):
        try:
            value = _Plain(io.BytesIO(value)).load()
        except Exception as error:  # a damaged pickle raises anything
            raise DataError(place, f"found a pickle that does not load ({error}), expected lists of bytes") from error
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


class _Plain(pickle.Unpickler):
    """Loads only lists, numbers, strings and bytes; an unrestricted pickle can call any function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _decoded(value: Any, place: str) -> Any:
    """Decode JSON, unless it is already decoded."""
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return parse_record(value)
    except ValueError as error:
        raise DataError(place, f"found what is not valid JSON ({error})") from error


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
        columns: Schema | None = None,
    ) -> None:
        """Set the filter, the collator, and how records are read: the rate of lists of frames without one (frames per
        second; None to refuse them), and the column names of crude folders, if they differ from ours.
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
        """Keep media as bytes, of supported kinds, and raise errors: energon's own handler prints them and goes on."""
        for loaded in datasets:
            if loaded.aux:
                found = f"found auxiliary data ({', '.join(loaded.aux)})"
                raise DataError(_places([loaded]), f"{found}, expected media in the tars")
            dataset, kind = loaded.dataset, loaded.dataset.__sample_type__
            crude = issubclass(kind, CrudeSample)
            fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
            if isinstance(dataset, DefaultDecoderWebdatasetFactory) and (crude or fields >= _CHATML):
                # There is no public way to set it: ChatMLWebdataset ignores the decoder that it is given.
                dataset._decoder = None if crude else _RecordsAlone()  # pyright: ignore[reportAttributeAccessIssue]
            elif not (crude and isinstance(dataset, DefaultCrudeJsonlDatasetFactory)):
                found = f"found a {type(dataset).__name__} of {kind.__name__}"
                wanted = "expected a CrudeWebdataset or Megatron-Bridge's ChatMLWebdataset"
                raise DataError(_places([loaded]), f"{found}, {wanted}")
        worker_config.global_error_handler = self._handle
        # Of all ranks, in the subsets that a metadataset uses.
        every = [(loaded.dataset.subset, len(loaded.dataset)) for loaded in datasets]
        ranges = [subset.compute_subset(length) if subset else (0, length) for subset, length in every]
        self._num_samples = sum(end - start for start, end in ranges)

    def _handle(self, error: Exception, sample: Any, sources: Any = None) -> None:
        """Energon's handler of errors in any of its stages; if it returns, energon skips the sample."""
        if not isinstance(error, FieldAccessError):
            raise error
        (raw,) = sample.data
        found = ", ".join(name for name in raw if not name.startswith("__")) or "none"
        problem = f"found the parts {found}, expected all that the field_map of dataset.yaml names"
        self.sample_filter.refuse(DataError(f"{raw['__shard__']}:{raw['__key__']}", problem))

    @stateless
    def preencode_sample(self, sample: Sample) -> MeasuredSample:
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
