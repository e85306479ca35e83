"""Download the URLs in conversations before training.

A download can be stopped at any time and run again; existing files are not downloaded again. A completed download
writes a record of the URLs of each data set (`DownloadRecord`).
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

from qwen3vl_bridge.core.atomic import replace_file
from qwen3vl_bridge.data.errors import DataError, DataUnavailable
from qwen3vl_bridge.data.media import (
    DownloadRecord,
    UrlCache,
    address_file,
    is_image_file,
    parse_url,
    quote_url,
    url_digest,
)
from qwen3vl_bridge.data.sources import ConversationSource

import httpx

MOST_BYTES = 2**30
MOST_REDIRECTS = 5
MOST_DOWN = 3  # consecutive failed URLs of a server after which no more are requested
FIRST_ATTEMPTS = 2  # attempts for a server that has not responded yet
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between attempts
CONNECT_TIMEOUT, TIMEOUT, LONGEST = 5.0, 15.0, 900.0  # seconds to connect; without receiving data; for a complete body
RECONNECT = 10.0  # seconds after the last URL until hosts that could not be connected to are retried once
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
class UrlCollector(UrlCache):
    """A `UrlCache` that collects the requested URLs and their locations in the data, instead of finding files."""

    collected: list[tuple[str, str]] = field(default_factory=list)

    def for_data(self, data: str) -> UrlCollector:
        """Return this collector, because it ignores the records of earlier downloads."""
        return self

    def __call__(self, address: str, place: str) -> Path:
        """Collect a URL and its location; return a placeholder path that is never opened."""
        self.collected.append((address, place))
        return Path(address)


@dataclass(frozen=True)
class FailedDownload:
    """A URL that could not be downloaded, with the first sample that contains it.

    If it is `final`, later downloads do not request the URL again.
    """

    address: str
    place: str
    problem: str
    final: bool


@dataclass
class DownloadReport:
    """Result of a download: numbers of new and existing files, failed URLs, and errors of unreadable samples."""

    downloaded: int = 0
    present: int = 0
    failures: list[FailedDownload] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def download(
    sources: Sequence[ConversationSource],
    book: UrlCollector,
    fetch: Downloader,
    manifest: Path,
    *,
    workers: int = 16,
    retry: bool = False,
    give_up: bool = False,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> DownloadReport:
    """Download the URLs in conversations, and return a report with the numbers of files and the failed downloads.

    About 100 bytes of memory are needed per URL, and more per failure.

    Args:
        sources: the data sets, opened with `book` as their `MediaAccess.url_cache`.
        book: collects the URLs of a sample.
        fetch: downloads one URL into its cache. The download record of each data set is written there too.
        manifest: file that lists the failed URLs as JSON lines, written at the end. Until then each failure is
            appended to MANIFEST.unfinished, which also keeps the failures of earlier downloads that were stopped.
        workers: number of parallel downloads.
        retry: retry URLs that failed permanently in an earlier run.
        give_up: record URLs that did not respond, or that are not allowed, as permanently failed.
        progress: wraps the iterator over all samples, for example `tqdm`.
    """
    cache, report = fetch.cache, DownloadReport()
    steps = iter(progress(range(sum(map(len, sources)))))
    unfinished = manifest.with_name(f"{manifest.name}.unfinished")
    manifest.parent.mkdir(parents=True, exist_ok=True)

    unconnected, reconnects = set[str](), True  # URLs to request once more; whether that is still to be done

    def attempt(address: str, place: str) -> FailedDownload | bool:
        """Download one URL; return the failure, True for a new file, or False if the file existed."""
        if cache.path_of(address).is_file():
            return False
        problem, final = cache.failure_reason(address), True
        if problem is None or retry:
            cache.failure_file(address).unlink(missing_ok=True)
            try:
                fetch(address, place)
                return True
            except DataError as error:
                problem = str(error).removeprefix(f"{place}: ")
                final = not isinstance(error, DataUnavailable) or (give_up and not fetch.stopped.is_set())
                if reconnects and isinstance(error, _NoConnection):
                    unconnected.add(address)
                    final = False
            if final:
                path = cache.failure_file(address)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, problem.encode())
        failure = FailedDownload(address, place, problem, final)
        log.write(_to_json_line(failure))  # append mode writes at the end of the file
        log.flush()
        return failure

    def attempt_all(urls: Iterable[tuple[str, str]]) -> tuple[int, list[FailedDownload]]:
        """Download URLs in the thread pool; return the number of URLs, and the failures."""
        num_urls, failures = 0, list[FailedDownload]()
        for result in _in_parallel(pool, attempt, urls, 4 * workers):
            num_urls += 1
            if isinstance(result, FailedDownload):
                failures.append(result)
            else:
                report.downloaded += result
                report.present += not result
        return num_urls, failures

    with unfinished.open("ab+") as log:
        log.seek(max(log.tell() - 1, 0))
        if log.read() not in (b"", b"\n"):  # a process was killed while it wrote a line
            log.write(b"\n")
        pool = ThreadPoolExecutor(workers)
        try:
            # One source after the other, so that a URL in two sources is requested once.
            found = [attempt_all(_collect_urls(source, book, report.unread, steps)) for source in sources]
            if unconnected:  # perhaps only for a few seconds, for example without a name server
                time.sleep(RECONNECT)
                fetch.allow_reconnecting()
            reconnects = False
            for source, (num_urls, failures) in zip(sources, found, strict=True):
                again = [(one.address, one.place) for one in failures if one.address in unconnected]
                failures = [one for one in failures if one.address not in unconnected] + attempt_all(again)[1]
                report.failures += failures
                if num_urls:
                    failed = frozenset(url_digest(failure.address) for failure in failures)
                    num_retryable = sum(not failure.final for failure in failures)
                    DownloadRecord(num_urls, failed, num_retryable).write(cache.root, source.download_key)
        except BaseException:
            fetch.stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    replace_file(manifest, b"".join(map(_to_json_line, report.failures)))
    unfinished.unlink(missing_ok=True)
    return report


def _to_json_line(failure: FailedDownload) -> bytes:
    return json.dumps(asdict(failure)).encode() + b"\n"


def _in_parallel[Result](
    pool: ThreadPoolExecutor, work: Callable[..., Result], items: Iterable[tuple[str, str]], most: int
) -> Iterator[Result]:
    """Call `work(*item)` for each item in a thread pool, at most `most` at a time; yield results as they complete."""
    running = set[Future[Result]]()
    for item in items:
        running.add(pool.submit(work, *item))
        if len(running) >= most:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    yield from (future.result() for future in as_completed(running))


def _collect_urls(
    source: ConversationSource, book: UrlCollector, unread: list[str], steps: Iterator[int]
) -> Iterator[tuple[str, str]]:
    """Yield (URL, location) for each URL of a source, without duplicates.

    Append the errors of unreadable samples to `unread`, and advance `steps` once for each sample.
    """
    seen = set[bytes]()
    for number, _ in zip(range(len(source)), steps, strict=False):
        book.collected.clear()
        try:
            source[number]
        except DataError as error:
            unread.append(str(error))
            continue
        for address, place in book.collected:
            digest = url_digest(address)
            if digest not in seen:
                seen.add(digest)
                yield address, place


class _RetryableError(Exception):
    """Error of an attempt to download a URL, after which another attempt may succeed.

    The arguments are (problem, server, weight). `server` is the server if it did not respond or sent a status of 5xx,
    otherwise None. A failure of a server that has never responded counts as `weight` failed URLs.
    """


class _NoConnection(DataUnavailable):
    """Error for a URL with a host that cannot be connected to.

    It is also raised without an attempt, if the connection failed for an earlier URL of the host.
    """


class Downloader:
    """Download URLs into a cache; any number of threads may use one downloader.

    A download fails temporarily if there is no response, if the response is interrupted, or if its status shows that
    the server is busy or failing (408, 425, 429 or 5xx). It is then tried again, and raises DataUnavailable after
    several attempts. A download fails permanently, and raises DataError, if the status is any other than 200, such as
    403 or 404, or if the contents are neither an image nor a video.

    A server gets no more requests if a few consecutive URLs failed in all attempts, without a response or with 5xx.
    Otherwise every URL of the server would wait for a timeout. If a server that has never responded cannot be connected
    to, it gets no more requests after its first URL; see `allow_reconnecting`.
    """

    def __init__(self, cache: UrlCache, allowed_urls: Sequence[str]) -> None:
        """Set the cache to download into, and the URL prefixes that may be requested (see `check_url_prefix`).

        A redirect is followed only to a URL with such a prefix. Raise ValueError for an invalid prefix.
        """
        for prefix in allowed_urls:
            check_url_prefix(prefix)
        self.cache, self._allowed = cache, tuple(allowed_urls)
        self.stopped = threading.Event()  # set: running downloads fail as unreachable, without further attempts
        self._failed = Counter[str]()  # number of consecutive failed URLs, by server
        self._responded = set[str]()  # servers that have responded
        self._unconnected = set[str]()  # servers that could not be connected to when their latest URL failed
        self._unfinished = cache.root / "unfinished"
        for path in self._unfinished.glob("*"):  # left by killed downloads; running ones write continuously
            with suppress(OSError):  # the download has completed, or is another user's
                if time.time() - path.stat().st_mtime > _OLD:
                    path.unlink()
        # Images and videos are already compressed, and a small compressed response may expand to a large file.
        headers = {"User-Agent": "qwen3vl-bridge", "Accept-Encoding": "identity"}
        timeout = httpx.Timeout(TIMEOUT, connect=min(CONNECT_TIMEOUT, TIMEOUT))
        self._client = httpx.Client(timeout=timeout, headers=headers, limits=httpx.Limits(max_connections=None))

    def allow_reconnecting(self) -> None:
        """Allow new requests to servers that could not be connected to, and forget their failures."""
        for server in self._unconnected:
            self._failed.pop(server, None)
        self._responded -= self._unconnected
        self._unconnected.clear()

    def __call__(self, address: str, place: str) -> None:
        """Download a URL, which was found at the location `place` in the data, into the cache.

        Raises:
            DataError: the download failed permanently.
            DataUnavailable: the download failed temporarily, or the URL is not allowed.
        """
        url, begun = check_allowed_url(address, self._allowed, place), time.monotonic()
        for attempt, pause in enumerate((*WAITS, None), start=1):
            down, weight = None, 1
            try:
                return self._attempt(url, self.cache.path_of(address), place)
            except _RetryableError as error:
                problem, down, weight = error.args
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx.DecodingError as error:
                raise DataError(place, f"found {str(url)!r} damaged ({error}), expected an image or a video") from error
            is_unconnected = weight == MOST_DOWN
            if down is not None and down not in self._responded:
                if attempt == FIRST_ATTEMPTS or time.monotonic() - begun > CONNECT_TIMEOUT:
                    pause = None
            else:
                weight = 1
            # Random, so that the threads do not retry at the same time.
            if pause is None or self.stopped.wait(pause * (0.5 + random.random())):
                if down is not None and not self.stopped.is_set():
                    (self._unconnected.add if is_unconnected else self._unconnected.discard)(down)
                    self._failed[down] += weight
                attempts = f"{attempt} attempt{'s' * (attempt > 1)} ({problem})"
                kind = _NoConnection if is_unconnected else DataUnavailable
                raise kind(place, f"{str(url)!r} could not be downloaded in {attempts}; run the download again")
        return None

    def _attempt(self, url: httpx.URL, path: Path, place: str) -> None:
        """Request a URL once, and store the contents at `path`.

        Redirects are followed here instead of by httpx, so that every URL is checked.
        """
        asked = url
        for _ in range(MOST_REDIRECTS + 1):
            server = asked.netloc.decode("ascii")
            if self._failed[server] >= MOST_DOWN:
                kind = _NoConnection if server in self._unconnected else DataUnavailable
                raise kind(
                    place,
                    f"{str(asked)!r} was not requested, because earlier requests to {server} failed; run the download "
                    "again when the server responds",
                )
            try:
                response = self._client.send(self._client.build_request("GET", asked), stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
                raise _RetryableError(f"{type(error).__name__}: {error}", server, MOST_DOWN) from error
            except (httpx.TimeoutException, httpx.NetworkError) as error:
                raise _RetryableError(f"{type(error).__name__}: {error}", server, 1) from error
            except (httpx.InvalidURL, ValueError) as error:  # some redirects to something other than a URL
                problem = f"found {str(asked)!r} redirected to an invalid URL ({error})"
                raise DataError(place, f"{problem}, expected an image or a video") from error
            with closing(response):
                self._responded.add(server)
                if response.status_code >= 500:
                    raise _RetryableError(f"status {response.status_code}", server, 1)
                self._failed.pop(server, None)
                if response.next_request is None:
                    if response.status_code in _BUSY:
                        raise _RetryableError(f"status {response.status_code}", None, 1)
                    return self._store(response, url, path, place)
            where = f"{place}: {url} redirects to another"
            asked = check_allowed_url(str(response.next_request.url), self._allowed, where)
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
            # The timeout of the library restarts with each byte: a server that sends single bytes slowly
            # would block a thread.
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
            # There are many video formats, so a video type sent by the server is not checked.
            is_video = kind.startswith("video/") or (not kind.startswith("image/") and _VIDEO.match(start))
            if not is_video and not is_image_file(unfinished):
                raise DataError(where, f"found contents that begin {start[:16]!r} ({kind or 'no type'}), {wanted}")
            address_file(path).write_text(str(url), "utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _check_size(found: int, where: str) -> None:
    if found > MOST_BYTES:
        raise DataError(where, f"found at least {found:,} bytes, expected at most {MOST_BYTES:,}")


def check_url_prefix(prefix: str) -> None:
    """Raise ValueError unless a URL prefix is "http://" or "https://", optionally with a host and a path.

    User names, queries, wildcards, white space and encoded ".." segments are not allowed.
    """
    if _is_scheme(prefix):
        return
    url = parse_url(prefix)
    if (
        url is None
        or url.scheme not in _PORTS
        or not url.host
        or re.search(r"[@?#*\\\s]", prefix)
        or _escapes_folder(url)
    ):
        raise ValueError(
            f"allowed_urls has {prefix!r}, expected a scheme and a host, and optionally a path, such as "
            "'https://images.example.org/' or 'https://images.example.org/public/'; 'https://' allows every URL "
            "of that scheme"
        )


def check_allowed_url(address: str, prefixes: Sequence[str], place: str) -> httpx.URL:
    """Return the parsed URL of a record or a redirect, if one of the allowed prefixes covers it.

    Scheme, host and port must be equal, and paths are compared by complete segments: "https://example.org/a" allows
    "https://example.org/a/1.png", but neither "https://example.org/ab" nor "https://example.org.evil.com/a".

    Raises:
        DataError: the address is not a URL.
        DataUnavailable: the URL is valid, but no prefix allows it.
    """
    url = parse_url(address)
    if url is None or not url.host:
        raise DataError(place, f"found {quote_url(address)}, expected the URL of an image or a video")
    if url.userinfo or _escapes_folder(url) or not any(_has_prefix(url, prefix) for prefix in prefixes):
        raise DataUnavailable(
            place,
            f"found the URL {quote_url(address)}, expected one that begins with {' or '.join(prefixes)} "
            "(--allowed-urls)",
        )
    return url.copy_with(fragment=None)


def _is_scheme(prefix: str) -> bool:
    return prefix.lower() in [f"{scheme}://" for scheme in _PORTS]


def _has_prefix(url: httpx.URL, prefix: str) -> bool:
    if _is_scheme(prefix):
        return prefix.lower() == f"{url.scheme}://"
    start = httpx.URL(prefix)
    server, allowed = ((one.scheme, one.raw_host, one.port or _PORTS.get(one.scheme)) for one in (url, start))
    folder = _raw_path(start).rstrip("/")
    inside = _raw_path(url).startswith(f"{folder}/") or (_raw_path(url) == folder == _raw_path(start))
    return server == allowed and inside


def _raw_path(url: httpx.URL) -> str:
    """Return the path of a URL as it is sent to the server: percent-encoded, without the query."""
    return url.raw_path.decode("ascii").partition("?")[0]


def _escapes_folder(url: httpx.URL) -> bool:
    """Return whether a URL has percent-encoded '.' or '..' segments, so that a server could leave the URL's folder.

    httpx resolves segments that are not encoded.
    """
    path = _raw_path(url)
    for _ in range(_MOST_ENCODINGS):
        path = unquote(path)
    segments = (segment.partition(";")[0] for segment in re.split(r"[/\\]", path))
    return unquote(path) != path or any(segment in (".", "..") for segment in segments)
