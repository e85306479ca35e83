"""The steps of every conversion: check, write to a staging folder, verify, move into place."""

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

from qwen3vl_bridge.checkpoint.comparison import checksums, differences
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, Task
from qwen3vl_bridge.checkpoint.formats import planned_files
from qwen3vl_bridge.checkpoint.formats.megatron import FORMATS
from qwen3vl_bridge.checkpoint.formats.planned_files import OutputFile, Unit, share, units
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, SegmentReader, Slice, TensorSource, cast
from qwen3vl_bridge.checkpoint.processes import Progress, Ranks
from qwen3vl_bridge.checkpoint.stored_models import MANIFEST, TOOL, read_manifest, tool
from qwen3vl_bridge.io.atomic import (
    Snapshot,
    atomic_directory,
    check_space,
    check_target,
    disk_of,
    free_space,
    leaves,
    refuse_loss,
    refuse_others,
    snapshot,
    space_of,
)
from qwen3vl_bridge.io.files import CheckpointError, write_object

# For files other than tensors.
_OVERHEAD = 64 << 20
# Of an estimate: tasks, bytes to read of each, bytes to write.
_SAMPLES, _SAMPLE_BYTES, _WRITTEN = 32, 16 << 20, 64 << 20


# A file's contents: the end of each part, and a digest of it.
Parts = list[tuple[int, str]]


class Output(Protocol):
    """A plan's result in one format."""

    inner: ClassVar[str]  # the folder in the result that contains the files with tensors

    @property
    def files(self) -> list[OutputFile]:
        """The files with tensors."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """Values other than the plan on which the result depends, as JSON; stored in the manifest."""
        ...

    def finish(self, root: Path, digest: str) -> None:
        """Write all files except those with tensors and the manifest, given a digest of the plan."""

    def open(self, root: Path) -> TensorSource:
        """Open a result's tensors; a CheckpointError if one of its files differs from the plan."""
        ...


@dataclass(frozen=True)
class Conversion:
    """A planned conversion."""

    name: str  # of the command
    origin: str  # the source, in the user's words
    target: Path  # the result's folder, to be created
    plan: Plan
    source: TensorSource  # what the plan reads
    folders: tuple[Path, ...]  # that are read meanwhile
    output: Output  # what the plan writes
    notes: list[str]  # for the user
    threads: int = 2  # of a process that read the source

    def digest(self) -> str:
        """Identifies a plan: source files, where every element comes from, where every byte goes.

        Files other than tensors are not included: a resumed run writes them again.
        """
        digest = hashlib.sha256(repr((tool(), self.name)).encode())
        for path in self.source.files:
            found = path.stat()
            digest.update(repr((str(path.resolve()), found.st_size, found.st_mtime_ns)).encode())
        for task in self.plan.tasks:
            digest.update(repr((task.target, tuple(task.segments))).encode())
        for file in self.output.files:
            parts = (content if isinstance(content, bytes) else len(content) for content in file.contents)
            digest.update(repr((file.name, list(parts))).encode())
        return digest.hexdigest()

    def write_manifest(self, result: Path, digest: str, sums: dict[str, str]) -> None:
        """Write the result's manifest; the journal has the digests of the files with tensors."""
        plan, output = self.plan, self.output
        files: dict[Path, Parts] = {}
        for unit, part in planned_files.noted(result, output.files, units(output.files)).items():
            files.setdefault(Path(output.inner, output.files[unit.file].name), []).append((unit.end, part))
        for path in leaves(result):
            if (name := path.relative_to(result)) not in files:
                size = path.stat().st_size
                files[name] = [(size, planned_files.digest_of(path, 0, size, Progress("", size, shown=False)) or "")]
        made = {"tensors": len(plan.tasks), "parameters": plan.numel, "bytes": plan.nbytes, "dtypes": plan.dtypes}
        made |= {"cast": len(plan.cast), "transposed": len(plan.transposed), "digest": digest}
        made["files"] = {name.as_posix(): parts for name, parts in sorted(files.items())}
        manifest = tool() | {"source": self.origin} | output.settings | made
        write_object(result / output.inner / MANIFEST, manifest | ({"sha256": sums} if sums else {}))


