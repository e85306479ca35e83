"""Energon's task encoder for Qwen3-VL: converts samples of a WebDataset to packed rows.

Samples that wait to be packed contain their files as stored, and are measured by the files' headers; pixels are
computed when a row is needed. Energon prints errors and continues; here they stop the run, unless `on_bad` or `on_long`
is set to drop such samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.energon.records import COOKERS, conversation_in, keep_bytes, name_files, place_of
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.packing.row_plan import best_fit
from qwen3vl_bridge.data.samples import MeasuredConversation, SampleFilter
from qwen3vl_bridge.data.schemas.record_schemas import Schema

from megatron.energon import (
    Batch,
    Sample,
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    edataclass,
    stateless,
)
from megatron.energon.flavors.webdataset.field_access import FieldAccessError


@edataclass
class MeasuredSample(Sample):
    """A sample that waits to be packed.

    Attributes:
        measured: the conversation, with media as bytes, and its size.
    """

    measured: MeasuredConversation


@edataclass
class ReadySample(Sample):
    """A sample with its pixels.

    Attributes:
        encoded: the encoded sample.
    """

    encoded: EncodedSample


@edataclass
class EnergonBatch(Batch):
    """A microbatch with the keys from which energon restores batches.

    Attributes:
        packed: the input of a training step.
    """

    packed: PackedBatch

    def pin_memory(self) -> EnergonBatch:
        """A copy in page-locked memory; called by energon's loaders if CUDA is available."""
        return replace(self, packed=self.packed.pin_memory())


class MeasuringTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Samples with their sizes, in energon's order."""

    decoder = None  # media stay bytes
    cookers = COOKERS

    def __init__(
        self, sample_filter: SampleFilter, *, sample_fps: float | None = None, columns: Schema | None = None
    ) -> None:
        """Set the filter and how records are read.

        Args:
            sample_filter: decides which samples are used.
            sample_fps: frames per second of videos given as frames without a rate; None to refuse them.
            columns: mapping of the column names of crude folders, if they differ from ours.
        """
        self.sample_filter, self._sample_fps, self._columns = sample_filter, sample_fps, columns
        self._num_samples = self._left_out = 0

    def build_train_datasets(self, *, datasets: Any, worker_config: WorkerConfig, **settings: Any) -> Any:
        """Energon's hook; see `_prepare`.

        Raises:
            DataError: also if a worker would have no samples, because energon would loop over its part forever.
        """
        self._prepare(datasets, worker_config)
        ranks, workers = worker_config.world_size, max(1, worker_config.num_workers)
        if self._num_samples < ranks * workers:
            expected = f"expected at least {ranks * workers}: one for each of {ranks} ranks x {workers} workers"
            raise DataError(_places(datasets), f"found {self._num_samples} samples, {expected}")
        built = super().build_train_datasets(datasets=datasets, worker_config=worker_config, **settings)
        name_files(built)
        return built

    def build_val_datasets(self, *, datasets: Any, worker_config: WorkerConfig, **settings: Any) -> Any:
        """Energon's hook; see `_prepare`."""
        self._prepare(datasets, worker_config)
        built = super().build_val_datasets(datasets=datasets, worker_config=worker_config, **settings)
        name_files(built)
        return built

    def _prepare(self, datasets: Sequence[Any], worker_config: WorkerConfig) -> None:
        """Keep media as bytes, and raise errors: energon's own handler prints them and takes the next sample."""
        for loaded in datasets:
            if loaded.aux:
                found = f"found auxiliary data ({', '.join(loaded.aux)})"
                raise DataError(_places([loaded]), f"{found}, expected media in the tars")
            keep_bytes(loaded.dataset)
        worker_config.global_error_handler = self._handle
        self._num_samples = sum(_num_samples(loaded.dataset) for loaded in datasets)

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
        """A sample with its size.

        Raises:
            DataError: the sample is bad or too long, and the filter does not drop such samples.
            SkipSample: the sample is dropped and counted.
        """
        read = partial(conversation_in, sample, self._sample_fps, self._columns)
        measured = self.sample_filter.measure(read, place_of(sample))
        if measured is None:
            self._skip(sample)
        self._left_out = 0
        return MeasuredSample.derive_from(sample, measured=measured)

    def _skip(self, sample: Sample) -> None:
        self._left_out += 1
        if self._left_out > self._num_samples:  # training would loop over the data forever
            raise DataError(
                place_of(sample), f"found {self._left_out} samples in a row that were dropped, expected a usable one"
            )
        raise SkipSample


class Qwen3VLTaskEncoder(MeasuringTaskEncoder):
    """Converts samples to `EnergonBatch`es: rows packed by best fit, or padded.

    For energon's `get_train_dataset` and `get_val_dataset`. With `packing_buffer_size`, batch_size has to be 1.
    """

    def __init__(
        self,
        sample_filter: SampleFilter,
        collator: Collator,
        *,
        sample_fps: float | None = None,
        columns: Schema | None = None,
    ) -> None:
        """Set the filter, the collator and how records are read.

        Args:
            sample_filter: decides which samples are used.
            collator: makes rows of samples.
            sample_fps: as for `MeasuringTaskEncoder`.
            columns: as for `MeasuringTaskEncoder`.
        """
        super().__init__(sample_filter, sample_fps=sample_fps, columns=columns)
        self.collator, self._counted = collator, 0

    def select_samples_to_pack(self, samples: list[MeasuredSample]) -> list[list[MeasuredSample]]:
        """Assign samples to rows, by tokens and patches. No sample is left over, because energon would lose it."""
        sizes = [sample.measured.size.padded(self.collator.multiple) for sample in samples]
        lengths, patches = [size.tokens for size in sizes], [size.patches for size in sizes]
        rows = best_fit(lengths, self.collator.seq_length, patches, self.sample_filter.most_patches)
        return [[samples[number] for number in row] for row in rows]

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> ReadySample:
        """A sample with its pixels.

        Raises:
            DataError: the sample cannot be encoded, and the filter does not drop such samples.
            SkipSample: the sample is dropped and counted.
        """
        encoded = self.sample_filter.encode(lambda: sample.measured)
        if encoded is None:
            raise SkipSample
        return ReadySample.derive_from(sample, encoded=encoded)

    @stateless
    def pack_selected_samples(self, samples: list[ReadySample]) -> EnergonBatch:
        """One packed row.

        Raises:
            SkipSample: all samples of the row have been dropped.
        """
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

    def _laid_out(self, samples: Sequence[ReadySample], packed: PackedBatch) -> EnergonBatch:
        """A batch with the number of samples that this process has dropped since its previous batch.

        Energon reads a buffer ahead, so a sample is counted in the first batch after it. A resumed stream starts at 0,
        because energon does not read samples again that were dropped before.
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


def _num_samples(dataset: Any) -> int:
    """Number of samples of all ranks, in the subset that a metadataset uses."""
    start, end = 0, len(dataset)
    if dataset.subset is not None:
        start, end = dataset.subset.compute_subset(end)
    return end - start
