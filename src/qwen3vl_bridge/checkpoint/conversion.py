"""Run a conversion: check, write to a staging folder, verify, and move the result into place."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from qwen3vl_bridge.checkpoint.conversion_plan import Plan
from qwen3vl_bridge.checkpoint.formats import output_files
from qwen3vl_bridge.checkpoint.formats.megatron import FORMATS
from qwen3vl_bridge.checkpoint.formats.output_files import Journal, OutputFile, Progress, Ranks, split_files
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, ByteRange, SliceReader, TensorSource, cast
from qwen3vl_bridge.checkpoint.stored_models import MANIFEST, TOOL, describe_tool, read_manifest
from qwen3vl_bridge.checkpoint.verification import compare_tensors, compute_checksums
from qwen3vl_bridge.core.atomic import (
    Snapshot,
    atomic_directory,
    check_nothing_lost,
    check_only_own_files,
    check_space,
    check_target,
    disk_of,
    free_space,
    list_files,
    snapshot,
    used_space,
)
from qwen3vl_bridge.core.files import CheckpointError, write_object
from qwen3vl_bridge.weights.rows import TensorSlice

# Disk space for files without tensors.
_OTHER_FILES_BYTES = 64 << 20
# An estimate reads this many tasks, at most so many bytes of each, and writes so many bytes.
_SAMPLED_TASKS, _SAMPLE_BYTES, _WRITTEN_BYTES = 32, 16 << 20, 64 << 20


# Digests of a file: the end of each byte range and the digest of its bytes, in order.
FileDigests = list[tuple[int, str]]


class Output(Protocol):
    """The output files of a conversion, in one checkpoint format."""

    inner: ClassVar[str]  # subfolder of the target folder that contains the files with tensors

    @property
    def files(self) -> list[OutputFile]:
        """Return the planned files that contain tensors."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings to record in the manifest, such as the checkpoint format."""
        ...

    def finish(self, root: Path, digest: str) -> None:
        """Write the files without tensors, except the manifest. `digest` identifies the plan."""

    def open(self, root: Path) -> TensorSource:
        """Open the written tensors in the folder `root`; raise CheckpointError if its files differ from the plan."""
        ...


@dataclass(frozen=True)
class Conversion:
    """A planned conversion of a checkpoint: the source, the plan, and the output."""

    name: str  # import, export, reformat, ...
    origin: str  # the source as the user named it
    target: Path  # folder of the result, to be created
    plan: Plan
    source: TensorSource  # the tensors to read
    folders: tuple[Path, ...]  # folders that are read during the conversion
    output: Output
    notes: list[str]  # for the user
    threads: int = 2  # of each process, to read and write

    def digest(self) -> str:
        """Return a digest that tells whether an interrupted run was the same conversion, so that it can be resumed.

        It covers the versions of this package and torch, the path, size and modification time of the source files, the
        plan, and the planned contents of files with tensors. A resumed run writes the other files again.
        """
        digest = hashlib.sha256(repr((describe_tool(), self.name)).encode())
        for path in self.source.files:
            found = path.stat()
            digest.update(repr((str(path.resolve()), found.st_size, found.st_mtime_ns)).encode())
        for task in self.plan.tasks:
            digest.update(repr((task.target, tuple(task.slices))).encode())
        for file in self.output.files:
            contents = (content if isinstance(content, bytes) else len(content) for content in file.contents)
            digest.update(repr((file.name, list(contents))).encode())
        return digest.hexdigest()

    def write_manifest(self, result: Path, digest: str, checksums: dict[str, str]) -> None:
        """Write the manifest to the folder `result`, with the digest of the plan and checksums by tensor name."""
        plan, output = self.plan, self.output
        files: dict[Path, FileDigests] = {}
        for part, part_digest in output_files.read_journal(result, split_files(output.files)).items():
            files.setdefault(Path(output.inner) / part.path, []).append((part.end, part_digest))
        for path in list_files(result):
            if (name := path.relative_to(result)) not in files:
                size = path.stat().st_size
                part = ByteRange(path, 0, size)
                files[name] = [(size, output_files.hash_range(part, Progress("", size, shown=False)) or "")]
        counts = {"tensors": len(plan.tasks), "parameters": plan.numel, "bytes": plan.nbytes, "dtypes": plan.dtypes}
        counts |= {"cast": len(plan.cast), "transposed": len(plan.transposed), "digest": digest}
        counts["files"] = {name.as_posix(): digests for name, digests in sorted(files.items())}
        manifest = describe_tool() | {"source": self.origin} | output.settings | counts
        write_object(result / output.inner / MANIFEST, manifest | ({"sha256": checksums} if checksums else {}))


