"""WebDatasets as a Megatron-Bridge dataset, read by energon.

Energon gives each data-parallel rank its own part of the samples, with a separate position.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import batched
from typing import Any, ClassVar

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.data.dataset_provider import ConversationRows
from qwen3vl_bridge.data.energon.task_encoder import MeasuredSample, MeasuringTaskEncoder, Qwen3VLTaskEncoder
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.loading.batch_stream import check_position, check_share, ignoring, share_of_pass
from qwen3vl_bridge.data.packing.sample_sizes import Left, notes_of_job
from qwen3vl_bridge.data.schemas.record_schemas import Columns, marked, one_schema

import torch
from megatron.bridge.data.base import DatasetBuildContext, validate_declarative_mapping
from megatron.bridge.data.energon.base_energon_datamodule import EnergonDataloader
from megatron.bridge.utils.safe_pickle import energon_torch_load
from megatron.energon import WorkerConfig, get_loader, get_savable_loader, get_train_dataset, get_val_dataset

logger = logging.getLogger(__name__)

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
        if taken := [f"{name} (set {_TAKEN[name]})" for name in self.dataset_kwargs if name in _TAKEN]:
            raise ValueError(f"dataset_kwargs has {', '.join(taken)}, expected none of them")

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

    def stream(
        self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int | None = None
    ) -> EnergonStream:
        """Microbatches of "train" or "valid" without end, for a custom training loop. Its `state_dict` belongs in the
        checkpoint. `micro_batch_size` can only be the dataset's own.
        """
        self._check_share(dp_rank, dp_size, micro_batch_size)
        if split not in ("train", "valid"):
            raise ValueError(f"found the split {split!r}, expected 'train' or 'valid': others have no stream")
        return EnergonStream(self, split, dp_rank, dp_size)

    def evaluation(
        self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int | None = None
    ) -> Iterator[TokenBatch]:
        """Every sample of a split ("test", too) once, with the same number of microbatches on every rank.

        Each rank reads all samples, but computes pixels only for its own rows. If the number of rows is not divisible,
        the last row is repeated without a loss.
        """
        self._check_share(dp_rank, dp_size, micro_batch_size)
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

    def _check_share(self, dp_rank: int, dp_size: int, micro_batch_size: int | None) -> None:
        check_share(dp_rank, dp_size)
        if micro_batch_size not in (None, self.micro_batch_size):
            raise ValueError(
                f"found micro_batch_size {micro_batch_size}, expected the dataset's own, {self.micro_batch_size}"
            )

    def _task_encoder[Kind: MeasuringTaskEncoder](
        self, kind: type[Kind], note: Callable[[Left], int] | None = None
    ) -> Kind:
        sample_filter = self.sample_filter().noting(note) if note else self.sample_filter()
        return kind(sample_filter, self.collator(), sample_fps=self.sample_fps, columns=one_schema(None, self.columns))

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
            "data": marked(_digest(loader._dataloader.config()["dataset"]), one_schema(None, self.columns)),
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
        self._make_loader, self._dp_size = partial(provider.loader, split, dp_rank, dp_size, groups), dp_size
        self._loader, self._begun, self._given = self._make_loader(), False, 0
        self._fingerprint = provider.fingerprint(self._loader, dp_size)

    def __next__(self) -> TokenBatch:
        """The next microbatch; a `DataError` at a sample that cannot be trained on."""
        self._begun = True
        try:
            batch = next(self._loader)
        except DataError as error:
            raise error.without_traceback() from None
        self._given += 1
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

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream, for a checkpoint that one rank writes for all.

        Each of several ranks has only its own state, so only the number of batches, equal on all, is saved.
        """
        state = None
        if self._dp_size == 1:
            file = io.BytesIO()
            torch.save(self.save_state(), file)
            state = file.getvalue()
        return {"batches": self._given, "state": state, "data": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another stream's position (ValueError if it had other data, ranks or workers): directly on one
        rank, by rereading all earlier batches on several.
        """
        check_position(self._fingerprint, state["data"])
        if state["state"] is not None:
            file: Any = io.BytesIO(state["state"])
            self.restore_state(energon_torch_load(file))
            self._given = state["batches"]
            return
        self._loader, self._given = self._make_loader(), 0
        logger.info("reading %d batches again, to where the checkpoint stands", state["batches"])
        for _ in range(state["batches"]):
            next(self)
