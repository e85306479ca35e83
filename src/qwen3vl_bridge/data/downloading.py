"""Downloading the URLs in conversations before training.

A download can be stopped at any time and run again; existing files are not downloaded again. A completed download
writes a record of the URLs of each data set (`media/download_record.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.download_record import DownloadRecord
from qwen3vl_bridge.data.media.downloads import Downloader
from qwen3vl_bridge.data.media.url_cache import UrlCache, digest_of
from qwen3vl_bridge.data.sources.mixture import Mixture
from qwen3vl_bridge.data.sources.opening import ConversationSource
from qwen3vl_bridge.io.atomic import replace_file


class AddressBook:
    """Replaces a `UrlCache`, and records the URLs that are requested from it."""

    def __init__(self) -> None:
        """Start with no URLs."""
        self.noted: list[tuple[str, str]] = []

    def __call__(self, address: str, place: str) -> Path:
        """Record a URL; returns a path that is not read. Arguments as for `UrlCache`."""
        self.noted.append((address, place))
        return Path(address)


@dataclass(frozen=True)
class Failure:
    """A URL without a file.

    Attributes:
        address: the URL.
        place: the first sample that contains it.
        problem: what was found, and what was expected.
        final: whether the URL was given up: training treats samples with it as bad. Otherwise training stops there.
    """

    address: str
    place: str
    problem: str
    final: bool


@dataclass
class DownloadReport:
    """Result of downloading the URLs in a source.

    Attributes:
        downloaded: number of new files.
        present: number of files that already existed.
        failures: URLs without a file.
        unread: errors of samples that could not be read, whose URLs are unknown.
    """

    downloaded: int = 0
    present: int = 0
    failures: list[Failure] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DownloadSettings:
    """Settings of a download.

    Attributes:
        workers: number of parallel downloads.
        retry: retry URLs that were given up in an earlier run.
        give_up: also give up URLs that did not respond or are not allowed.
    """

    workers: int = 16
    retry: bool = False
    give_up: bool = False


class Manifest:
    """A file of failures as JSON lines, written when a download completes; until then, an unfinished file next to it.

    The unfinished file contains each failure as soon as it is known, including those of earlier downloads that were
    stopped, and is removed when the complete file is written. Any number of threads may add failures.
    """

    def __init__(self, path: Path) -> None:
        """Create the unfinished file, or continue that of a stopped download.

        Args:
            path: path of the complete file.

        Raises:
            OSError: the file cannot be written.
        """
        self.path, self.unfinished = path, path.with_name(f"{path.name}.unfinished")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.unfinished.open("ab+")
        self._file.seek(max(self._file.tell() - 1, 0))
        if self._file.read() not in (b"", b"\n"):  # a process was killed in the middle of a line
            self._file.write(b"\n")

    def add(self, failure: Failure) -> None:
        """Append a failure."""
        self._file.write(_line(failure))  # append mode writes at the end of the file
        self._file.flush()

    def close(self) -> None:
        """Close after an incomplete download; an empty file is removed."""
        self._file.close()
        if not self.unfinished.stat().st_size:
            self.unfinished.unlink()

    def finish(self, failures: Sequence[Failure]) -> None:
        """Write the complete file atomically, and remove the unfinished one."""
        self._file.close()
        replace_file(self.path, b"".join(map(_line, failures)))
        self.unfinished.unlink(missing_ok=True)


def _line(failure: Failure) -> bytes:
    return json.dumps(asdict(failure)).encode() + b"\n"


@dataclass
class _Set:
    """Counts of the URLs of one data set."""

    name: str
    total: int = 0
    missing: int = 0
    given_up: list[bytes] = field(default_factory=list)


class _Wanted(NamedTuple):
    """A URL of a data set, and the first sample that contains it."""

    address: str
    place: str
    data: _Set


def download(
    source: ConversationSource | Mixture,
    book: AddressBook,
    fetch: Downloader,
    cache: UrlCache,
    settings: DownloadSettings,
    manifest: Manifest,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> DownloadReport:
    """Download the URLs in the conversations of a source.

    Memory: about 100 bytes per URL, and the failures.

    Args:
        source: opened with `book` as its `MediaAccess.addresses`.
        book: records the URLs of a sample.
        fetch: downloads one URL.
        cache: folder of the files, and of a record of each data set.
        settings: number of parallel downloads, and treatment of failures.
        manifest: file to which failures are written.
        progress: iterates over the indices of samples, and may show progress.

    Raises:
        OSError: the cache or the manifest cannot be written.
    """
    report, sets = DownloadReport(), list[_Set]()
    wanted = _addresses(source, book, report, sets, progress)
    pool, running = ThreadPoolExecutor(settings.workers), dict[Future[Failure | bool], _Wanted]()
    try:
        for one in wanted:
            if running and next(reversed(running.values())).data is not one.data:
                _collect(running, report, ALL_COMPLETED)  # so that a URL in two sets is requested once
            running[pool.submit(_one, one, fetch, cache, settings, manifest)] = one
            if len(running) >= 4 * settings.workers:
                _collect(running, report, FIRST_COMPLETED)
        _collect(running, report, ALL_COMPLETED)
    except BaseException:
        fetch.stop()
        pool.shutdown(cancel_futures=True)
        manifest.close()
        raise
    pool.shutdown()
    for data in sets:
        if data.total:
            DownloadRecord.of(data.total, data.missing, data.given_up).write(cache.root, data.name)
    manifest.finish(report.failures)
    return report


def _addresses(
    source: ConversationSource | Mixture,
    book: AddressBook,
    report: DownloadReport,
    sets: list[_Set],
    progress: Callable[[Sequence[int]], Iterable[int]],
) -> Iterator[_Wanted]:
    """Each URL once per data set; a data set is appended to `sets` at its first sample."""
    sources, seen = source.sources if isinstance(source, Mixture) else (source,), set[bytes]()
    for number in progress(range(len(source))):
        which = source.set_of(number) if isinstance(source, Mixture) else 0
        while len(sets) <= which:
            sets.append(_Set(sources[len(sets)].recorded_as))
            seen.clear()
        book.noted.clear()
        try:
            source[number]
        except DataError as error:
            report.unread.append(str(error))
            book.noted.clear()
        for address, place in book.noted:
            digest = digest_of(address)[:20]
            if digest not in seen:
                seen.add(digest)
                sets[which].total += 1
                yield _Wanted(address, place, sets[which])


def _one(
    wanted: _Wanted, fetch: Downloader, cache: UrlCache, settings: DownloadSettings, manifest: Manifest
) -> Failure | bool:
    """A failure, which is also written to the manifest; or whether the file is new."""
    result = _fetched(wanted.address, wanted.place, fetch, cache, settings)
    if isinstance(result, Failure):
        manifest.add(result)
    return result


def _fetched(
    address: str, place: str, fetch: Downloader, cache: UrlCache, settings: DownloadSettings
) -> Failure | bool:
    if cache.path_of(address).is_file():
        return False
    if (known := cache.problem_of(address)) is not None and not settings.retry:
        return Failure(address, place, known, final=True)
    cache.forget_problem(address)
    try:
        fetch(address, place)
    except DataError as error:
        problem = str(error).removeprefix(f"{place}: ")
        final = not isinstance(error, Unreachable) or (settings.give_up and not fetch.stopped)
        if final:
            cache.give_up(address, problem)
        return Failure(address, place, problem, final)
    return True


def _collect(running: dict[Future[Failure | bool], _Wanted], report: DownloadReport, when: str) -> None:
    """Wait for downloads, and add the completed ones to the report."""
    for done in wait(running, return_when=when).done:
        _add(running.pop(done), done.result(), report)


def _add(wanted: _Wanted, result: Failure | bool, report: DownloadReport) -> None:
    if not isinstance(result, Failure):
        report.downloaded += result
        report.present += not result
        return
    report.failures.append(result)
    if result.final:
        wanted.data.given_up.append(digest_of(wanted.address))
    else:
        wanted.data.missing += 1
