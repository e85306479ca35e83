"""Downloading the URLs in conversations before training.

A download can be stopped at any time and run again; existing files are not downloaded again. A completed one writes a
record of the URLs of each data set (`DownloadRecord`).
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.images import is_picture
from qwen3vl_bridge.data.media.media_access import (
    DownloadRecord,
    UrlCache,
    address_file,
    digest_of,
    read_url,
    shown_url,
)
from qwen3vl_bridge.data.sources.opening import ConversationSource
from qwen3vl_bridge.io.atomic import replace_file

import httpx

MOST_BYTES = 2**30
MOST_REDIRECTS = 5
MOST_DOWN = 3  # URLs of a server in a row that fail, after which no more are requested
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between attempts
TIMEOUT, LONGEST = 15.0, 900.0  # seconds without a byte; seconds for a body
_OLD = 3600  # seconds since the last write, after which an unfinished file is abandoned
_BUSY = (408, 425, 429)
_PORTS = {"http": 80, "https": 443}
_MOST_ENCODINGS = 3  # nested encodings of one path
# First bytes of videos, for servers that do not send a type: MP4 and related formats, Matroska, AVI, MPEG, transport
# streams, Flash, Ogg, Windows Media.
_VIDEO = re.compile(
    rb"....(ftyp|moov|mdat|free|skip|wide)|\x1aE\xdf\xa3|RIFF....AVI |\x00\x00\x01[\xb3\xba]"
    rb"|(.{4})?G.{187}(.{4})?G|FLV|OggS|0&\xb2u",
    re.DOTALL,
)


@dataclass(frozen=True)
class AddressBook(UrlCache):
    """Notes the URLs that are requested from it, with their places in the data, in place of finding their files."""

    noted: list[tuple[str, str]] = field(default_factory=list)

    def of_data(self, data: str) -> AddressBook:
        """Itself: what was recorded does not matter."""
        return self

    def __call__(self, address: str, place: str) -> Path:
        """Note a URL; returns a path that is not read."""
        self.noted.append((address, place))
        return Path(address)


@dataclass(frozen=True)
class FailedDownload:
    """A URL without a file, with the first sample that contains it.

    If it is `final`, the URL was given up: training treats samples with it as bad. Otherwise training stops there.
    """

    address: str
    place: str
    problem: str
    final: bool


@dataclass
class DownloadReport:
    """Numbers of new files and of those that already existed, URLs without a file, and errors of unreadable samples."""

    downloaded: int = 0
    present: int = 0
    failures: list[FailedDownload] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def download(
    sources: Sequence[ConversationSource],
    book: AddressBook,
    fetch: Downloader,
    manifest: Path,
    *,
    workers: int = 16,
    retry: bool = False,
    give_up: bool = False,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> DownloadReport:
    """Download the URLs in conversations. Memory: about 100 bytes per URL, and the failures.

    Args:
        sources: opened with `book` as their `MediaAccess.addresses`.
        book: notes the URLs of a sample.
        fetch: downloads one URL into its cache, which also gets a record of each data set.
        manifest: file of failures as JSON lines, written at the end. Until then failures are appended to
            MANIFEST.unfinished as soon as they are known, after those of earlier downloads that were stopped.
        workers: number of parallel downloads.
        retry: retry URLs that were given up in an earlier run.
        give_up: also give up URLs that did not respond or are not allowed.
        progress: wraps the numbers of all samples.
    """
    cache, report = fetch.cache, DownloadReport()
    steps = iter(progress(range(sum(map(len, sources)))))
    unfinished = manifest.with_name(f"{manifest.name}.unfinished")
    manifest.parent.mkdir(parents=True, exist_ok=True)

    def attempt(address: str, place: str) -> FailedDownload | bool:
        """A failure, or whether the file is new."""
        if cache.path_of(address).is_file():
            return False
        problem, final = cache.problem_of(address), True
        if problem is None or retry:
            cache.problem_file(address).unlink(missing_ok=True)
            try:
                fetch(address, place)
                return True
            except DataError as error:
                problem = str(error).removeprefix(f"{place}: ")
                final = not isinstance(error, Unreachable) or (give_up and not fetch.stopped.is_set())
            if final:
                path = cache.problem_file(address)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, problem.encode())
        failure = FailedDownload(address, place, problem, final)
        log.write(_line(failure))  # append mode writes at the end of the file
        log.flush()
        return failure

    with unfinished.open("ab+") as log:
        log.seek(max(log.tell() - 1, 0))
        if log.read() not in (b"", b"\n"):  # a process was killed in the middle of a line
            log.write(b"\n")
        pool = ThreadPoolExecutor(workers)
        try:
            # Set by set, so that a URL in two of them is requested once.
            for source in sources:
                num_urls, num_before = 0, len(report.failures)
                for result in _in_parallel(pool, attempt, _urls_of(source, book, report.unread, steps), 4 * workers):
                    num_urls += 1
                    if isinstance(result, FailedDownload):
                        report.failures.append(result)
                    else:
                        report.downloaded += result
                        report.present += not result
                failures = report.failures[num_before:]
                given_up = frozenset(digest_of(failure.address) for failure in failures if failure.final)
                if num_urls:
                    record = DownloadRecord(num_urls, len(failures) - len(given_up), given_up)
                    record.write(cache.root, source.recorded_as)
        except BaseException:
            fetch.stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    replace_file(manifest, b"".join(map(_line, report.failures)))
    unfinished.unlink(missing_ok=True)
    return report


def _line(failure: FailedDownload) -> bytes:
    return json.dumps(asdict(failure)).encode() + b"\n"


def _in_parallel[Result](
    pool: ThreadPoolExecutor, work: Callable[..., Result], items: Iterable[tuple[str, str]], most: int
) -> Iterator[Result]:
    """Results of work on each item as they come, with at most so many items under way."""
    running = set[Future[Result]]()
    for item in items:
        running.add(pool.submit(work, *item))
        if len(running) >= most:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    yield from (future.result() for future in as_completed(running))


def _urls_of(
    source: ConversationSource, book: AddressBook, unread: list[str], steps: Iterator[int]
) -> Iterator[tuple[str, str]]:
    """Each URL of a source once, with its place. Advances `steps` by one for each sample."""
    seen = set[bytes]()
    for number, _ in zip(range(len(source)), steps, strict=False):
        book.noted.clear()
        try:
            source[number]
        except DataError as error:
            unread.append(str(error))
            continue
        for address, place in book.noted:
            digest = digest_of(address)
            if digest not in seen:
                seen.add(digest)
                yield address, place


class _Again(Exception):
    """An attempt failed, and another may succeed: the problem, and the server if it gave no response, or a 5xx."""


class Downloader:
    """Downloads URLs into a cache; any number of threads may use one.

    A response that a URL is gone or forbidden (404, 410, 403, any other status except 200 and those of a busy server),
    or whose contents are neither an image nor a video, is permanent: a `DataError`. No response, an interrupted one, or
    that of a busy or failing server (408, 425, 429, 5xx) is `Unreachable` after several attempts. If all attempts fail
    without a response or with 5xx for a few URLs of a server in a row, it gets no more requests, so that not every URL
    waits for a timeout.
    """

    def __init__(self, cache: UrlCache, allowed_urls: Sequence[str]) -> None:
        """Set the target folder and the allowed prefixes of URLs, including those of redirects (see `check_prefix`)."""
        for prefix in allowed_urls:
            check_prefix(prefix)
        self.cache, self._allowed = cache, tuple(allowed_urls)
        self.stopped = threading.Event()  # set: running downloads fail as unreachable, without further attempts
        self._failed = Counter[str]()  # URLs in a row, by server
        self._unfinished = cache.root / "unfinished"
        for path in self._unfinished.glob("*"):  # of killed downloads; running ones write continuously
            with suppress(OSError):  # the download has completed, or is another user's
                if time.time() - path.stat().st_mtime > _OLD:
                    path.unlink()
        # Images and videos are already compressed, and a small compressed response may expand to a large one.
        headers = {"User-Agent": "qwen3vl-bridge", "Accept-Encoding": "identity"}
        self._client = httpx.Client(timeout=TIMEOUT, headers=headers, limits=httpx.Limits(max_connections=None))

    def __call__(self, address: str, place: str) -> None:
        """Download a URL, which stands at `place`; errors as in the class, and `Unreachable` for one not allowed."""
        url = allowed_url(address, self._allowed, place)
        for attempt, pause in enumerate((*WAITS, None), start=1):
            down = None
            try:
                return self._attempt(url, self.cache.path_of(address), place)
            except _Again as error:
                problem, down = error.args
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx.DecodingError as error:
                raise DataError(place, f"found {str(url)!r} damaged ({error}), expected an image or a video") from error
            # Random, so that the threads do not retry at the same time.
            if pause is None or self.stopped.wait(pause * (0.5 + random.random())):
                if down is not None and not self.stopped.is_set():
                    self._failed[down] += 1
                raise Unreachable(
                    place, f"found {str(url)!r} out of reach after {attempt} attempts ({problem}), expected an answer"
                )
        return None

    def _attempt(self, url: httpx.URL, path: Path, place: str) -> None:
        """Store a URL's contents. Redirects are followed here, not by the library, so that each address is checked."""
        asked = url
        for _ in range(MOST_REDIRECTS + 1):
            server = asked.netloc.decode("ascii")
            if self._failed[server] >= MOST_DOWN:
                raise Unreachable(
                    place,
                    f"found {str(asked)!r} not requested, because {MOST_DOWN} URLs of {server} in a row failed, "
                    "expected a server that responds",
                )
            try:
                response = self._client.send(self._client.build_request("GET", asked), stream=True)
            except (httpx.TimeoutException, httpx.NetworkError, httpx.ProxyError) as error:
                raise _Again(f"{type(error).__name__}: {error}", server) from error
            except (httpx.InvalidURL, ValueError) as error:  # some of the redirects to something other than a URL
                problem = f"found {str(asked)!r} redirected to no address ({error})"
                raise DataError(place, f"{problem}, expected an image or a video") from error
            with closing(response):
                if response.status_code >= 500:
                    raise _Again(f"status {response.status_code}", server)
                self._failed.pop(server, None)
                if response.next_request is None:
                    if response.status_code in _BUSY:
                        raise _Again(f"status {response.status_code}", None)
                    return self._store(response, url, path, place)
            asked = allowed_url(str(response.next_request.url), self._allowed, f"{place}: {url} leads elsewhere")
        raise DataError(
            place, f"found {str(url)!r} redirected over {MOST_REDIRECTS} times, expected an image or a video"
        )

    def _store(self, response: httpx.Response, url: httpx.URL, path: Path, place: str) -> None:
        where, wanted = f"{place}: {url}", "expected an image or a video"
        kind = response.headers.get("content-type", "").strip().lower()
        if response.status_code != 200:
            raise DataError(where, f"found the status {response.status_code} {response.reason_phrase}, expected 200")
        if kind.startswith(("text/", "application/json")):
            raise DataError(where, f"found a page ({kind}), {wanted}")
        length = response.headers.get("content-length", "")
        _check_size(int(length) if length.isdecimal() else 0, where)
        unfinished = self._unfinished / uuid.uuid4().hex
        for folder in (path.parent, self._unfinished):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            # The library's limit restarts with each byte: a server that sends single bytes slowly would block a thread.
            end = time.monotonic() + LONGEST
            with unfinished.open("xb") as file:
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    _check_size(file.tell(), where)
                    if time.monotonic() > end or self.stopped.is_set():
                        raise httpx.ReadTimeout(f"{file.tell():,} bytes so far")
            with unfinished.open("rb") as file:
                start = file.read(512)
            if not start:
                raise DataError(where, f"found 0 bytes, {wanted}")
            # There are many video formats, so a server's type of a video is accepted unchecked.
            is_video = kind.startswith("video/") or (not kind.startswith("image/") and _VIDEO.match(start))
            if not is_video and not is_picture(unfinished):
                raise DataError(where, f"found contents that begin {start[:16]!r} ({kind or 'no type'}), {wanted}")
            address_file(path).write_text(str(url), "utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _check_size(found: int, where: str) -> None:
    if found > MOST_BYTES:
        raise DataError(where, f"found at least {found:,} bytes, expected at most {MOST_BYTES:,}")


def check_prefix(prefix: str) -> None:
    """Refuse prefixes that cannot begin a URL, or would allow more than they seem to (ValueError)."""
    if _is_scheme(prefix):
        return
    url = read_url(prefix)
    if url is None or url.scheme not in _PORTS or not url.host or re.search(r"[@?#*\\\s]", prefix) or _climbs(url):
        raise ValueError(
            f"allowed_urls has {prefix!r}, expected a scheme and a host, and a path if need be, such as "
            "'https://images.example.org/' or 'https://images.example.org/public/'; 'https://' allows every URL "
            "of that scheme"
        )


def allowed_url(address: str, prefixes: Sequence[str], place: str) -> httpx.URL:
    """The URL of a record or a redirect, as it will be requested.

    Scheme, host and port are compared whole, paths by whole segments: "https://example.org/a" allows
    "https://example.org/a/1.png", but neither "https://example.org/ab" nor "https://example.org.evil.com/a". A
    `DataError` for what is no URL, `Unreachable` for one that the current prefixes do not allow.
    """
    url = read_url(address)
    if url is None or not url.host:
        raise DataError(place, f"found {shown_url(address)}, expected the URL of an image or a video")
    if url.userinfo or _climbs(url) or not any(_begins(url, prefix) for prefix in prefixes):
        raise Unreachable(
            place,
            f"found the URL {shown_url(address)}, expected one that begins with {' or '.join(prefixes)} "
            "(--allowed-urls)",
        )
    return url.copy_with(fragment=None)


def _is_scheme(prefix: str) -> bool:
    return prefix.lower() in [f"{scheme}://" for scheme in _PORTS]


def _begins(url: httpx.URL, prefix: str) -> bool:
    if _is_scheme(prefix):
        return prefix.lower() == f"{url.scheme}://"
    start = httpx.URL(prefix)
    server, allowed = ((one.scheme, one.raw_host, one.port or _PORTS.get(one.scheme)) for one in (url, start))
    folder = _path(start).rstrip("/")
    inside = _path(url).startswith(f"{folder}/") or (_path(url) == folder == _path(start))
    return server == allowed and inside


def _path(url: httpx.URL) -> str:
    """The path as it is sent, with its percent signs."""
    return url.raw_path.decode("ascii").partition("?")[0]


def _climbs(url: httpx.URL) -> bool:
    """Whether a server could take the path for another one: plain '..' is resolved here, encoded ones are not."""
    path = _path(url)
    for _ in range(_MOST_ENCODINGS):
        path = unquote(path)
    segments = (segment.partition(";")[0] for segment in re.split(r"[/\\]", path))
    return unquote(path) != path or any(segment in (".", "..") for segment in segments)
