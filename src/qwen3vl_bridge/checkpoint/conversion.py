"""The course of every conversion: check, write aside, prove, put in place.

What lives here: the order of the steps and what all processes do in each. What may not: what is converted into what
(`importing.py`, `exporting.py`, `reformatting.py`), how a step is done.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from qwen3vl_bridge.checkpoint import journal, staging
from qwen3vl_bridge.checkpoint.comparing import checksums, differences
from qwen3vl_bridge.checkpoint.copying import check_sizes, write_units
from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.estimating import estimate
from qwen3vl_bridge.checkpoint.files import OutputFile, Unit, share, units
from qwen3vl_bridge.checkpoint.json_files import write_object
from qwen3vl_bridge.checkpoint.manifest import MANIFEST, check_replaceable, files_of, tool
from qwen3vl_bridge.checkpoint.plan import Plan, Task
from qwen3vl_bridge.checkpoint.progress import Progress
from qwen3vl_bridge.checkpoint.ranks import Ranks
from qwen3vl_bridge.checkpoint.reports import ConversionReport
from qwen3vl_bridge.checkpoint.tensors import TensorSource

# For the files beside the tensors.
_OVERHEAD = 64 << 20


class How(TypedDict, total=False):
    """How a conversion is carried out; every entry may be left out.

    Attributes:
        overwrite: whether to replace an earlier result at that place. Anything else there is an error.
        resume: whether to continue what an earlier run with the same source and options left, and to leave what is
            written so far if this one fails. What a run with others left is an error; otherwise it is removed.
        verify: whether to compare what was written with the source, bit for bit, before it is put into place.
        checksums: whether to put a checksum of every tensor into the manifest.
        dry_run: whether to stop before anything is written but a sample without a name, to measure the disk.
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
class _Conduct:
    """`How` with what is left out filled in."""

    overwrite: bool = False
    resume: bool = False
    verify: bool = False
    checksums: bool = False
    dry_run: bool = False
    progress: bool = False
    sync: bool = True
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True)
class Conversion:
    """What is converted into what.

    Attributes:
        name: what it is called.
        origin: what was asked to be read, in the user's words.
        target: the result's folder, to be made.
        plan: tensor by tensor.
        source: what the plan reads.
        folders: folders that are read meanwhile.
        settings: whatever else the result depends on, fit for JSON; the manifest has it.
        files: the files with tensors.
        inner: the folder in the result that they are in.
        known: the files that an earlier result in a folder may have, relative to it.
        finish: writes all other files, the manifest aside, given the result's folder and a digest of the plan.
        open: opens a result's tensors and checks that all its files are as they should be.
        notes: what the user should know.
        threads: how many of a process read the source at a time.
    """

    name: str
    origin: str
    target: Path
    plan: Plan
    source: TensorSource
    folders: tuple[Path, ...]
    settings: dict[str, Any]
    files: list[OutputFile]
    inner: str
    known: Callable[[Path], Iterable[str]]
    finish: Callable[[Path, str], None]
    open: Callable[[Path], TensorSource]
    notes: list[str]
    threads: int = 2

    def digest(self, *, sync: bool) -> str:
        """Tells one plan from another: source files, where every element comes from, where every byte goes.

        Args:
            sync: whether what is written is waited for; what was not is nothing to go on from.
        """
        digest = hashlib.sha256(repr((tool(), self.name, sync)).encode())
        for path in self.source.files:
            found = path.stat()
            digest.update(repr((str(path.resolve()), found.st_size, found.st_mtime_ns)).encode())
        for task in self.plan.tasks:
            digest.update(repr((task.target, tuple(task.pieces))).encode())
        for file in self.files:
            digest.update(repr((file.name, [len(segment) for segment in file.segments])).encode())
        return digest.hexdigest()

    def write_manifest(self, result: Path, digest: str, sums: dict[str, str]) -> None:
        """Write what the result says of itself."""
        plan = self.plan
        made = {"tensors": len(plan.tasks), "parameters": plan.numel, "bytes": plan.nbytes, "dtypes": plan.dtypes}
        made |= {"cast": len(plan.cast), "transposed": len(plan.transposed), "digest": digest}
        made["files"] = files_of(result, self.inner)
        manifest = tool() | {"source": self.origin} | self.settings | made
        write_object(result / self.inner / MANIFEST, manifest | ({"sha256": sums} if sums else {}))

    def check_replaceable(self, folder: Path) -> None:
        """Check that a folder is an earlier result, and nothing besides.

        Raises:
            CheckpointError: it is not.
        """
        check_replaceable(folder, self.inner, self.known)


