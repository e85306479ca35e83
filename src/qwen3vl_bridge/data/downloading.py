"""Downloading what conversations refer to by address, before training.

What lives here: finding the addresses in a source, downloading them side by side, what is said of those that failed.
What may not: one download (`media/downloads.py`), options of the command (`cli/data.py`).

It can be stopped at any time and run again: what is there is not downloaded again. When it has come to its end, there
is a record of what became of the addresses of each data set (`media/download_record.py`).
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
from qwen3vl_bridge.files.atomic import replace_file


class AddressBook:
    """Stands where a `UrlCache` does, and notes the addresses that it is asked for."""

    def __init__(self) -> None:
        """Note none yet."""
        self.noted: list[tuple[str, str]] = []

    def __call__(self, address: str, place: str) -> Path:
        """A path that nothing is read from; arguments as `UrlCache` has them."""
        self.noted.append((address, place))
        return Path(address)


@dataclass(frozen=True)
class Failure:
    """An address of which there is no file.

    Attributes:
        address: it.
        place: of the first sample that has it.
        problem: what was found, and what was expected.
        final: whether it was given up: training takes samples with it as bad ones. Without that, training stops there.
    """

    address: str
    place: str
    problem: str
    final: bool


@dataclass
class DownloadReport:
    """What became of the addresses in a source.

    Attributes:
        downloaded: files that are new.
        present: files that were there.
        failures: addresses without a file.
        unread: what is wrong with samples that could not be read, whose addresses are not known.
    """

    downloaded: int = 0
    present: int = 0
    failures: list[Failure] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DownloadSettings:
    """How addresses are downloaded.

    Attributes:
        workers: downloads at a time.
        retry: try those anew that were given up in an earlier run.
        give_up: give those up, too, that did not answer or are not allowed.
    """

    workers: int = 16
    retry: bool = False
    give_up: bool = False


class Manifest:
    """A file of failures as JSON lines: those of a download that came to its end, and until then another beside it.

    That one has each failure as soon as it is known, also those of earlier downloads that were stopped, and goes when
    the file is written anew. Any number of threads may add to it.
    """

    def __init__(self, path: Path) -> None:
        """Begin, or go on where a download was stopped.

        Args:
            path: of the whole one.

        Raises:
            OSError: it cannot be written there.
        """
        self.path, self.unfinished = path, path.with_name(f"{path.name}.unfinished")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.unfinished.open("ab+")
        self._file.seek(max(self._file.tell() - 1, 0))
        if self._file.read() not in (b"", b"\n"):  # a process was killed in the middle of a line
            self._file.write(b"\n")

    def add(self, failure: Failure) -> None:
        """Write down a failure."""
        self._file.write(_line(failure))  # at the end, wherever others have written
        self._file.flush()

    def close(self) -> None:
        """Stop before the end. Without a failure there is nothing to keep."""
        self._file.close()
        if not self.unfinished.stat().st_size:
            self.unfinished.unlink()

    def finish(self, failures: Sequence[Failure]) -> None:
        """Have the whole of them at the file's own place, wholly or not at all."""
        self._file.close()
        replace_file(self.path, b"".join(map(_line, failures)))
        self.unfinished.unlink(missing_ok=True)


def _line(failure: Failure) -> bytes:
    return json.dumps(asdict(failure)).encode() + b"\n"


@dataclass
class _Set:
    """What became of the addresses of one data set.

    Attributes:
        name: what its record is called.
        total: addresses.
        missing: of them neither there nor given up.
        given_up: digests.
    """

    name: str
    total: int = 0
    missing: int = 0
    given_up: list[bytes] = field(default_factory=list)


class _Wanted(NamedTuple):
    """An address that a data set has, and where it stands first."""

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
    """Download what the conversations of a source refer to.

    Memory: some 100 bytes an address, and the failures.

    Args:
        source: opened with `book` as its `MediaAccess.addresses`.
        book: what notes the addresses.
        fetch: one download.
        cache: where files are kept, and a record of each data set.
        settings: how many at a time, and what to do with failures.
        manifest: where failures are written down.
        progress: passes on the numbers of samples, and may show them.

    Raises:
        OSError: the cache or the manifest cannot be written to.
    """
    report, sets = DownloadReport(), list[_Set]()
    wanted = _addresses(source, book, report, sets, progress)
    pool, running = ThreadPoolExecutor(settings.workers), dict[Future[Failure | bool], _Wanted]()
    try:
        for one in wanted:
            if running and next(reversed(running.values())).data is not one.data:
                _collect(running, report, ALL_COMPLETED)  # what two sets have is asked for once
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
    """Each address once for each data set, which begins with its first sample and is added to `sets`."""
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
    """A failure, which is written down; or whether the file is new."""
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
    """Wait for downloads, and take those that are done."""
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