@dataclass(frozen=True)
class ConversionReport:
    """Report on a conversion that has finished, or that was only planned (`dry_run`).

    Attributes:
        name: import, export or reformat.
        format: "huggingface", "fsdp_dtensor" or "torch_dist".
        layer_spec: layer spec of the parameter names; None for Hugging Face.
        tensors, parameters, nbytes: number of tensors, of their elements, and of their bytes.
        files: number of files with tensors.
        cast: number of tensors with a changed dtype.
        transposed: number of tensors with transposed matrices. All others were copied.
        disk_needed, disk_free: bytes.
        estimate: seconds that the conversion would take, estimated by a dry run; otherwise 0.
        notes: information for the user.
        seconds: time of writing; 0 if nothing was written.
        resumed: bytes of files with tensors that an earlier run had written.
        written: bytes of files with tensors that this run has written.
    """

    name: str
    source: str
    target: Path
    format: str
    layer_spec: str | None
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]
    cast: int
    transposed: int
    files: int
    disk_needed: int
    disk_free: int
    estimate: float = 0.0
    processes: int = 1
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    resumed: int = 0
    written: int = 0
    dry_run: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict that can be written as JSON."""
        return asdict(self) | {"target": str(self.target)}


@dataclass(frozen=True)
class ConversionOptions:
    """Options of every conversion.

    Attributes:
        overwrite: whether to replace the result of an earlier conversion at the target. Other files there are an error.
        resume: whether to continue an interrupted run with the same source and options, and to keep the partial result
            if this run fails. A partial result of a run with other options is an error. If False, it is removed.
        verify: whether to compare the result with the source, bit for bit, before it is moved into place.
        checksums: whether to write a checksum of every tensor to the manifest.
        dry_run: whether to plan and estimate only. Nothing is written but an unnamed file, to measure the disk's speed.
        progress: whether to show progress on standard error.
        ranks: the processes that share the work. All of them must make the call with equal arguments.
    """

    overwrite: bool = False
    resume: bool = False
    verify: bool = False
    checksums: bool = False
    dry_run: bool = False
    progress: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    def start_progress(self, label: str, total: int) -> Progress:
        """Return a progress display for the work of this process. Only process 0 prints it."""
        if self.ranks.size > 1:
            label = f"{label}, process {self.ranks.rank} of {self.ranks.size}"
        return Progress(label, total, shown=self.progress and self.ranks.first)


def run_conversion(make_conversion: Callable[[], Conversion], options: ConversionOptions) -> ConversionReport:
    """Plan and run a conversion. Every process makes the same plan.

    Args:
        make_conversion: opens the source and plans the conversion.
        options: options of the conversion.

    Raises:
        CheckpointError: the source, an option, the target or the file system is invalid, or a process failed. The
            target is unchanged.
    """
    ranks = options.ranks
    # A plan has a hundred thousand objects, all of them needed: garbage collection would double the time to create it.
    collecting = gc.isenabled()
    gc.disable()
    try:
        made: list[Conversion] = []
        ranks.all_gather(lambda: made.append(make_conversion()))
    finally:
        if collecting:
            gc.enable()
    (conversion,) = made
    plan, output, target = conversion.plan, conversion.output, conversion.target
    disk_needed = sum(file.nbytes for file in output.files) + _OTHER_FILES_BYTES
    earlier = EarlierResult(
        output.inner, output.settings["format"], contents=not options.dry_run, progress=options.progress
    )
    ranks.run_on_rank0(
        lambda: check_target(
            target, overwrite=options.overwrite, check_replaceable=earlier.check, sources=conversion.folders
        )
    )
    report = ConversionReport(
        name=conversion.name,
        source=conversion.origin,
        target=target,
        format=output.settings["format"],
        layer_spec=output.settings.get("layer_spec"),
        tensors=len(plan.tasks),
        parameters=plan.numel,
        nbytes=plan.nbytes,
        dtypes=tuple(plan.dtypes),
        cast=len(plan.cast),
        transposed=len(plan.transposed),
        files=len(output.files),
        disk_needed=disk_needed,
        disk_free=free_space(target),
        processes=ranks.size,
        notes=tuple(conversion.notes),
    )
    if options.dry_run:
        return replace(report, estimate=ranks.run_on_rank0(lambda: _estimate_seconds(conversion, options)))
    digests = ranks.all_gather(lambda: conversion.digest())
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"{conversion.origin} differs between the {ranks.size} processes: use a file system that all of them share"
        )
    with contextlib.ExitStack() as stack:
        work = ranks.run_on_rank0(
            lambda: stack.enter_context(_staging_folder(conversion, options, earlier, digests[0], disk_needed))
        )
        seconds, resumed, written = _write_tensors(conversion, options, work)
        try:
            _finish_and_check(conversion, options, work, digests[0])
        except CheckpointError as error:
            if options.resume:
                raise CheckpointError(f"{error}; if --resume fails again, omit it to start over") from error
            raise
        if ranks.run_on_rank0(lambda: conversion.digest()) != digests[0]:
            raise CheckpointError(f"{conversion.origin} changed while it was being read; run the conversion again")
        move_into_place = stack.pop_all()
    ranks.run_on_rank0(move_into_place.close)
    notes = tuple(ranks.run_on_rank0(lambda: conversion.notes))
    return replace(report, notes=notes, seconds=seconds, resumed=resumed, written=written, dry_run=False)


@contextlib.contextmanager
def _staging_folder(
    conversion: Conversion, options: ConversionOptions, earlier: EarlierResult, digest: str, disk_needed: int
) -> Iterator[Path]:
    """Yield the hidden folder to write to, new or resumed. At the end of the `with` block rename it to the target.

    `digest` identifies the conversion: a folder is resumed only if it was begun with the same digest.
    """

    def can_resume(folder: Path) -> bool:
        # Process 0 holds the lock of the target. If it died, the other processes may still be alive.
        if output_files.has_live_writer(folder):
            raise CheckpointError(
                f"{conversion.target} is being written by another process, in {folder}: wait until it ends"
            )
        found = output_files.read_plan_digest(folder) if options.resume else ""
        if len(found) == len(digest) and found != digest:
            raise CheckpointError(
                f"{folder} is the unfinished result of a conversion with another source, options or version, so "
                "--resume cannot continue it; repeat the command that began it, or omit --resume to remove it and "
                "start over"
            )
        return found == digest

    with atomic_directory(
        conversion.target,
        conversion.notes.append,
        check_replaceable=earlier.check if options.overwrite else None,
        can_resume=can_resume,
        keep=options.resume,
    ) as work:
        check_space(conversion.target, disk_needed - used_space(work))
        output_files.start_journal(work, digest)
        (work / conversion.output.inner).mkdir(exist_ok=True)
        yield work


def _write_tensors(conversion: Conversion, options: ConversionOptions, work: Path) -> tuple[float, int, int]:
    """Write the files with tensors. Return (seconds, bytes that an earlier run has written, bytes written now)."""
    ranks, files, folder = options.ranks, conversion.output.files, work / conversion.output.inner
    ranges = split_files(files)
    # Process 0 reads the journal, so that all processes see the same lines: those of earlier runs only.
    recorded = list(ranks.run_on_rank0(lambda: output_files.read_journal(work, ranges)).items())
    present: set[ByteRange] = set()
    if recorded:
        to_check = ranks.assign(recorded, [part.length for part, _ in recorded])

        def check() -> list[ByteRange]:
            with options.start_progress("resume", sum(part.length for part, _ in to_check)) as meter:
                return output_files.find_unchanged(folder, to_check, meter)

        present = {part for parts in ranks.all_gather(check) for part in parts}
        if changed := len(recorded) - len(present):
            conversion.notes.append(
                f"{changed} of {len(recorded)} parts written by an earlier run have changed since then and are written "
                "again"
            )
    left = [part for part in ranges if part not in present]
    mine = ranks.assign(left, [part.length for part in left])

    def write() -> float:
        nbytes, threads = sum(part.length for part in mine), conversion.threads
        with Journal(work, ranks.rank) as journal, options.start_progress(conversion.name, nbytes) as meter:
            output_files.write_ranges(folder, files, mine, conversion.source, journal, meter, threads)
            return meter.seconds

    return max(ranks.all_gather(write)), sum(part.length for part in present), sum(part.length for part in left)


def _finish_and_check(conversion: Conversion, options: ConversionOptions, work: Path, digest: str) -> None:
    """Write the files without tensors, read back what was written, and compare it with the source if requested."""
    ranks, output = options.ranks, conversion.output

    def finish() -> None:
        output_files.check_sizes(work / output.inner, output.files)
        # Remove files without tensors that an interrupted run has written.
        with_tensors = {work / output.inner / file.name for file in output.files}
        for path in set(list_files(work)) - with_tensors:
            path.unlink()
        output.finish(work, digest)

    ranks.run_on_rank0(finish)
    tasks = conversion.plan.assign_tasks(ranks)
    nbytes = sum(task.target.nbytes for task in tasks)

    def check() -> dict[str, str]:
        written = output.open(work)
        if written.specs != conversion.plan.specs:
            raise CheckpointError(
                f"{work} contains other tensors than this conversion writes; run the conversion again"
            )
        for task in tasks:  # finding the byte ranges checks that items are what the metadata says
            deque(written.byte_ranges(TensorSlice(task.target.name, 0, task.target.numel)), maxlen=0)
        if options.verify:
            with options.start_progress("verify", nbytes) as meter:
                for found in compare_tensors(tasks, conversion.source, written, meter):
                    raise CheckpointError(f"{work} was not written correctly: {found}; run the conversion again")
        if not options.checksums:
            return {}
        with options.start_progress("checksums", nbytes) as meter:
            return compute_checksums((task.target.name for task in tasks), written, meter)

    checksums = {name: value for part in ranks.all_gather(check) for name, value in part.items()}
    ranks.run_on_rank0(lambda: conversion.write_manifest(work, digest, checksums))


def _estimate_seconds(conversion: Conversion, options: ConversionOptions) -> float:
    """Estimate the seconds that a conversion takes, from the speed of reading and writing a sample of its tensors.

    Processes are assumed to share reading and computing, and to write to the same disk.
    """
    plan = conversion.plan
    if not plan.nbytes:
        return 0.0
    cast(memoryview(bytearray(4)), "float32", "bfloat16", "")  # imports torch, which takes seconds, before measuring
    sampled, begun = 0, time.monotonic()
    with SliceReader(conversion.source) as reader:
        for task in random.sample(plan.tasks, min(_SAMPLED_TASKS, len(plan.tasks))):
            length = min(task.slices.length, max(1, _SAMPLE_BYTES // ITEMSIZE[task.target.dtype]))
            sampled += sum(map(len, reader.read_blocks(task.slices.select(0, length), task.target.dtype)))
    reading = writing = (time.monotonic() - begun) / max(sampled, 1)
    block, nbytes = memoryview(os.urandom(1 << 20)), min(_WRITTEN_BYTES, plan.nbytes)
    begun = time.monotonic()
    # Where nothing may be written, writing is assumed to be as fast as reading.
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=disk_of(conversion.target), buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])
        os.fdatasync(file.fileno())
        writing = (time.monotonic() - begun) / nbytes
    passes = 1 + 2 * options.verify + options.checksums  # reads of the source, or of files as large
    return plan.nbytes * (passes * reading / options.ranks.size + writing)


class EarlierResult:
    """Check that a folder to be replaced is the unchanged result of an earlier conversion, without other files."""

    def __init__(self, inner: str, ckpt_format: str, *, contents: bool = True, progress: bool = False) -> None:
        """Set which results may be replaced, and how thoroughly they are checked.

        Args:
            inner: subfolder of the result that contains the manifest.
            ckpt_format: format of the checkpoint that replaces the result. A Megatron checkpoint may replace a
                checkpoint of either Megatron format. Other formats replace only the same format.
            contents: whether to compare digests of the files; otherwise only their sizes.
            progress: whether to show progress.
        """
        self._manifest = Path(inner, MANIFEST).as_posix()
        self._formats = FORMATS if ckpt_format in FORMATS else (ckpt_format,)
        self._contents, self._progress = contents, progress
        self._checked: Snapshot | None = None

    def check(self, root: Path) -> None:
        """Raise CheckpointError if `root` is not an unchanged result of a conversion, or contains other files."""
        found = snapshot(root)
        if found == self._checked:
            return
        manifest = read_manifest((root / self._manifest).parent)
        # Training writes a manifest too, without a format.
        if manifest.get("tool") != TOOL or manifest.get("format") not in self._formats:
            raise CheckpointError(
                f"{root} was not written by a conversion of this kind: {self._manifest} is missing or names another "
                "writer or format. The folder is not replaced, remove it yourself"
            )
        try:
            files = manifest["files"].items()
            written = {name: [(int(end), str(digest)) for end, digest in digests] for name, digests in files}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{root / self._manifest} lists no digests of the files, so --overwrite cannot see whether they were "
                f"changed and does not replace {root}: remove it yourself"
            ) from None
        check_only_own_files(root, {self._manifest, *written}, "checkpoint")
        present = {name: written[name] for name in found if name in written}
        sizes = {name: digests[-1][0] if digests else 0 for name, digests in present.items()}
        with Progress("earlier result", sum(sizes.values()), shown=self._progress) as meter:
            changed = [
                name
                for name, digests in present.items()
                if not self._is_unchanged(root / name, sizes[name], digests, meter)
            ]
        check_nothing_lost(root, changed, "files changed since a conversion wrote them")
        self._checked = found

    def _is_unchanged(self, path: Path, size: int, digests: FileDigests, meter: Progress) -> bool:
        if not path.is_file() or path.stat().st_size != size:
            return False
        starts = (0, *(end for end, _ in digests))
        return not self._contents or all(
            output_files.hash_range(ByteRange(path, start, end - start), meter) == digest
            for start, (end, digest) in zip(starts, digests, strict=False)
        )