@dataclass(frozen=True)
class ConversionReport:
    """A finished conversion, or with `dry_run` a planned one; of what was written, unless it says otherwise.

    Attributes:
        name: import, export or reformat.
        format: "huggingface", "fsdp_dtensor" or "torch_dist".
        layer_spec: None for Hugging Face.
        tensors, parameters, nbytes, files: numbers of tensors, their elements and bytes, and files with tensors.
        cast: number of tensors whose dtype was changed.
        transposed: number of tensors made of transposed matrices. All others were copied.
        disk_needed, disk_free: bytes.
        estimate: estimated seconds; 0 unless requested.
        notes: information for the user.
        seconds: time of writing; 0 if nothing was written.
        resumed, written: bytes of files with tensors that an earlier run had written, and that this one has.
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
        """The report as values for JSON."""
        return asdict(self) | {"target": str(self.target)}


@dataclass(frozen=True)
class ConversionOptions:
    """How a conversion is carried out.

    Attributes:
        overwrite: whether to replace an earlier result at the target. Anything else there is an error.
        resume: whether to continue an interrupted run with the same source and options, and to keep the partial result
            if this run fails. A partial result of other options is an error. If False, partial results are removed.
        verify: whether to compare the result with the source, bit for bit, before it is moved into place.
        checksums: whether to write a checksum of every tensor to the manifest.
        dry_run: whether to stop before anything is written, except for an unnamed sample file to measure the disk.
        progress: whether to show progress on standard error.
        ranks: the processes that share the work; each of them makes the same call.
    """

    overwrite: bool = False
    resume: bool = False
    verify: bool = False
    checksums: bool = False
    dry_run: bool = False
    progress: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    def meter(self, label: str, total: int) -> Progress:
        """Progress of this process, which the first one shows."""
        if self.ranks.size > 1:
            label = f"{label}, process {self.ranks.rank} of {self.ranks.size}"
        return Progress(label, total, shown=self.progress and self.ranks.first)


def run_conversion(planned: Callable[[], Conversion], options: ConversionOptions) -> ConversionReport:
    """Execute a conversion that `planned` creates, the same in every process.

    Raises:
        CheckpointError: the source, an option, the target or the file system is invalid, or a process failed. The
            target is unchanged.
    """
    ranks = options.ranks
    collecting = gc.isenabled()
    gc.disable()  # a plan has a hundred thousand objects, all needed; collections double the time to create them
    try:
        made: list[Conversion] = []
        ranks.all_gather(lambda: made.append(planned()))
    finally:
        if collecting:
            gc.enable()
    (conversion,) = made
    plan, output, target = conversion.plan, conversion.output, conversion.target
    needed = sum(file.nbytes for file in output.files) + _OVERHEAD
    replaceable = Replaceable(
        output.inner, output.settings["format"], contents=not options.dry_run, progress=options.progress
    )
    ranks.run_on_rank0(
        lambda: check_target(target, overwrite=options.overwrite, replaceable=replaceable, sources=conversion.folders)
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
        disk_needed=needed,
        disk_free=free_space(target),
        processes=ranks.size,
        notes=tuple(conversion.notes),
    )
    if options.dry_run:
        return replace(report, estimate=ranks.run_on_rank0(lambda: _estimated_seconds(conversion, options)))
    digests = ranks.all_gather(lambda: conversion.digest())
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"{conversion.origin} differs between the {ranks.size} processes, expected one file "
            "system that all of them share"
        )
    with contextlib.ExitStack() as stack:
        work = ranks.run_on_rank0(
            lambda: stack.enter_context(_staged(conversion, options, replaceable, digests[0], needed))
        )
        seconds, resumed, written = _write(conversion, options, work)
        try:
            _finish_and_prove(conversion, options, work, digests[0])
        except CheckpointError as error:
            if options.resume:
                raise CheckpointError(f"{error}; if it fails again, run without --resume to start over") from error
            raise
        if ranks.run_on_rank0(lambda: conversion.digest()) != digests[0]:
            raise CheckpointError(f"{conversion.origin} changed while it was being read; {work} is unusable")
        into_place = stack.pop_all()
    ranks.run_on_rank0(into_place.close)
    notes = tuple(ranks.run_on_rank0(lambda: conversion.notes))
    return replace(report, notes=notes, seconds=seconds, resumed=resumed, written=written, dry_run=False)


@contextlib.contextmanager
def _staged(
    conversion: Conversion, options: ConversionOptions, replaceable: Replaceable, digest: str, needed: int
) -> Iterator[Path]:
    """The folder in which the result is written, with a journal."""

    def claim(folder: Path) -> bool:
        if planned_files.is_written_by_another(folder):  # the first process has died, and its lock with it
            raise CheckpointError(f"{conversion.target} is being written by another process, in {folder}")
        begun = planned_files.plan_of(folder) if options.resume else ""
        if len(begun) == len(digest) and begun != digest:
            raise CheckpointError(
                f"{folder} is the unfinished result of a conversion with another source, options or version, so "
                "--resume cannot continue it; repeat the command that began it, or omit --resume to remove it and "
                "start over"
            )
        return begun == digest

    with atomic_directory(
        conversion.target,
        conversion.notes.append,
        replace=replaceable if options.overwrite else None,
        claim=claim,
        keep=options.resume,
    ) as work:
        check_space(conversion.target, needed - space_of(work))
        planned_files.begin(work, digest)
        (work / conversion.output.inner).mkdir(exist_ok=True)
        yield work


def _write(conversion: Conversion, options: ConversionOptions, work: Path) -> tuple[float, int, int]:
    """Write all files with tensors; returns the time, the bytes that were already written, and the others."""
    ranks, files, folder = options.ranks, conversion.output.files, work / conversion.output.inner
    everything = units(files)
    # What an earlier run has noted. Read once, and all have read before one of them writes.
    noted = list(ranks.run_on_rank0(lambda: planned_files.noted(work, files, everything)).items())
    present: set[Unit] = set()
    if noted:
        to_check = share(noted, [unit.nbytes for unit, _ in noted], ranks.rank, ranks.size)

        def check() -> list[Unit]:
            with options.meter("resume", sum(unit.nbytes for unit, _ in to_check)) as meter:
                return planned_files.intact(folder, files, to_check, meter)

        present = {unit for part in ranks.all_gather(check) for unit in part}
        if spoilt := len(noted) - len(present):
            conversion.notes.append(
                f"{spoilt} of {len(noted)} parts written by an earlier run have changed since then and are written "
                "again"
            )
    left = [unit for unit in everything if unit not in present]
    mine = share(left, [unit.nbytes for unit in left], ranks.rank, ranks.size)

    def write() -> float:
        nbytes, threads = sum(unit.nbytes for unit in mine), conversion.threads
        with planned_files.Journal(work, ranks.rank) as journal, options.meter(conversion.name, nbytes) as meter:
            planned_files.write_units(folder, files, mine, conversion.source, journal, meter, threads)
            return meter.seconds

    return max(ranks.all_gather(write)), sum(unit.nbytes for unit in present), sum(unit.nbytes for unit in left)


def _finish_and_prove(conversion: Conversion, options: ConversionOptions, work: Path, digest: str) -> None:
    """Write everything else, read back what was written, and compare if requested."""
    ranks, output = options.ranks, conversion.output

    def finish() -> None:
        planned_files.check_sizes(work / output.inner, output.files)
        # What an interrupted run had written other than tensors.
        tensors = {work / output.inner / file.name for file in output.files}
        for path in set(leaves(work)) - tensors:
            path.unlink()
        output.finish(work, digest)

    ranks.run_on_rank0(finish)
    tasks = tasks_of(conversion.plan, ranks)
    nbytes = sum(task.target.nbytes for task in tasks)

    def check() -> dict[str, str]:
        written = output.open(work)
        if written.specs != conversion.plan.specs:
            raise CheckpointError(f"{work}: the folder's contents differ from what was to be written")
        for task in tasks:  # whether the items are what the metadata say
            deque(written.extents(Slice(task.target.name, 0, task.target.numel)), maxlen=0)
        if options.verify:
            with options.meter("verify", nbytes) as meter:
                for found in differences(tasks, conversion.source, written, meter):
                    raise CheckpointError(f"{work}: was not written correctly: {found}")
        if not options.checksums:
            return {}
        with options.meter("checksums", nbytes) as meter:
            return checksums((task.target.name for task in tasks), written, meter)

    sums = {name: value for part in ranks.all_gather(check) for name, value in part.items()}
    ranks.run_on_rank0(lambda: conversion.write_manifest(work, digest, sums))


def tasks_of(plan: Plan, ranks: Ranks) -> list[Task]:
    """This process's part of reading what a plan writes."""
    return share(plan.tasks, [task.target.nbytes for task in plan.tasks], ranks.rank, ranks.size)