def carry_out(planned: Callable[[], Conversion], how: How) -> ConversionReport:
    """Plan a conversion and do it.

    Args:
        planned: makes the plan, the same in every process.
        how: how to do it.

    Raises:
        CheckpointError: the source, an option, the target or the file system is not as it must be, or a process failed.
            The target is as it was before.
    """
    conduct = _Conduct(**how)
    ranks = conduct.ranks
    with _no_collection():
        conversion = ranks.alike(planned)
    target = conversion.target
    needed = sum(file.nbytes for file in conversion.files) + _OVERHEAD
    ranks.once(lambda: _check_target(conversion, conduct))
    report = ConversionReport.of(conversion, needed, staging.free_space(target), ranks.size)
    if conduct.dry_run:
        return replace(report, estimate=ranks.once(lambda: _estimate(conversion, conduct)))
    digests = ranks.each(lambda: conversion.digest(sync=conduct.sync))
    if len(set(digests)) > 1:
        raise CheckpointError(f"{conversion.origin} is not the same for all {ranks.size} processes; do they share it?")
    with contextlib.ExitStack() as stack:
        work = ranks.once(lambda: stack.enter_context(_begun(conversion, conduct, digests[0], needed)))
        seconds, resumed, written = _write(conversion, conduct, work)
        with _advice(work, conduct):
            _finish_and_prove(conversion, conduct, work, digests[0])
        if ranks.once(lambda: conversion.digest(sync=conduct.sync)) != digests[0]:
            raise CheckpointError(f"{conversion.origin} changed while it was read; {work} is of no use")
        into_place = stack.pop_all()
    ranks.once(into_place.close)
    return report.done(ranks.once(lambda: conversion.notes), seconds, resumed, written)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A plan is a hundred thousand objects, all of them needed; looking for garbage among them doubles its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _estimate(conversion: Conversion, conduct: _Conduct) -> float:
    """Seconds all of it may take."""
    return estimate(
        conversion.plan,
        conversion.source,
        staging.disk_of(conversion.target),
        processes=conduct.ranks.size,
        passes=2 * conduct.verify + conduct.checksums,
    )


def _check_target(conversion: Conversion, conduct: _Conduct) -> None:
    staging.check_target(
        conversion.target,
        overwrite=conduct.overwrite,
        replaceable=conversion.check_replaceable,
        sources=conversion.folders,
    )


@contextlib.contextmanager
def _begun(conversion: Conversion, conduct: _Conduct, digest: str, needed: int) -> Iterator[Path]:
    """The folder in which the result grows, with a journal."""

    def claim(folder: Path) -> bool:
        begun = journal.plan_of(folder) if conduct.resume else ""
        if len(begun) == len(digest) and begun != digest:
            raise CheckpointError(
                f"{folder} is the unfinished result of another source, other options or another version, so --resume "
                "does not go on from it; run as that was run, or without --resume, which removes it and starts anew"
            )
        return begun == digest

    target = conversion.target
    with staging.staged(
        target,
        conversion.notes.append,
        replace=conversion.check_replaceable if conduct.overwrite else None,
        sync=conduct.sync,
        claim=claim,
        keep=conduct.resume,
    ) as work:
        staging.check_space(target, needed - staging.space_of(work))
        journal.begin(work, digest)
        (work / conversion.inner).mkdir(exist_ok=True)
        yield work


