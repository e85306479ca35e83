"""The steps of every conversion: check, write to a staging folder, verify, move into place."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from qwen3vl_bridge.checkpoint.engine import journal
from qwen3vl_bridge.checkpoint.engine.comparison import checksums, differences
from qwen3vl_bridge.checkpoint.engine.copying import check_sizes, write_units
from qwen3vl_bridge.checkpoint.engine.manifest import Replaceable
from qwen3vl_bridge.checkpoint.engine.planned_conversion import Conversion
from qwen3vl_bridge.checkpoint.engine.progress import Progress
from qwen3vl_bridge.checkpoint.engine.ranks import Ranks
from qwen3vl_bridge.checkpoint.engine.reports import ConversionReport
from qwen3vl_bridge.checkpoint.formats.planned_files import Unit, share, units
from qwen3vl_bridge.checkpoint.planning.plan import Plan, Task
from qwen3vl_bridge.checkpoint.planning.time_estimate import estimate
from qwen3vl_bridge.io import atomic
from qwen3vl_bridge.io.atomic import leaves
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.io.target import check_space, check_target, disk_of, free_space, space_of

# For files other than tensors.
_OVERHEAD = 64 << 20


class ConversionOptions(TypedDict, total=False):
    """How a conversion is carried out; every entry is optional.

    Attributes:
        overwrite: whether to replace an earlier result at the target. Anything else there is an error.
        resume: whether to continue an interrupted run with the same source and options, and to keep the partial result
            if this run fails. A partial result of other options is an error. If False, partial results are removed.
        verify: whether to compare the result with the source, bit for bit, before it is moved into place.
        checksums: whether to write a checksum of every tensor to the manifest.
        dry_run: whether to stop before anything is written, except for an unnamed sample file to measure the disk.
        progress: whether to show progress on standard error.
        sync: whether to wait until everything is on disk.
        ranks: the processes that share the work; each of them makes the same call.
    """

    overwrite: bool
    resume: bool
    verify: bool
    checksums: bool
    dry_run: bool
    progress: bool
    sync: bool
    ranks: Ranks


@dataclass(frozen=True)
class _Options:
    """`ConversionOptions` with defaults filled in."""

    overwrite: bool = False
    resume: bool = False
    verify: bool = False
    checksums: bool = False
    dry_run: bool = False
    progress: bool = False
    sync: bool = True
    ranks: Ranks = field(default_factory=Ranks)


def run_conversion(planned: Callable[[], Conversion], given: ConversionOptions) -> ConversionReport:
    """Plan a conversion and execute it.

    Args:
        planned: creates the plan, the same in every process.
        given: options of the conversion.

    Raises:
        CheckpointError: the source, an option, the target or the file system is invalid, or a process failed. The
            target is unchanged.
    """
    options = _Options(**given)
    ranks = options.ranks
    with _no_collection():
        conversion = ranks.all_run(planned)
    target = conversion.target
    needed = sum(file.nbytes for file in conversion.output.files) + _OVERHEAD
    output = conversion.output
    replaceable = Replaceable(
        output.inner, output.settings["format"], contents=not options.dry_run, progress=options.progress
    )
    ranks.run_on_rank0(lambda: _check_target(conversion, options, replaceable))
    report = ConversionReport.of(conversion, needed, free_space(target), ranks.size)
    if options.dry_run:
        return replace(report, estimate=ranks.run_on_rank0(lambda: _estimate(conversion, options)))
    digests = ranks.all_gather(lambda: conversion.digest(sync=options.sync))
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"{conversion.origin} differs between the {ranks.size} processes, expected one file "
            "system that all of them share"
        )
    with contextlib.ExitStack() as stack:
        work = ranks.run_on_rank0(
            lambda: stack.enter_context(_begun(conversion, options, replaceable, digests[0], needed))
        )
        seconds, resumed, written = _write(conversion, options, work)
        _finish_and_prove(conversion, options, work, digests[0])
        if ranks.run_on_rank0(lambda: conversion.digest(sync=options.sync)) != digests[0]:
            raise CheckpointError(f"{conversion.origin} changed while it was being read; {work} is unusable")
        into_place = stack.pop_all()
    ranks.run_on_rank0(into_place.close)
    return report.done(ranks.run_on_rank0(lambda: conversion.notes), seconds, resumed, written)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A plan has a hundred thousand objects, all of them needed; garbage collection doubles the time to create them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _estimate(conversion: Conversion, options: _Options) -> float:
    """Estimated seconds of the conversion."""
    return estimate(
        conversion.plan,
        conversion.source,
        disk_of(conversion.target),
        processes=options.ranks.size,
        passes=2 * options.verify + options.checksums,
    )


def _check_target(conversion: Conversion, options: _Options, replaceable: Replaceable) -> None:
    check_target(
        conversion.target,
        overwrite=options.overwrite,
        replaceable=replaceable,
        sources=conversion.folders,
    )


@contextlib.contextmanager
def _begun(
    conversion: Conversion, options: _Options, replaceable: Replaceable, digest: str, needed: int
) -> Iterator[Path]:
    """The folder in which the result is written, with a journal."""

    def claim(folder: Path) -> bool:
        if journal.is_written_by_another(folder):  # the first process has died, and its lock with it
            raise CheckpointError(f"{conversion.target} is being written by another process, in {folder}")
        begun = journal.plan_of(folder) if options.resume else ""
        if len(begun) == len(digest) and begun != digest:
            raise CheckpointError(
                f"{folder} is the unfinished result of a conversion with another source, options or version, so "
                "--resume cannot continue it; repeat the command that began it, or omit --resume to remove it and "
                "start over"
            )
        return begun == digest

    target = conversion.target
    with atomic.atomic_directory(
        target,
        conversion.notes.append,
        replace=replaceable if options.overwrite else None,
        sync=options.sync,
        claim=claim,
        keep=options.resume,
    ) as work:
        check_space(target, needed - space_of(work))
        journal.begin(work, digest)
        (work / conversion.output.inner).mkdir(exist_ok=True)
        yield work


def _write(conversion: Conversion, options: _Options, work: Path) -> tuple[float, int, int]:
    """Write all files with tensors; returns the time, the bytes that were already written, and the others."""
    ranks, folder, everything = options.ranks, work / conversion.output.inner, units(conversion.output.files)
    there = _there(conversion, options, work, everything)
    left = [unit for unit in everything if unit not in there]
    mine = share(left, [unit.nbytes for unit in left], ranks.rank, ranks.size)

    def write() -> float:
        with (
            journal.Journal(work, ranks.rank) as lines,
            _meter(conversion.name, sum(unit.nbytes for unit in mine), options) as meter,
        ):
            write_units(
                folder,
                conversion.output.files,
                mine,
                conversion.source,
                lines,
                meter,
                sync=options.sync,
                threads=conversion.threads,
            )
            return meter.seconds

    return max(ranks.all_gather(write)), sum(unit.nbytes for unit in there), sum(unit.nbytes for unit in left)


def _there(conversion: Conversion, options: _Options, work: Path, everything: list[Unit]) -> set[Unit]:
    """The units that an earlier run has written, read again to check that they are unchanged."""
    ranks, folder = options.ranks, work / conversion.output.inner
    # Checked once, and all have read before one of them writes.
    noted = list(ranks.run_on_rank0(lambda: journal.noted(work, conversion.output.files, everything)).items())
    mine = share(noted, [unit.nbytes for unit, _ in noted], ranks.rank, ranks.size)
    if not noted:
        return set()

    def check() -> list[Unit]:
        with _meter("resume", sum(unit.nbytes for unit, _ in mine), options) as meter:
            return journal.intact(folder, conversion.output.files, mine, meter)

    there = {unit for part in ranks.all_gather(check) for unit in part}
    if spoilt := len(noted) - len(there):
        conversion.notes.append(
            f"{spoilt} of {len(noted)} parts written by an earlier run have changed since then and are written again"
        )
    return there


@contextlib.contextmanager
def _advice(work: Path, options: _Options) -> Iterator[None]:
    """Advice if files that are kept for the next run are wrong: they would be wrong in that one too."""
    try:
        yield
    except CheckpointError as error:
        if options.resume:
            raise CheckpointError(f"{error}; {work} is unusable: run without --resume to start over") from error
        raise


def _finish_and_prove(conversion: Conversion, options: _Options, work: Path, digest: str) -> None:
    """Write everything else, read back what was written, and compare if requested."""
    ranks = options.ranks

    def finish() -> None:
        with _advice(work, options):
            check_sizes(work / conversion.output.inner, conversion.output.files)
        _remove_others(work, {Path(conversion.output.inner, file.name) for file in conversion.output.files})
        conversion.output.finish(work, digest)

    ranks.run_on_rank0(finish)
    tasks = tasks_of(conversion.plan, ranks)
    nbytes = sum(task.target.nbytes for task in tasks)

    def check() -> dict[str, str]:
        with _no_collection(), _advice(work, options):
            written = conversion.output.open(work)
            if written.specs != conversion.plan.specs:
                raise CheckpointError(f"{work}: the folder's contents differ from what was to be written")
            written.check(task.target.name for task in tasks)
        if options.verify:
            with _meter("verify", nbytes, options) as meter:
                for found in differences(tasks, conversion.source, written, meter):
                    with _advice(work, options):
                        raise CheckpointError(f"{work}: was not written correctly: {found}")
        if not options.checksums:
            return {}
        with _meter("checksums", nbytes, options) as meter:
            return checksums((task.target.name for task in tasks), written, meter)

    sums = ranks.all_gather(check)
    ranks.run_on_rank0(
        lambda: conversion.write_manifest(work, digest, {name: s for part in sums for name, s in part.items()})
    )


def _remove_others(work: Path, tensors: set[Path]) -> None:
    """Remove the files other than tensors that an interrupted run had written."""
    for path in list(leaves(work)):
        name = path.relative_to(work)
        if name not in tensors and name.parts[0] != journal.FOLDER:
            path.unlink()


def tasks_of(plan: Plan, ranks: Ranks) -> list[Task]:
    """This process's part of reading what a plan writes."""
    return share(plan.tasks, [task.target.nbytes for task in plan.tasks], ranks.rank, ranks.size)


def _meter(label: str, total: int, options: _Options) -> Progress:
    ranks = options.ranks
    if ranks.size > 1:
        label = f"{label}, process {ranks.rank} of {ranks.size}"
    return Progress(label, total, shown=options.progress and ranks.first)
