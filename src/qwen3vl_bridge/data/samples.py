"""Samples of a source: decide which conversations become samples, measure them, and encode them when a row is read.

When rows are packed during training, every process that plans rows needs the size of every sample: all ranks and all
their data-loading processes. The processes of a machine share their measurements in one temporary file per job. Its
first record contains the numbers of dropped and truncated samples, each other record the size of a sample. A process
locks a sample while it measures it; the kernel releases the lock if the process dies. The other processes measure other
samples of the window, and wait at the end for samples that are still being measured. The file is removed after the job,
so each job logs what it drops.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import functools
import hashlib
import logging
import os
import secrets
import struct
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from qwen3vl_bridge.data.collation import pad_token_id
from qwen3vl_bridge.data.conversations import Conversation
from qwen3vl_bridge.data.encoding import EncodedSample, Encoder, check_choice
from qwen3vl_bridge.data.errors import DataError, DataUnavailable, SampleSizeChanged
from qwen3vl_bridge.data.mixture import Mixture
from qwen3vl_bridge.data.packing import NOTHING, Size
from qwen3vl_bridge.data.sources import Conversations
from qwen3vl_bridge.upstream.stores import job_store

import torch

logger = logging.getLogger(__name__)

# Why a sample is left out: dropped, truncated ("cut"), or unreadable when its row was due.
DropReason = Literal["dropped", "cut", "unreadable"]

# A record of the shared file: the fields of a `Size`, and a checksum, because records are read while other processes
# write them. A record that was not written is all zeros, which have another checksum.
_RECORD, _FIELDS = struct.Struct("<4q"), struct.Struct("<3q")
_PREFIX = "qwen3vl_sizes_"
# A byte after all samples that every process locks while it has the file open; and the age in seconds from which on
# a file of no running process is removed.
_IN_USE, _OLD = 1 << 62, 3600
_NOTES = _IN_USE + 1  # locked while the first record, which contains the counts, is changed
_files: dict[Path, int] = {}  # opened by this process, and never closed: that would release all its locks on a file


class Sizes:
    """Cache of sample sizes in this process, by sample number. It keeps the `most` latest measurements.

    If the function `known` is given, it returns the size of every sample, and nothing is measured.
    """

    def __init__(self, most: int = 2**16, known: Callable[[int], Size] | None = None) -> None:
        self._most, self._known, self._kept, self._noted = most, known, dict[int, Size](), Counter[DropReason]()

    def get(self, sample: int) -> Size | None:
        """Return the size of a sample; None if it has not been measured."""
        return self._kept.get(sample) if self._known is None else self._known(sample)

    def store(self, sample: int, size: Size) -> None:
        """Store the measured size of a sample."""
        self._kept[sample] = size
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def lock(self, sample: int, *, wait: bool) -> AbstractContextManager[bool]:
        """Return a context manager that locks a sample while it is measured, and yields True if it got the lock.

        With `wait`, wait until another process that has the lock has measured the sample, or has died. Other processes
        do not use the sizes of this class, so there is no lock, and the context manager always yields True.
        """
        return nullcontext(True)

    def count_drop(self, kind: DropReason) -> int:
        """Count a sample that is left out for the reason `kind`, and return the count for this reason so far.

        If processes share the sizes, the number is over all of them.
        """
        self._noted[kind] += 1
        return self._noted[kind]


def open_shared_sizes(total: int, rules: Mapping[str, Any]) -> Sizes:
    """Return a cache of sample sizes that all processes of this job on this machine share, in a temporary file.

    Processes with equal `rules` share a cache, so `rules` must have everything that sizes depend on. If the file cannot
    be opened, this process measures every sample.
    """
    digest = hashlib.sha256(repr(sorted(rules.items())).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}_{_job()}_{digest}")
    try:
        _open_file(path)
    except OSError as error:
        logger.warning("%s: %s; cannot share the sizes of samples; each process measures every sample", path, error)
        return Sizes(total)
    return SharedSizes(path)


def make_drop_counter(rules: Mapping[str, Any], groups: Any = None) -> Callable[[DropReason], int]:
    """Return a function that counts dropped samples over all processes of this job on this machine.

    Use it for data that are divided over data-parallel ranks. Tensor-, context- and pipeline-parallel ranks read the
    same data, so only the first of them counts; on the others the function returns 0. Processes with equal `rules`
    share their counts. `groups` are Megatron's process groups, or None if there are none.
    """
    first = groups is None or groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0
    return open_shared_sizes(0, rules).count_drop if first else _count_nothing


def _count_nothing(kind: DropReason) -> int:
    return 0


class SharedSizes(Sizes):
    """Sample sizes in a file that all processes of a job open. Picklable, for data-loading workers."""

    def __init__(self, path: Path) -> None:
        super().__init__()  # fallback for sizes that cannot be written
        self._path = path

    def get(self, sample: int) -> Size | None:
        """Return the size of a sample; None if no process has measured it."""
        fields = self._read(1 + sample)
        return super().get(sample) if fields is None else Size(*fields)

    def _read(self, index: int) -> tuple[int, ...] | None:
        """Return the numbers in record `index` of the file; None if the record has not been written."""
        record = os.pread(_open_file(self._path), _RECORD.size, index * _RECORD.size)
        if len(record) < _RECORD.size:
            return None
        *fields, checksum = _RECORD.unpack(record)
        return tuple(fields) if checksum == zlib.crc32(record[: _FIELDS.size]) else None

    def _write(self, index: int, fields: Sequence[int]) -> None:
        record = _RECORD.pack(*fields, zlib.crc32(_FIELDS.pack(*fields)))
        os.pwrite(_open_file(self._path), record, index * _RECORD.size)

    def store(self, sample: int, size: Size) -> None:
        """Store the measured size of a sample for all processes."""
        try:
            self._write(1 + sample, size)
        except OSError as error:  # such as a full disk
            if not self._kept:
                logger.warning(
                    "%s: %s; cannot store the size of a sample; this process keeps its measurements in memory",
                    self._path,
                    error,
                )
            super().store(sample, size)

    @contextlib.contextmanager
    def lock(self, sample: int, *, wait: bool) -> Iterator[bool]:
        """Lock a sample in the file while it is measured, see `Sizes.lock`. Threads of a process share its locks."""
        file = _open_file(self._path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, sample)
        except OSError as error:
            # Another process has the lock; or the file system has no locks, and every process measures.
            yield error.errno not in (errno.EACCES, errno.EAGAIN)
            return
        try:
            yield True
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, sample)

    def count_drop(self, kind: DropReason) -> int:
        """Count a sample that is left out for the reason `kind`, and return the count for this reason so far.

        The number is over all processes of the job on this machine.
        """
        place = get_args(DropReason).index(kind)
        try:
            with self.lock(_NOTES, wait=True):
                noted = list(self._read(0) or (0,) * len(get_args(DropReason)))
                noted[place] += 1
                self._write(0, noted)
                return noted[place]
        except OSError:  # such as a full disk
            return super().count_drop(kind)


@functools.cache
def _job() -> str:
    """Return a random name of this job, equal in all processes joined by torch.distributed and in their workers."""
    name = secrets.token_hex(8)
    if torch.distributed.is_initialized():
        store = job_store()
        if store.add("qwen3vl_bridge/asked for the job's name", 1) == 1:
            store.set("qwen3vl_bridge/job", name)
        name = store.get("qwen3vl_bridge/job").decode()
    return name


def _open_file(path: Path) -> int:
    if path not in _files:
        _remove_left_over(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            _files[path] = os.open(path, flags | os.O_EXCL, 0o600)
            # Only at the end of this process, also if it is not a main process.
            Finalize(None, path.unlink, kwargs={"missing_ok": True}, exitpriority=0)
        except FileExistsError:
            _files[path] = os.open(path, flags, 0o600)
        fcntl.lockf(_files[path], fcntl.LOCK_SH, 1, _IN_USE)
    return _files[path]


def _remove_left_over(folder: Path) -> None:
    """Remove the files of sample sizes that killed jobs of this user left in a folder."""
    for path in folder.glob(f"{_PREFIX}{os.getuid()}_*"):
        with contextlib.suppress(OSError):  # another process was faster, or is using it
            if path in _files or time.time() - path.stat().st_mtime < _OLD:
                continue
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _IN_USE)
                path.unlink()
            finally:
                os.close(file)


OnLong = Literal["error", "drop", "truncate"]
OnBad = Literal["error", "drop"]

ON_BAD_ADVICE = " (dataset.on_bad=drop drops such records and counts them; `qwen3vl data inspect` lists all of them)"
_NAMED = 4
# Ranks that share a row each read it, so the count of unreadable samples is not a number of samples.
_LOG_TEXTS = {
    "dropped": "%s: dropped, %d so far",
    "cut": "%s: truncated, %d so far",
    "unreadable": "%s: replaced by one token without loss (%d so far)",
}


class MeasuredConversation(NamedTuple):
    """A conversation that becomes a sample, and the size of the sample."""

    conversation: Conversation
    size: Size


class SampleFilter:
    """Measure and encode conversations, and count dropped and truncated samples. Picklable, for workers.

    `num_dropped` and `num_truncated` are counts of this process. Counts in the log may include other processes
    (`with_counter`).
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        limit: int,
        most_patches: int | None = None,
        on_long: OnLong = "error",
        on_bad: OnBad = "error",
        multiple: int = 1,
    ) -> None:
        """Set which conversations become samples, and what happens to the others.

        Args:
            encoder: measures and encodes conversations.
            limit: maximum number of tokens of a sample.
            most_patches: maximum patches of the images and videos of a sample; None for no limit.
            multiple: if a sample has several documents, each is padded to a multiple of this number of tokens. The
                size of the sample includes this padding.
            on_long: what to do with a longer sample, or one with too many patches. "truncate" never truncates images.
            on_bad: what to do with a conversation that cannot be read or encoded. Dropped and truncated samples are
                logged.
        """
        check_choice("on_long", on_long, OnLong)
        check_choice("on_bad", on_bad, OnBad)
        self.encoder, self.limit, self.most_patches = encoder, limit, most_patches
        self.on_long, self.on_bad, self.multiple = on_long, on_bad, multiple
        self.document_tokens = 1
        self.num_dropped = self.num_truncated = 0
        self._counter = Sizes().count_drop

    def with_counter(self, counter: Callable[[DropReason], int]) -> SampleFilter:
        """Return a copy that counts with `counter`, such as `Sizes.count_drop`, which other processes may share."""
        shared = copy.copy(self)
        shared._counter = counter
        return shared

    def with_max_documents(self, most: int) -> SampleFilter:
        """Return a copy with a limit on the documents of a row.

        A document then counts as at least 1 / `most` of the tokens of a row, so that no more documents fit.
        """
        limited = copy.copy(self)
        limited.document_tokens = -(-self.limit // (most * self.multiple)) * self.multiple
        return limited

    def fingerprint(self) -> dict[str, int | str | None]:
        """Return the settings that decide which conversations become samples, and how they are encoded."""
        return {
            "seq_length": self.limit,
            "encoding": self.encoder.fingerprint,
            "most_patches": self.most_patches,
            "on_long": self.on_long,
            "on_bad": self.on_bad,
            **({} if self.document_tokens == 1 else {"document_tokens": self.document_tokens}),
        }

    def measure(self, read: Callable[[], Conversation], place: str) -> MeasuredConversation | None:
        """Return the conversation that `read` returns, with its size; None if it is dropped. `place` is its location.

        Of images, only headers are read.

        Raises:
            DataError: the conversation cannot be read and `on_bad` is "error", or is too long and `on_long` is "error".
        """
        try:
            conversation = read()
            size = self._total(self.encoder.size(document) for document in conversation.documents)
            num_tokens = size.tokens
            if num_tokens > self.limit and self.on_long == "truncate":
                size = self.encoder.size(conversation, self.limit)
        except DataError as error:
            return self.handle_error(error)
        if num_tokens > self.limit:
            documents, most = len(conversation.documents), self.limit // self.document_tokens
            if documents > most:
                problem = f"{place}: found {documents} documents, expected at most {most} (objective.max_documents)"
            else:
                problem = f"{place}: found a sample of {num_tokens} tokens, expected at most {self.limit}"
            if self.on_long == "error":
                truncate = ", truncate shortens it" if documents == 1 else ""
                raise DataError(f"{problem} (dataset.seq_length; dataset.on_long=drop drops the sample{truncate})")
            if self.on_long == "drop":
                return self._drop(problem)
            self.num_truncated += 1
            self._log("cut", problem)
        if self.most_patches is not None and size.patches > self.most_patches:
            problem = f"{place}: found images of {size.patches} patches, expected at most {self.most_patches}"
            if self.on_long == "error":
                raise DataError(f"{problem} (dataset.max_patches; dataset.on_long=drop drops the sample)")
            return self._drop(problem)
        return MeasuredConversation(conversation, size)

    def _total(self, sizes: Iterable[Size]) -> Size:
        """Return the sum of the sizes of a sample's documents, each with its padding.

        The plan of rows pads single documents. Here only the documents of a group are padded.
        """
        first, *others = sizes
        if not others and self.document_tokens == 1:
            return first
        padded = [size.padded(self.multiple) for size in (first, *others)]
        padded = [size._replace(tokens=max(size.tokens, self.document_tokens)) for size in padded]
        return Size(*map(sum, zip(*padded, strict=True)))

    def encode(self, read: Callable[[], MeasuredConversation], kind: DropReason = "dropped") -> EncodedSample | None:
        """Return the tokens and pixels of a sample; None if encoding finds an error and `on_bad` is "drop".

        For example, measuring does not detect a truncated image file. A dropped sample is counted under `kind`, which
        is "unreadable" if a blank token takes the sample's place in a row.

        Raises:
            DataError: the sample is bad and `on_bad` is "error", or its size differs from the measured size.
        """
        try:
            conversation, size = read()
            documents = [self.encoder(document, self.limit) for document in conversation.documents]
        except DataError as error:
            return self.handle_error(error, kind)
        sample = replace(documents[0], others=tuple(documents[1:]), is_desirable=conversation.is_desirable)
        tokens, patches, _ = self._total(Size(len(one), one.num_patches, 0) for one in documents)
        if (tokens, patches) != (size.tokens, size.patches):
            raise SampleSizeChanged(
                sample.sample_id,
                f"found {tokens} tokens and {patches} patches, but its row was packed for {size.tokens} tokens and "
                f"{size.patches} patches: the data changed. Restore them, or pack again",
            )
        return sample

    def encode_or_blank(self, read: Callable[[], MeasuredConversation], place: str) -> EncodedSample:
        """Return the tokens and pixels of a sample. If `encode` drops it, return a single token without loss instead.

        `place` is the `sample_id` of that token.
        """
        if sample := self.encode(read, "unreadable"):
            return sample
        token = torch.tensor([pad_token_id(self.encoder.processor.tokenizer)])
        return EncodedSample(token, token, torch.zeros(1), None, None, place)

    def handle_error(self, error: DataError, kind: DropReason = "dropped") -> None:
        """Drop a bad sample and count it for the reason `kind` if `on_bad` is "drop". Otherwise raise its error.

        SampleSizeChanged and DataUnavailable are always raised.
        """
        if isinstance(error, (SampleSizeChanged, DataUnavailable)):
            raise error
        if self.on_bad == "error":
            raise error.with_advice(ON_BAD_ADVICE) from error
        self._drop(str(error), kind)

    def _drop(self, problem: str, kind: DropReason = "dropped") -> None:
        self.num_dropped += 1
        self._log(kind, problem)

    def _log(self, kind: DropReason, problem: str) -> None:
        """Log a dropped or truncated sample.

        The first four samples are logged as warnings, and then one sample each time that the count has doubled. All
        other samples are logged at level DEBUG.
        """
        so_far = self._counter(kind)
        is_named = 0 < so_far <= _NAMED or so_far.bit_count() == 1
        logger.log(logging.WARNING if is_named else logging.DEBUG, _LOG_TEXTS[kind], problem, so_far)


class Samples:
    """The samples of a source of conversations, by sample number."""

    def __init__(
        self,
        source: Conversations,
        sample_filter: SampleFilter,
        sizes: Sizes | None = None,
        counter: Callable[[DropReason], int] | None = None,
        reference_logps: torch.Tensor | None = None,
    ) -> None:
        """Read the samples of a source of conversations.

        Args:
            source: the conversations.
            sample_filter: decides which conversations become samples.
            sizes: cache of measured sizes; None for a new one of this process alone.
            counter: counts dropped samples; None for `sizes.count_drop`.
            reference_logps: [samples, 2] float64, log-probabilities of the answers of pairs under a reference model.
        """
        self.reference_logps = reference_logps
        self.source = source
        self.total = len(source) if isinstance(source, Sized) else None  # None for a stream
        if sizes is None:
            sizes = Sizes() if self.total is None else Sizes(self.total)
        self._sizes = sizes
        self.sample_filter = sample_filter.with_counter(counter or self._sizes.count_drop)

    def set_index(self, index: int) -> int:
        """Return the index of the data set that contains a sample, if the source is a mixture; otherwise 0."""
        return self.source.set_index(index) if isinstance(self.source, Mixture) else 0

    def size(self, index: int) -> Size:
        """Return the size of a sample. A dropped sample has 0 tokens. Raises the errors of `SampleFilter.measure`."""
        size = self._measured(index, wait=True)
        assert size is not None  # `wait` is set
        return size

    def measure(self, indices: Iterable[int]) -> None:
        """Measure samples and store their sizes. Raises the errors of `size`.

        Skip samples that this or another process has measured, or that another process is measuring.
        """
        for index in indices:
            self._measured(index, wait=False)

    def _measured(self, index: int, *, wait: bool) -> Size | None:
        """Return the size of a sample; None while another process measures it, unless `wait` is set."""
        if (size := self._sizes.get(index)) is not None:
            return size
        with self._sizes.lock(index, wait=wait) as is_mine:
            if not is_mine:
                return None
            size = self._sizes.get(index)  # from the process that held the lock before
            if size is None:
                measured = self.sample_filter.measure(lambda: self.source[index], self.source.sample_id(index))
                size = NOTHING if measured is None else measured.size
                self._sizes.store(index, size)
            return size

    def encode(self, index: int) -> EncodedSample:
        """Return the tokens and pixels of a sample, and its `reference_logps` if there are any.

        The result for a dropped sample is a single token without loss (`encode_or_blank`).

        Raises:
            DataError: the sample is bad and is not dropped, or its `reference_logps` are missing.
        """
        sample = self.sample_filter.encode_or_blank(
            lambda: MeasuredConversation(self.source[index], self.size(index)), self.source.sample_id(index)
        )
        if self.reference_logps is None:
            return sample
        chosen, rejected = self.reference_logps[index].nan_to_num().tolist()
        if self.reference_logps[index].isnan().any() and not sample.is_blank:
            raise DataError(
                self.source.sample_id(index),
                "found no log-probabilities of the reference model: `qwen3vl data score` has left the record out. Run "
                "it with the row length, limits and other settings of this run",
            )
        return replace(sample, reference_logps=(chosen, rejected))