def _write(conversion: Conversion, conduct: _Conduct, work: Path) -> tuple[float, int, int]:
    """Write all files with tensors; returns how long it took, the bytes that were there already, and the others."""
    ranks, folder, everything = conduct.ranks, work / conversion.inner, units(conversion.files)
    there = _there(conversion, conduct, work, everything)
    left = [unit for unit in everything if unit not in there]
    mine = share(left, [unit.nbytes for unit in left], ranks.rank, ranks.size)

    def write() -> float:
        with (
            journal.Journal(work, ranks.rank) as lines,
            _meter(conversion.name, sum(unit.nbytes for unit in mine), conduct) as meter,
        ):
            write_units(
                folder,
                conversion.files,
                mine,
                conversion.source,
                lines,
                meter,
                sync=conduct.sync,
                threads=conversion.threads,
            )
            return meter.seconds

    return max(ranks.each(write)), sum(unit.nbytes for unit in there), sum(unit.nbytes for unit in left)


def _there(conversion: Conversion, conduct: _Conduct, work: Path, everything: list[Unit]) -> set[Unit]:
    """The units that an earlier run has written, read again to see that they still are what it wrote."""
    ranks, folder = conduct.ranks, work / conversion.inner
    # Asked once, and all have read before one of them writes.
    noted = list(ranks.once(lambda: journal.noted(work, conversion.files, everything)).items())
    mine = share(noted, [unit.nbytes for unit, _ in noted], ranks.rank, ranks.size)
    if not noted:
        return set()

    def check() -> list[Unit]:
        with _meter("resume", sum(unit.nbytes for unit, _ in mine), conduct) as meter:
            return journal.intact(folder, conversion.files, mine, meter)

    there = {unit for part in ranks.each(check) for unit in part}
    if spoilt := len(noted) - len(there):
        conversion.notes.append(
            f"{spoilt} of {len(noted)} parts that an earlier run had written are not as it left them; written once more"
        )
    return there


@contextlib.contextmanager
def _advice(work: Path, conduct: _Conduct) -> Iterator[None]:
    """What is wrong with files that stay for the next run would be wrong in that one too."""
    try:
        yield
    except CheckpointError as error:
        if conduct.resume:
            raise CheckpointError(f"{error}; {work} is of no use: run without --resume, which starts anew") from error
        raise


def _finish_and_prove(conversion: Conversion, conduct: _Conduct, work: Path, digest: str) -> None:
    """Write everything else, read back what was written, and compare if asked to."""
    ranks = conduct.ranks
    ranks.once(lambda: check_sizes(work / conversion.inner, conversion.files))
    ranks.once(lambda: conversion.finish(work, digest))
    tasks = tasks_of(conversion.plan, ranks)
    nbytes = sum(task.target.nbytes for task in tasks)

    def check() -> dict[str, str]:
        with _no_collection():
            written = conversion.open(work)
            if written.specs != conversion.plan.specs:
                raise CheckpointError(f"{work}: what is there is not what was to be written")
            written.check(task.target.name for task in tasks)
        if conduct.verify:
            with _meter("verify", nbytes, conduct) as meter:
                for found in differences(tasks, conversion.source, written, meter):
                    raise CheckpointError(f"{work}: was not written as it should be: {found}")
        if not conduct.checksums:
            return {}
        with _meter("checksums", nbytes, conduct) as meter:
            return checksums((task.target.name for task in tasks), written, meter)

    sums = ranks.each(check)
    ranks.once(lambda: conversion.write_manifest(work, digest, {name: s for part in sums for name, s in part.items()}))


def tasks_of(plan: Plan, ranks: Ranks) -> list[Task]:
    """This process's share of reading what a plan makes."""
    return share(plan.tasks, [task.target.nbytes for task in plan.tasks], ranks.rank, ranks.size)


def _meter(label: str, total: int, conduct: _Conduct) -> Progress:
    ranks = conduct.ranks
    if ranks.size > 1:
        label = f"{label}, process {ranks.rank} of {ranks.size}"
    return Progress(label, total, shown=conduct.progress and ranks.first)