def _estimated_seconds(conversion: Conversion, options: ConversionOptions) -> float:
    """Estimated seconds, assuming that source and disk continue at the speed of samples.

    Processes are assumed to share reading and computing, and to write to the same disk. The samples differ in each
    call, so that the page cache of an earlier estimate is not mistaken for the speed of the disk.
    """
    plan = conversion.plan
    if not plan.nbytes:
        return 0.0
    cast(memoryview(bytearray(4)), "float32", "bfloat16", "")  # imports torch, which takes seconds, once
    sampled, begun = 0, time.monotonic()
    with SegmentReader(conversion.source) as reader:
        for task in random.sample(plan.tasks, min(_SAMPLES, len(plan.tasks))):
            length = min(task.segments.length, max(1, _SAMPLE_BYTES // ITEMSIZE[task.target.dtype]))
            sampled += sum(map(len, reader.blocks(task.segments.cut(0, length), task.target.dtype)))
    reading = writing = (time.monotonic() - begun) / max(sampled, 1)
    block, nbytes = memoryview(os.urandom(1 << 20)), min(_WRITTEN, plan.nbytes)
    begun = time.monotonic()
    # Where nothing may be written, writing is assumed to be as fast as reading.
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=disk_of(conversion.target), buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])
        os.fdatasync(file.fileno())
        writing = (time.monotonic() - begun) / nbytes
    passes = 1 + 2 * options.verify + options.checksums  # reads of the source, or of a result as large
    return plan.nbytes * (passes * reading / options.ranks.size + writing)


