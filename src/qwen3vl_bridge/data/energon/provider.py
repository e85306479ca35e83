"""WebDatasets as a Megatron-Bridge dataset, through Megatron-Bridge's own energon data module.

It is no `EnergonDatasetConfig`: Megatron-Bridge makes the task encoder of those itself, of three kinds it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.energon.data_module import EnergonModule, digest, named
from qwen3vl_bridge.data.energon.stream import EnergonStream, Share, one_pass, repeated
from qwen3vl_bridge.data.energon.task_encoder import MeasuringTaskEncoder, Qwen3VLTaskEncoder
from qwen3vl_bridge.data.loading.worker_processes import ignoring
from qwen3vl_bridge.data.packing.sample_sizes import Left, notes_of_job
from qwen3vl_bridge.data.row_settings import ConversationRows
from qwen3vl_bridge.data.schemas.record_schemas import Columns, marked, one_schema

from megatron.bridge.data.base import DatasetBuildContext, validate_declarative_mapping
from megatron.bridge.utils.safe_pickle import energon_torch_load
from megatron.energon import WorkerConfig, get_loader, get_val_dataset

_PACKED_TOGETHER = 128
_PARTS = {"train": "train", "valid": "val", "test": "test"}  # energon's names of splits
# Arguments of energon's that other settings stand for, or that would decode media or end the data.
_TAKEN = {
    "batch_size": "micro_batch_size",
    "max_samples_per_sequence": "max_samples_per_sequence",
    "packing_buffer_size": "packing_buffer_size",
    "shuffle_buffer_size": "shuffle_buffer_size",
    **dict.fromkeys(("split_part", "task_encoder", "worker_config", "repeat", "handler", "decoder"), "nothing"),
    **dict.fromkeys(("auto_decode", "image_decode", "av_decode", "video_decode_audio"), "nothing: media stay bytes"),
}
_OF_TRAINING = ("virtual_epoch_length", "shuffle_over_epochs_multiplier", "batch_drop_last")


@dataclass(kw_only=True)
class Qwen3VLEnergonProvider(ConversationRows):
    """Dataset of conversations from WebDatasets prepared by energon. `ConversationRows` has the other settings.

    A "sample" of Megatron-Bridge's counters is a row.

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
        sample_fps: frames per second of videos given as lists of frames without this value, as in ChatML; None to
            refuse them.
        columns: column names of the data, as in `Qwen3VLConversationProvider`; for crude folders, because ChatML
            samples have fixed names.
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
        """Check what can be checked without reading data.

        Raises:
            ValueError: a setting with a value it cannot have, or that would be ignored.
        """
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
        if taken := [f"{name} (set {_TAKEN[name]})" for name in self.dataset_kwargs if name in _TAKEN]:
            raise ValueError(f"dataset_kwargs has {', '.join(taken)}, expected none of them")

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[EnergonStream | None, Iterator[PackedBatch] | None, None]:
        """Batches of each split for Megatron-Bridge's loop, without end. Its checkpoints keep their position.

        Raises:
            DataError: a folder that energon cannot read.
            ValueError: rows that the context-parallel ranks could not share.
        """
        train, valid = context.train_samples > 0, self.do_validation and context.valid_samples > 0
        groups = context.pg_collection
        rows = self if groups is None else self.shared_by(groups.cp.size())
        share = Share() if groups is None else Share(groups.dp.rank(), groups.dp.size())
        stream = rows._stream("train", Share(), groups) if train else None
        if stream is not None:
            self.note_position(stream.fingerprint() | {"ranks": share.size})
        return stream, rows._validation(share, groups) if valid else None, None

    def _validation(self, share: Share, groups: Any) -> Iterator[PackedBatch]:
        """The same batches for each evaluation, where it is known how many that are."""
        if self.rows_of_evaluation is None:
            return self._stream("valid", Share(), groups)
        batches = self.rows_of_evaluation // (share.size * self.micro_batch_size)
        return repeated(lambda: self.evaluation("valid", dp_rank=share.rank, dp_size=share.size), batches)

    def stream(
        self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int | None = None
    ) -> EnergonStream:
        """Microbatches without end, for a loop of ours. Its `state_dict` goes into the checkpoint.

        Args:
            split: "train" or "valid".
            dp_rank: this data-parallel rank.
            dp_size: how many there are.
            micro_batch_size: rows of a microbatch, as the dataset's own.

        Raises:
            ValueError: another split, another micro_batch_size, or a rank outside its group.
            DataError: a folder that energon cannot read.
        """
        share = Share(dp_rank, dp_size)
        share.check()
        self._check_share(micro_batch_size)
        return self._stream(split, share)

    def evaluation(
        self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int | None = None
    ) -> Iterator[PackedBatch]:
        """Every sample of a split once; arguments as for `stream`, and the split may be "test" too."""
        self._check_share(micro_batch_size)
        task_encoder, workers = self._task_encoder(), self.num_val_workers
        samples = get_loader(self._in_order(split, self.num_workers if workers is None else workers))
        return one_pass(
            iter(self._undisturbed(samples)),
            task_encoder,
            Share(dp_rank, dp_size),
            micro_batch_size=self.micro_batch_size,
            window_size=self._packing_buffer_size,
        )

    @property
    def _packing_buffer_size(self) -> int | None:
        return (self.packing_buffer_size or _PACKED_TOGETHER) if self.pack else None

    def _check_share(self, micro_batch_size: int | None) -> None:
        if micro_batch_size not in (None, self.micro_batch_size):
            raise ValueError(
                f"found micro_batch_size {micro_batch_size}, expected the dataset's own, {self.micro_batch_size}"
            )

    def _task_encoder(self, note: Callable[[Left], int] | None = None) -> Qwen3VLTaskEncoder:
        sample_filter, columns = self.sample_filter(), one_schema(None, self.columns)
        if note is not None:
            sample_filter = sample_filter.noting(note)
        return Qwen3VLTaskEncoder(sample_filter, self.collator(), sample_fps=self.sample_fps, columns=columns)

    def _stream(self, split: str, share: Share, groups: Any = None) -> EnergonStream:
        if split not in ("train", "valid"):
            raise ValueError(f"found the split {split!r}, expected 'train' or 'valid': others have no stream")
        # The processes of a machine name the first samples that are dropped together.
        note = notes_of_job({"path": self.path, "split": split}, groups)

        def make() -> Any:
            module = EnergonModule(
                self.path,
                seed=self.seed,
                share=share,
                pg_collection=groups,
                task_encoder=self._task_encoder(note),
                seq_length=self.seq_length,
                micro_batch_size=self.micro_batch_size,
                num_workers=self.num_workers,
                num_val_workers=self.num_val_workers,
                shuffle_buffer_size=self.shuffle_buffer_size,
                max_samples_per_sequence=self.max_samples_per_sequence,
                packing_buffer_size=self._packing_buffer_size,
                **self.dataset_kwargs,
            )
            with named(self.path):
                loader = module.train_dataloader() if split == "train" else module.val_dataloader()
            self._undisturbed(loader._dataloader)
            return loader

        return EnergonStream(make, lambda loader: self._fingerprint(loader, share), energon_torch_load, share)

    def _undisturbed(self, loader: Any) -> Any:
        """One of energon's loaders, with the ignored signal; Megatron-Bridge's setting reaches only its own."""
        loader.worker_init_fn = ignoring(self.ignored_signal, loader.worker_init_fn)
        return loader

    def _in_order(self, split: str, num_workers: int) -> Any:
        """Energon's dataset of a split's measured samples, each once."""
        if split not in _PARTS:
            raise ValueError(f"found the split {split!r}, expected {' or '.join(map(repr, _PARTS))}")
        arguments = {name: value for name, value in self.dataset_kwargs.items() if name not in _OF_TRAINING}
        with named(self.path):
            return get_val_dataset(
                self.path,
                split_part=_PARTS[split],
                worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
                batch_size=None,  # pyright: ignore[reportArgumentType]  (energon's own check for it)
                task_encoder=MeasuringTaskEncoder(
                    self.sample_filter(), sample_fps=self.sample_fps, columns=one_schema(None, self.columns)
                ),
                **arguments,
            )

    def _fingerprint(self, loader: Any, share: Share) -> dict[str, Any]:
        """What must be the same for a position in energon's stream to mean the same."""
        return {
            "data": marked(digest(loader._dataloader.config()["dataset"]), one_schema(None, self.columns)),
            "ranks": share.size,
            "workers": self.num_workers,
            "rows a microbatch": self.micro_batch_size,
            "seed": self.seed,
            "multiple": self.multiple,
            "sample_fps": self.sample_fps,
            **self.sample_filter().fingerprint(),
        }
