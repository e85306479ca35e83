"""Downloading what conversations refer to by address, before training.

What lives here: finding the addresses in a source, downloading them side by side, what is said of those that failed.
What may not: one download (`media/downloads.py`), options of the command (`cli/data.py`).

It can be stopped at any time and run again: what is there is not downloaded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.downloads import Downloader
from qwen3vl_bridge.data.media.url_cache import UrlCache
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

    def write_manifest(self, path: Path) -> None:
        """Write the failures as JSON lines, in place of what is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(json.dumps(asdict(failure)) + "\n" for failure in self.failures).encode())


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


def download(
    source: ConversationSource,
    book: AddressBook,
    fetch: Downloader,
    cache: UrlCache,
    settings: DownloadSettings,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> DownloadReport:
    """Download what the conversations of a source refer to.

    Memory: some 100 bytes an address, and the failures.

    Args:
        source: opened with `book` as its `MediaAccess.addresses`.
        book: what notes the addresses.
        fetch: one download.
        cache: where files are kept.
        settings: how many at a time, and what to do with failures.
        progress: passes on the numbers of samples, and may show them.

    Raises:
        OSError: the cache cannot be written to.
    """
    report = DownloadReport()
    pool = ThreadPoolExecutor(settings.workers)
    running = set()
    try:
        for address, place in _addresses(source, book, report, progress):
            running.add(pool.submit(_one, address, place, fetch, cache, settings))
            if len(running) >= 4 * settings.workers:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    _add(one.result(), report)
        for one in running:
            _add(one.result(), report)
    except BaseException:
        fetch.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return report


def _addresses(
    source: ConversationSource,
    book: AddressBook,
    report: DownloadReport,
    progress: Callable[[Sequence[int]], Iterable[int]],
) -> Iterator[tuple[str, str]]:
    """Each address once, with its place."""
    seen = set[bytes]()
    for number in progress(range(len(source))):
        book.noted.clear()
        try:
            source[number]
        except DataError as error:
            report.unread.append(str(error))
            book.noted.clear()
        for address, place in book.noted:
            digest = sha256(address.encode("utf-8", "backslashreplace")).digest()[:20]
            if digest not in seen:
                seen.add(digest)
                yield address, place


def _one(address: str, place: str, fetch: Downloader, cache: UrlCache, settings: DownloadSettings) -> Failure | bool:
    """A failure; or whether the file is new."""
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


def _add(result: Failure | bool, report: DownloadReport) -> None:
    if isinstance(result, Failure):
        report.failures.append(result)
    else:
        report.downloaded += result
        report.present += not result