class Replaceable:
    """Checks that a folder is exactly the unchanged result of an earlier conversion."""

    def __init__(self, inner: str, kind: str, *, contents: bool = True, progress: bool = False) -> None:
        """Create a check of a folder whose manifest is in its folder `inner`.

        A Megatron checkpoint replaces one of either format, anything else only the same format, which is `kind`.
        Without `contents` files are compared only by size, not with their digests.
        """
        self._manifest = Path(inner, MANIFEST).as_posix()
        self._kinds = FORMATS if kind in FORMATS else (kind,)
        self._contents, self._progress = contents, progress
        self._checked: Snapshot | None = None

    def __call__(self, root: Path) -> None:
        """Raise a CheckpointError if a folder is something else, or contains files that would be lost.

        Its files are read once, and again only if they have changed since.
        """
        found = snapshot(root)
        if found == self._checked:
            return
        written = self._written(root)
        refuse_others(root, {self._manifest, *written}, "checkpoint")
        present = {name: written[name] for name in found if name in written}
        with Progress("earlier result", sum(map(_end_of, present.values())), shown=self._progress) as meter:
            changed = [name for name, parts in present.items() if not self._is_as_written(root / name, parts, meter)]
        refuse_loss(root, changed, "files changed since a conversion wrote them")
        self._checked = found

    def _is_as_written(self, path: Path, parts: Parts, meter: Progress) -> bool:
        if not path.is_file() or path.stat().st_size != _end_of(parts):
            return False
        pieces = zip((0, *(end for end, _ in parts)), parts, strict=False)
        digest_of = planned_files.digest_of
        return not self._contents or all(digest_of(path, a, b, meter) == digest for a, (b, digest) in pieces)

    def _written(self, root: Path) -> dict[str, Parts]:
        """The files of a result from its manifest."""
        manifest = read_manifest((root / self._manifest).parent)
        # Our training writes a manifest too, which has no format.
        if manifest.get("tool") != TOOL or manifest.get("format") not in self._kinds:
            raise CheckpointError(
                f"{root} was not written by a conversion of this kind: it has no such {self._manifest}, so it is not "
                "replaced; remove it yourself"
            )
        files = manifest.get("files")
        try:
            return {name: [(int(end), str(digest)) for end, digest in parts] for name, parts in files.items()}  # pyright: ignore[reportOptionalMemberAccess]
        except (AttributeError, TypeError, ValueError):
            raise CheckpointError(
                f"{root / self._manifest} has no digests of the files, so {root} is not replaced; remove it yourself"
            ) from None


def _end_of(parts: Parts) -> int:
    return parts[-1][0] if parts else 0
